"""Connect to tool servers of the Model Context Protocol. There is one connection per episode, or
one for all episodes. Each connection has its own asyncio task.

All connections live in the event loop of one background thread, because the loops of episodes come
and go. If a server dies, the HTTP client cancels the task that entered it and raises an exception
group. So each connection has its own task: only this task is cancelled, and only the episodes that
wait for this server get an error.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Coroutine, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from rlkit.errors import ConfigError, RLKitError, install
from rlkit.extras.programs._commands import find_files
from rlkit.extras.programs._processes import GUARD
from rlkit.sandbox.process import make_folder

T = TypeVar("T")
# error codes of the package mcp
CALL_TIMED_OUT = -32001
CLOSED = -32000
GRACE = 2.0  # seconds after the client's own time limit until a call is given up
ENDING = 10.0  # seconds for a connection to end, and again after its cancellation
THREAD = "tool servers"
KEYS = {"command", "url", "env", "cwd", "shared", "tools"}
EPISODE = "episode"  # as `cwd`: a new folder for each process
OWN = "{folder}"  # path of this folder, in a command or its env
SAMPLE = "{sample}"  # number of the episode's sample, in a command or its env


class ServerFailed(RLKitError, RuntimeError):
    """Say that a server could not be started, or has died. The message names the server."""


class ToolServer(NamedTuple):
    """Describe a server in a config: a command that talks over standard input and output, or an
    address over HTTP."""

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = {}
    cwd: str | None = None  # working folder; `episode`: a new folder for each process
    # whether all episodes share one connection; if False, each episode has its own process
    shared: bool = False
    tools: tuple[str, ...] | None = None  # names of the tools to use; None: all


class ListedTool(NamedTuple):
    """Hold a tool as its server describes it."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema


def read_server(name: str, given: Any) -> ToolServer:
    """Read a server from its config. The config is a command as a list, a URL, or a mapping with
    one of the two.

    Raises: ConfigError naming the mistake.
    """
    where = f"environment.servers.{name}"
    if isinstance(given, str):
        given = {"url": given}
    elif isinstance(given, list | tuple):
        given = {"command": given}
    if not isinstance(given, Mapping) or ("command" in given) == ("url" in given):
        raise ConfigError(
            f"{where} is {given!r:.200}; give a command as a list, [python, my_server.py], or a"
            " URL, http://127.0.0.1:8000/mcp"
        )
    unknown = given.keys() - KEYS
    if unknown:
        raise ConfigError(
            f"{where}.{min(unknown)} is no key of a server; the keys are {', '.join(sorted(KEYS))}"
        )
    command = tuple(map(str, given.get("command") or ()))
    if given.get("cwd") == EPISODE and command:
        command = tuple(find_files(command))
    url = str(given.get("url") or "")
    if url and not url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}.url is {url!r}; it begins with http:// or https://")
    if not url and (
        not command or shutil.which(command[0], path=(given.get("env") or {}).get("PATH")) is None
    ):
        raise ConfigError(
            f"{where}.command is {list(command)}; its first word is the name or the path of a"
            " program that can be started"
        )
    if url and given.get("shared") is False:
        raise ConfigError(
            f"{where}.shared=false: the episodes of a server over HTTP share it; give its command"
            " for a process each"
        )
    env = {str(k): str(v) for k, v in (given.get("env") or {}).items()}
    shared = bool(url or given.get("shared"))
    tools = given.get("tools")
    server = ToolServer(
        name, command, url, env, given.get("cwd"), shared, None if tools is None else tuple(tools)
    )
    if shared and (needs_folder(server) or SAMPLE in join_words(server)):
        raise ConfigError(
            f"{where}: cwd={EPISODE}, {OWN} and {SAMPLE} belong to one episode, and all episodes"
            " share this server; leave out shared"
        )
    return server


def join_words(server: ToolServer) -> str:
    """Return the words of a server's config that may contain {folder} or {sample}."""
    return "\n".join([*server.command, *server.env.values()])


def needs_folder(server: ToolServer) -> bool:
    """Return whether each process of a server has its own folder."""
    return server.cwd == EPISODE or OWN in join_words(server)


def require_package() -> None:
    """Raise ConfigError if the package `mcp` is not installed."""
    if find_spec("mcp") is None:
        raise ConfigError(f"environment=mcp needs the package mcp: {install('mcp')}")


# ------------------------------------------------------------------------------------- a connection


