"""Several `vllm serve` as one engine.

    key ── its position ──▶ a server, always the same one ──▶ completion
    load ── the weights moved? ──▶ written once ──▶ every server reads them

With several ranks, rank 0 alone gives the servers their weights. It then tells the other ranks
which servers have them, and under which name. All ranks load at the same time.

After a server is lost, the others sample its completions again, whole and from the same seeds. The
server stays out until a later `load` gets an answer from it and gives it the weights. If no server
is left, the completions wait for any of them to come back, at most `restart_wait` seconds. Then
each waiting rank gives this server its own copy of the weights: rank 0 may have played its episodes
already, and wait for the others.

If a healthy server loses the same completion three times, it is an error.
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

PUSH = 600.0  # seconds for a server to read weights
POLL = 0.5  # seconds between two looks at absent servers
MOST_WAITS = 5  # for all servers, between two loads
MOST_LOSSES = 3  # of one completion, by a healthy server


class Missed(NamedTuple):
    """Addresses of the servers that a rank has lost since the load before."""

    urls: tuple[str, ...]


class Served(NamedTuple):
    """A server's state after a push, in the view of rank 0."""

    has: bool  # the due weights
    name: str
    adapter: str
    max_length: int


class ServerPool:
    """The engine on top of servers.

    Args:
      merge: under LoRA, push base + adapter as whole weights. Otherwise a server has the base of an
        adapter from its start.
      restart_wait: seconds for servers to come (back) if none is left.
      folder: for their weights; None is a temporary folder of this machine.
    """

    def __init__(
        self, servers: Sequence[Server], *, merge: bool, restart_wait: float, folder: str | None
    ):
        self.servers = servers
        self.merge = merge
        self.restart_wait = restart_wait
        self.folder = make_temporary_folder(self, folder)
        self.due: Any = None  # mark of the weights for the completions
        self.bringing: asyncio.Task[None] | None = None  # gives them to the servers
        self.pushed = self.waits = 0
        self.kept = self.folder / "none"  # the servers' adapter
        self.losses = [server.losses for server in servers]  # at the load before

    async def load(self, policy: Policy, version: int) -> None:
        """Give the weights to every server that answers, if they have moved. With several ranks all
        of them call this at the same time, and rank 0 does it.

        Raises: EngineError if an address has never answered, a server refuses, or none comes back;
          RankError with its text on the other ranks.
        """
        if self.bringing is not None:
            self.bringing.cancel()  # of abandoned completions
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
        """One completion, by the server of this key. Raises: EngineError if a server loses it three
        times and takes the weights again each time."""
        lost: list[Server] = []
        waits = self.waits
        while True:
            server = await self._choose_server(key)
            losses = server.losses
            version = self.version
            if self.waits != waits:  # the servers had gone away
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
        return  # nothing is kept here

    def forget(self) -> None:
        """Forget the servers' weights: others may have given them new ones since."""
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
        """Choose the server at the key's position, so that all turns of an episode find their
        prefix in its cache; else another one."""
        while not (able := self._list_able()):
            if self.bringing is None or self.bringing.done():
                self.bringing = asyncio.create_task(self._bring())
            await asyncio.shield(self.bringing)
        home = self.servers[key % len(self.servers)]
        return home if home in able else able[key // len(self.servers) % len(able)]

    def _lose(self, server: Server, losses: int, why: Lost) -> None:
        """Leave a server out. Among its running completions, the first to notice says so."""
        if server.losses == losses:
            server.forget()
            print(
                f"rlkit: warning: the vLLM server {server.url} no longer answers ({why}); what it"
                " was sampling is sampled again, from the same seeds, and it is left out until it"
                " answers when weights are loaded",
                file=sys.stderr,
            )

    async def _bring_for_all(self) -> None:
        """Rank 0 brings the weights. Then all ranks ask the same servers for the same names."""
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
                    server.forget()  # it may have been started again
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
        """Give the servers the due weights, and wait for a server if none is left."""
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
        """Write the due weights once, and make every answering server without them read them."""
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
        # the adapter's name, unlike that of any other run
        folder = self.folder / f"{self.folder.name}-{self.pushed}"
        try:
            try:
                (
                    save_adapter(model, folder)
                    if adapted
                    else save_weights(model, folder, merge=self.merge)
                )
            except Exception as error:  # safetensors has an error of its own
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
        """Raise EngineError if two servers serve different models: an adapter would be sampled on
        another base."""
        named = {server.name: server for server in reversed(self.servers) if server.name}
        if len(named) > 1:
            (one, first), (other, second) = list(named.items())[:2]
            raise EngineError(
                f"generation.engine.addresses: {first.url} serves {one!r} and {second.url} serves"
                f" {other!r}; start all with the same model, under the same --served-model-name"
            )

    async def _has_met(self, server: Server) -> bool:
        """Whether it answers. Raises: EngineError if an address from outside rlkit never has."""
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
