"""Several `vllm serve` processes as one engine.

    key ── its position ──▶ a server, always the same one ──▶ completion
    load ── the weights moved? ──▶ written once ──▶ every server reads them

With several ranks, only rank 0 pushes weights to the servers. It then tells the other ranks which
servers have the weights, and under which name. All ranks load at the same time.

After a server is lost, the other servers sample its completions again, from the beginning and from
the same seeds. The lost server is not used until a later `load` gets an answer from it and pushes
the weights to it.

If no server is left, the completions wait at most `restart_wait` seconds for any server to come
back. Then each waiting rank pushes its own copy of the weights to this server. Rank 0 cannot do it
for them: it may have played all its episodes already, and wait for the other ranks.

If a healthy server loses the same completion three times, an error is raised.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.distributed import ranks
from rlkit.errors import EngineError
from rlkit.extras.vllm.server import Lost, NotAsked, Server, end
from rlkit.extras.vllm.weights import (
    adapter_mark,
    base_mark,
    lora_rank,
    make_temporary_folder,
    save_adapter,
    save_weights,
)
from rlkit.types import Generation, Policy, SamplingParams

PUSH = 600.0  # the most seconds for a server to read weights
POLL = 0.5  # seconds between two requests to absent servers
MOST_WAITS = 5  # the most waits with no server left, between two loads
MOST_LOSSES = 3  # a healthy server may lose the same completion fewer times than this


class Missed(NamedTuple):
    """The addresses of the servers that a rank has lost since the previous load."""

    urls: tuple[str, ...]


class Served(NamedTuple):
    """The state of a server after a push, as rank 0 knows it."""

    has: bool  # whether the server has the present weights
    name: str
    adapter: str
    max_length: int


class ServerPool:
    """Sample with several servers.

    Args:
      merge: under LoRA, push base + adapter as whole weights. Otherwise only the adapter is pushed,
        and a server must have the adapter's base from its start.
      restart_wait: the most seconds to wait for a server to start or come back if none is left.
      folder: a folder for passing weights to the servers; None is a temporary folder of this
        machine.
    """

    def __init__(
        self, servers: Sequence[Server], *, merge: bool, restart_wait: float, folder: str | None
    ):
        self.servers = servers
        self.merge = merge
        self.restart_wait = restart_wait
        self.folder = make_temporary_folder(self, folder)
        self.due: Any = None  # fingerprint of the weights that the servers must have
        self.bringing: asyncio.Task[None] | None = None  # the task that pushes these weights
        self.pushed = self.waits = 0
        self.kept = self.folder / "none"  # the folder of the adapter used by the servers
        self.losses = [server.losses for server in servers]  # counts at the previous load

    async def load(self, policy: Policy, version: int) -> None:
        """Push the weights, if they have changed, to every server that answers. With several ranks,
        all of them call this at the same time, and rank 0 pushes.

        Raises: EngineError if an address has never answered, if a server refuses the weights, or if
        no server comes back. RankError with the same text on the other ranks.
        """
        if self.bringing is not None:
            self.bringing.cancel()  # it belonged to completions that were abandoned
        self.policy = policy
        self.version = version
        self.waits = 0
        self.adapted = not self.merge and lora_rank(policy.model) is not None
        self.due = (
            self.adapted,
            (
                adapter_mark(policy.model)
                if self.adapted
                else base_mark(policy.model, merge=self.merge)
            ),
        )
        bring = self._bring if ranks.size() == 1 else self._bring_for_all
        self.bringing = asyncio.create_task(bring())
        await self.bringing

    async def generate(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> Generation:
        """Sample one completion on the server of this key.

        Raises: EngineError if a server loses the completion three times, and accepts the weights
        again each time.
        """
        lost: list[Server] = []
        waits = self.waits
        while True:
            server = await self._choose_server(key)
            losses = server.losses
            version = self.version
            if self.waits != waits:  # all servers were gone in the meantime
                lost.clear()
                waits = self.waits
            try:
                reply = await server.complete(self.policy, prompt_ids, seed, params)
            except NotAsked as error:
                self._lose(server, losses, error)
            except Lost as error:
                self._lose(server, losses, error)
                lost.append(server)
                if lost.count(server) == MOST_LOSSES:
                    raise EngineError(
                        f"generation.engine.addresses: {server.url} lost the same completion"
                        f" {MOST_LOSSES} times ({error}) although it answers: a prompt of"
                        f" {len(prompt_ids)} tokens, max_new_tokens={params.max_new_tokens}. Look"
                        " into its log, and at the time and size limits of a proxy in front of it;"
                        " or lower generation.max_new_tokens"
                    ) from error
            else:
                return reply._replace(versions=((0, version),))

    def release(self, key: int) -> None:
        return  # the pool keeps nothing for an episode

    def forget(self) -> None:
        """Forget the weights of the servers: another process may have pushed other weights
        since."""
        for server in self.servers:
            server.has = None

    def close(self) -> None:
        for server in self.servers:
            if server.process is not None:
                end(server.process)

    # -------------------------------------------------------------------- who samples, who has what

    def _list_able(self) -> list[Server]:
        return [server for server in self.servers if server.has == self.due]

    async def _choose_server(self, key: int) -> Server:
        """Choose the server at the key's position. So all turns of an episode find their prefix in
        this server's cache. If this server is lost, choose another server."""
        while not (able := self._list_able()):
            if self.bringing is None or self.bringing.done():
                self.bringing = asyncio.create_task(self._bring())
            await asyncio.shield(self.bringing)
        home = self.servers[key % len(self.servers)]
        return home if home in able else able[key // len(self.servers) % len(able)]

    def _lose(self, server: Server, losses: int, why: Lost) -> None:
        """Stop using a server. The first of its running completions to notice the loss prints a
        warning."""
        if server.losses == losses:
            server.forget()
            print(
                f"rlkit: warning: the vLLM server {server.url} no longer answers ({why}); what it"
                " was sampling is sampled again, from the same seeds, and it is left out until it"
                " answers when weights are loaded",
                file=sys.stderr,
            )

    async def _bring_for_all(self) -> None:
        """Push the weights from rank 0, and tell all ranks the result. Then all ranks send requests
        to the same servers under the same names."""
        now = [server.losses for server in self.servers]
        missed = [
            server.url
            for server, losses, before in zip(self.servers, now, self.losses, strict=True)
            if losses != before
        ]
        found = ranks.gather(lambda: Missed(tuple(missed)))
        if not all(isinstance(own, Missed) for own in found):
            raise EngineError(
                "generation.engine.addresses: a rank samples while the others do something else;"
                " with several ranks call collect on all of them"
            )
        failure: Exception | None = None
        if ranks.rank() == 0:
            for server in self.servers:
                if any(server.url in own.urls for own in found):
                    server.forget()  # the server may have been started again, without the weights
            try:
                await self._bring()
            except Exception as error:
                failure = error

        def told() -> list[Served]:
            if failure is not None:
                raise failure
            return [
                Served(server.has == self.due, server.name, server.adapter, server.max_length)
                for server in self.servers
            ]

        for server, served in zip(self.servers, ranks.broadcast(told), strict=True):
            if not served.has:
                server.forget()
                continue
            server.has = self.due
            server.name = served.name
            server.adapter = served.adapter
            server.max_length = served.max_length
        self.losses = [server.losses for server in self.servers]

    async def _bring(self) -> None:
        """Push the present weights to the servers. If no server is left, wait for one."""
        await self._push()
        if self._list_able():
            return
        self.waits += 1
        where = f"generation.engine.addresses: {', '.join(server.url for server in self.servers)}"
        if self.waits > MOST_WAITS:
            raise EngineError(
                f"{where}: all were lost {self.waits} times in one rollout; look into their logs"
            )
        print(
            f"rlkit: {where}: none answers; waiting up to {self.restart_wait:g} s", file=sys.stderr
        )
        until = time.monotonic() + self.restart_wait
        while not self._list_able():
            for server in self.servers:
                status = None if server.process is None else server.process.poll()
                if status is not None:
                    raise EngineError(
                        "the vLLM server that rlkit started ended with status"
                        f" {status}{server.obituary()}"
                    )
            if time.monotonic() >= until:
                waited = (
                    f"{where}: no answer for {self.restart_wait:g} s"
                    " (generation.engine.restart_wait)"
                )
                raise EngineError(waited + self.servers[0].obituary())
            await asyncio.sleep(POLL)
            await self._push()

    async def _push(self) -> None:
        """Write the present weights to a folder, and make each answering server without these
        weights read them."""
        due = self.due
        adapted = self.adapted
        model = self.policy.model
        lacking = [
            server for server in self.servers if server.has != due and await self._has_met(server)
        ]
        if not lacking:
            return
        self._agree()
        self.pushed += 1
        # the folder's name is also the adapter's name, and no other run uses it
        folder = self.folder / f"{self.folder.name}-{self.pushed}"
        try:
            try:
                (
                    save_adapter(model, folder)
                    if adapted
                    else save_weights(model, folder, merge=self.merge)
                )
            except Exception as error:  # safetensors raises its own kind of error
                raise EngineError(
                    f"generation.engine.folder={self.folder}: the weights of version {self.version}"
                    f" cannot be written there ({error}); make room, or name another folder that"
                    " all servers see"
                ) from error
            await asyncio.gather(
                *(self._give(server, folder, due, adapted=adapted) for server in lacking)
            )
        finally:
            shutil.rmtree(self.kept if adapted else folder, ignore_errors=True)
            self.kept = folder if adapted else self.kept

    def _agree(self) -> None:
        """Raise EngineError if two servers serve different models. The same adapter would then be
        sampled on different bases."""
        named = {server.name: server for server in reversed(self.servers) if server.name}
        if len(named) > 1:
            (one, first), (other, second) = list(named.items())[:2]
            raise EngineError(
                f"generation.engine.addresses: {first.url} serves {one!r} and {second.url} serves"
                f" {other!r}; start all with the same model, under the same --served-model-name"
            )

    async def _has_met(self, server: Server) -> bool:
        """Return whether the server has told the name of its model, asking it if necessary.

        Raises: EngineError if a server not started by rlkit has never answered.
        """
        try:
            if not server.name:
                await server.meet()
        except Lost as error:
            if not server.losses and server.process is None:
                raise EngineError(
                    f"generation.engine.addresses={server.url}: nothing answers there ({error});"
                    " start it with `vllm serve`, or have one started with"
                    " generation.engine.addresses=[start]"
                ) from error
        return bool(server.name)

    async def _give(self, server: Server, folder: Path, due: Any, *, adapted: bool) -> None:
        losses = server.losses
        server.has = None
        try:
            async with asyncio.timeout(PUSH):
                await (server.push_adapter if adapted else server.push_weights)(folder)
            server.has = due
        except TimeoutError as error:
            raise EngineError(
                f"the vLLM server {server.url} has not taken the weights of version {self.version}"
                f" in {PUSH:g} s; look into its log, and whether it can read"
                " generation.engine.folder"
            ) from error
        except Lost as error:
            self._lose(server, losses, error)