class Connection:
    """Hold the client of one server. One task enters the client, waits, and leaves it. Each call is
    a separate task."""

    def __init__(
        self, server: ToolServer, start_timeout: float, env: Mapping[str, str], sample: int = 0
    ):
        self.server = server
        self.sample = sample
        self.failure = ""
        self.start_timeout = start_timeout
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  what the server writes to standard error
        self.over = asyncio.Event()
        self.client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.owner = asyncio.create_task(self._own(env))

    async def _own(self, env: Mapping[str, str]) -> None:
        reason = f"it did not answer within {self.start_timeout:g} s"
        held = make_folder() if needs_folder(self.server) else nullcontext("")
        try:
            with held as where:
                connected = self._client(env, where)
                async with asyncio.timeout(self.start_timeout) as limit, connected as client:
                    limit.reschedule(None)
                    reason = "the connection was closed"
                    self.client.set_result(client)
                    await self.over.wait()
        except (
            BaseException
        ) as error:  # also CancelledError and groups, which is how a dead server shows
            if not isinstance(error, TimeoutError):
                reason = (
                    f"{reason} ({_describe_innermost(error)})"
                    if self.client.done()
                    else _describe_innermost(error)
                )
        if not self.over.is_set():
            self._fail(reason)
        if not self.client.done():
            self.client.set_exception(
                ServerFailed(self.failure or f"the server {self.server.name!r} was closed")
            )
            # mark the error as read; otherwise asyncio complains if no task awaits it
            self.client.exception()
        self.log.close()

    def _fail(self, reason: str) -> None:
        if not self.failure:
            self.failure = f"the server {self.server.name!r} failed: {reason}{self._last_words()}"

    async def ready(self) -> Any:
        """Wait until the client is connected, and return it. Raises: ServerFailed if the server
        cannot be started."""
        await asyncio.wait({self.client}, timeout=self.start_timeout + GRACE)
        if not self.client.done():  # the package has not kept its own time limit
            self._fail(f"it did not answer within {self.start_timeout:g} s")
            raise ServerFailed(self.failure)
        return self.client.result()

    def _client(self, env: Mapping[str, str], where: str) -> Any:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        # silence the package's loggers, because this file reports the problems of servers
        for name in ("mcp", "client"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if self.server.url:
            return Client(self.server.url)
        filled = partial(fill_words, where=where, sample=self.sample)
        guard = ["-I", "-S", "-B", str(GUARD), "keep", str(os.getpid())]
        own = StdioServerParameters(
            command=sys.executable,
            args=[*guard, *map(filled, self.server.command)],
            env={name: filled(value) for name, value in self.server.env.items()} | dict(env),
            cwd=where if self.server.cwd == EPISODE else self.server.cwd,
        )
        return Client(stdio_client(own, errlog=self.log))

    def _last_words(self) -> str:
        if self.log.closed:
            return ""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - 2000))
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return f"; it wrote: {lines[-1]:.300}" if lines else ""

    async def answer(self, request: Coroutine[Any, Any, T], seconds: float | None) -> T:
        """Return the client's answer to a request.

        Raises: ServerFailed if the server dies meanwhile. TimeoutError if it does not answer in
        time. ValueError with a message if the server refuses the request, or if the client refuses
        the server's answer.
        """
        from mcp import MCPError

        task = asyncio.ensure_future(request)
        try:
            limit = None if seconds is None else seconds + GRACE
            await asyncio.wait(
                {task, self.owner}, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            if not task.done() and not self.owner.done():
                raise TimeoutError
            try:
                return task.result()
            except (asyncio.CancelledError, asyncio.InvalidStateError) as error:
                why: BaseException = error
            except MCPError as error:
                if error.error.code == CALL_TIMED_OUT:
                    raise TimeoutError from None
                if error.error.code != CLOSED:
                    raise ValueError(str(error)) from None
                why = error
            except Exception as error:
                # the client refuses a result that does not fit, and its server lives
                if isinstance(error, RuntimeError | ValueError) and not self.owner.done():
                    raise ValueError(_describe_innermost(error)) from None
                why = error
            self._fail(_describe_innermost(why))
            self.over.set()
            raise ServerFailed(self.failure)
        finally:
            task.cancel()

    async def close(self) -> None:
        """Close the connection, end the server's process if this connection started it, and wait
        for its end. A process that does not end is killed by the kernel when this process ends."""
        self.over.set()
        if self.client.done():
            await asyncio.wait({self.owner}, timeout=ENDING)
        if not self.owner.done():
            self.owner.cancel()
            await asyncio.wait({self.owner}, timeout=ENDING)


def fill_words(text: str, *, where: str, sample: int) -> str:
    """Replace {folder} and {sample} in a word of a command."""
    return text.replace(OWN, where).replace(SAMPLE, str(sample))


def _describe_innermost(error: BaseException) -> str:
    """Describe the first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__


# -------------------------------------------------------------------------------------- all of them


class Pool:
    """Hold the servers of an environment. Its coroutines run in the background loop.
    `await_in_background` awaits them from any other loop.

    The first call that needs a connection opens it. If a shared server has died, its connection is
    opened again. The connection of a single episode is opened only once.
    """

    def __init__(self, servers: Mapping[str, ToolServer], start_timeout: float):
        self.servers = servers
        self.start_timeout = start_timeout
        self.connections: dict[tuple[str, int | None], Connection] = {}
        self.listed: dict[str, list[ListedTool]] = {}
        self.listing = asyncio.Lock()
        # ends all connections when the environment is deleted, or before the interpreter ends
        weakref.finalize(self, _end_connections, self.connections)

    async def tools(self) -> dict[str, list[ListedTool]]:
        """Return the tools of every server. Each server is asked once. Raises: ConfigError if a
        server's tools cannot be listed."""
        async with self.listing:
            for name, server in self.servers.items():
                if name not in self.listed:
                    try:
                        self.listed[name] = await self._listed(server)
                    except (ServerFailed, TimeoutError, ValueError) as error:
                        raise ConfigError(
                            f"environment.servers.{name}: its tools cannot be listed:"
                            f" {error or 'no answer'}"
                        ) from error
        return self.listed

    async def _listed(self, server: ToolServer) -> list[ListedTool]:
        connection = self._connection(server, None, {})
        client = await connection.ready()
        cursor = None
        found: list[ListedTool] = []
        while True:
            page = await connection.answer(client.list_tools(cursor=cursor), self.start_timeout)
            found += [
                ListedTool(tool.name, tool.description or "", tool.input_schema)
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                break
        if not server.shared:
            await self._close(server, None)
        names = {tool.name for tool in found}
        missing = [name for name in server.tools or () if name not in names]
        if missing:
            raise ValueError(
                f"it has no tool {missing[0]!r}; it has {', '.join(sorted(names)) or 'none'}"
            )
        return [tool for tool in found if server.tools is None or tool.name in server.tools]

    async def call(
        self,
        name: str,
        episode: int,
        sample: int,
        env: Mapping[str, str],
        tool: str,
        given: Mapping[str, Any],
        seconds: float | None,
    ) -> str:
        """Return the result of a call as text. Raises: ValueError if the tool reports a failure,
        and the errors of `Connection.answer`."""
        server = self.servers[name]
        connection = (
            self._connection(server, None, {})
            if server.shared
            else self._connection(server, episode, env, sample)
        )
        client = await connection.ready()
        result = await connection.answer(
            client.call_tool(tool, dict(given), read_timeout_seconds=seconds), seconds
        )
        if result.is_error:
            raise ValueError(_text(result) or "the tool failed and said no more")
        return _text(result)

    def _connection(
        self, server: ToolServer, episode: int | None, env: Mapping[str, str], sample: int = 0
    ) -> Connection:
        there = self.connections.get((server.name, episode))
        if there is None or (server.shared and (there.over.is_set() or there.owner.done())):
            there = self.connections[server.name, episode] = Connection(
                server, self.start_timeout, env, sample
            )
        return there

    async def _close(self, server: ToolServer, episode: int | None) -> None:
        connection = self.connections.pop((server.name, episode), None)
        if connection:
            await connection.close()

    async def leave(self, episode: int) -> None:
        """Close the connections of an episode and end its processes."""
        await asyncio.gather(*(self._close(server, episode) for server in self.servers.values()))


def _end_connections(connections: dict[tuple[str, int | None], Connection]) -> None:
    """End every process and connection of a deleted pool."""

    async def end() -> None:
        await asyncio.gather(*(connection.close() for connection in connections.values()))

    if connections:
        ending = asyncio.run_coroutine_threadsafe(end(), get_background_loop())
        if threading.current_thread().name != THREAD:
            with suppress(Exception):
                ending.result(timeout=10)


def _text(result: Any) -> str:
    """Write the blocks of a result as text for the policy. A text block is written as it is, and
    any other block as the name of its type."""
    parts = []
    for block in result.content:
        resource = getattr(block, "resource", None)
        text = getattr(block, "text", None) or getattr(resource, "text", None)
        parts.append(
            text if text is not None else f"[{getattr(block, 'mime_type', None) or block.type}]"
        )
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content)
    return "\n".join(parts)


@functools.cache
def get_background_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the thread with all connections. It is a daemon thread, and the
    processes of its servers end with this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=THREAD, daemon=True).start()
    return loop


async def await_in_background(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine in the background loop. If this call is cancelled, the coroutine is
    cancelled too."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, get_background_loop()))
