"""Serve the endpoint on loopback: receive requests of programs and send the policy's replies. There
is one server per event loop, and one token per episode.

A token gives access only to its own episode. A client's mistake is answered with a status and a
sentence. A wrong token is answered before the body is read. A reply is recorded before its first
byte is written.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from rlkit.extras.programs.contract import Ask, RequestRefused
from rlkit.extras.programs.conversations import LARGE, REMEMBERED
from rlkit.extras.programs.settings import CHAT, MESSAGES
from rlkit.extras.programs.stopping import cut_at
from rlkit.extras.programs.wire import WIRES, ChatRequest, Reply, Wire, read_request
from rlkit.system.deadline import run_in_worker
from rlkit.system.loops import wind_up
from rlkit.types import Step

MAX_BODY = 4 << 20  # largest size of a request, in bytes
BODY_SECONDS = 30.0  # time for a whole request to arrive, counted from its head
IDLE_SECONDS = 75.0  # time for a connection to send the head of the next request
# time to write an answer into the kernel's buffers, which hold at least 100 kB
ANSWER_SECONDS = 60.0
# without this header, clients repeat a request after 409 and 5xx
FINAL = {"x-should-retry": "false"}
MOST_CONNECTIONS = 4096  # connections of all episodes; fewer if the process may open only few files
ACCEPTED = 64  # connections accepted at once, before their number is checked
# Otherwise aiohttp would print a traceback for each request that is not HTTP. Its client gets
# status 400.
QUIET = logging.Logger("rlkit.programs", logging.CRITICAL)
COUNT = f"{MESSAGES}/count_tokens"
# has the fields of both protocols
MODEL = {
    "id": "policy",
    "object": "model",
    "created": 0,
    "owned_by": "rlkit",
    "type": "model",
    "display_name": "policy",
    "created_at": "1970-01-01T00:00:00Z",
}
MODELS = {
    "/v1/models": {"object": "list", "data": [MODEL], "has_more": False},
    "/v1/models/policy": MODEL,
}


class Refused(Exception):
    """Say why a request gets no reply because of a mistake of its client."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class Door:
    """Hold an episode's state at the server.

    Args:
      ask: function that returns the reply to a conversation.
      ignore: whether unsupported settings of requests have no effect (`refuse_settings`). If False,
        the requests are refused.
    """

    def __init__(self, ask: Ask, *, ignore: bool = False):
        self.ask = ask
        self.ignore = ignore
        self.token = f"rlkit-{secrets.token_hex(16)}"
        self.open = True
        # digest of a request → the last reply to this request
        self.replies: dict[bytes, asyncio.Task[Step]] = {}
        self.numbers: dict[asyncio.Task[Step], int] = {}
        self.retries = 0
        self.given = count()  # numbers of the replies
        self.refused = 0
        self.refusal = ""  # why the first of them was refused
        self.created = int(time.time())

    def reply(self, request: ChatRequest, digest: bytes, *, retry: bool) -> asyncio.Task[Step]:
        """Start the reply to a request. A retried request gets the recorded reply, or the reply in
        progress. A reply goes on even if its client leaves.

        A request without the header of a retry is sampled again, even if its body is known, because
        a program may want several replies.
        """
        known = self.replies.get(digest)
        if (
            retry
            and known is not None
            and not (known.done() and (known.cancelled() or known.exception()))
        ):
            self.retries += 1
            return known
        asked = self.ask(
            request.messages, request.tools, request.limit, stop=request.stop, size=request.size
        )
        task = asyncio.ensure_future(asked)
        # mark an error as read, because the client may be gone
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        self.numbers[task] = next(self.given)
        self.replies[digest] = task
        for old in [done for done in self.numbers if done.done()][:-REMEMBERED]:
            del self.numbers[old]
        self.replies = {d: known for d, known in self.replies.items() if known in self.numbers}
        return task

    def refuse(self, sentence: str) -> None:
        """Count a refused request, and keep the first sentence."""
        self.refused += 1
        self.refusal = self.refusal or sentence

    def counts(self) -> dict[str, Any]:
        """Return the number of retries, the number of refused requests and the first refusal, for
        the episode's metadata. Entries of 0 or "" are left out."""
        refused = {"refused": self.refused, "refusal": self.refusal}
        return {key: value for key, value in {"retries": self.retries, **refused}.items() if value}

    async def close(self) -> None:
        """End the episode: give up replies in progress, and answer later requests with 409."""
        self.open = False
        for task in self.numbers:
            task.cancel()
        if self.numbers:
            await wind_up(self.numbers.keys())
        self.replies.clear()
        self.numbers.clear()


class Endpoint:
    """Run the endpoint of one event loop."""

    def __init__(self) -> None:
        self.doors: dict[str, Door] = {}
        self.users = 0
        self.runner: web.AppRunner | None = None
        self.listener: asyncio.Server | None = None
        self.started: asyncio.Lock = asyncio.Lock()
        self.port = 0
        self.most = min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self.busy: set[Any] = set()  # connections with a request in progress

    async def start(self, port: int = 0) -> None:
        """Listen on loopback. Raises: OSError if the port is taken."""
        async with self.started:
            if self.runner is not None:
                return
            line = socket.create_server(("127.0.0.1", port))
            app = web.Application(client_max_size=MAX_BODY)
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(
                app,
                access_log=None,
                logger=QUIET,
                handle_signals=False,
                shutdown_timeout=0.2,
                keepalive_timeout=IDLE_SECONDS,
            )
            await runner.setup()
            accept = partial(self._accept, runner)
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(_pass_over_full)
            self.listener = await loop.create_server(accept, sock=line, backlog=ACCEPTED)
            # many programs begin together, and the kernel holds their connections until then
            line.listen(1024)
            self.runner = runner
            self.port = line.getsockname()[1]

    def _accept(self, runner: web.AppRunner) -> asyncio.BaseProtocol:
        """Accept a connection. If there are too many, close the oldest connection without a request
        in progress. If every connection has a request in progress, close the new connection."""
        server = runner.server
        assert server is not None
        open_ones = {line: line.transport for line in server.connections if line.transport}
        lines = {line: own for line, own in open_ones.items() if not own.is_closing()}
        if len(lines) >= self.most:
            idle = next((own for line, own in lines.items() if line not in self.busy), None)
            if idle is None:
                return Closing()
            idle.abort()
        return server()

    async def stop(self) -> None:
        """Close the socket and all connections, even connections with an unread answer."""
        if self.runner is not None:
            runner = self.runner
            self.runner = None
            if self.listener is not None:
                self.listener.close()
            lines = [c.transport for c in runner.server.connections] if runner.server else []
            await runner.cleanup()
            for line in lines:
                if line is not None:
                    line.abort()
            await asyncio.sleep(0)  # the loop closes the connections during this wait

    async def handle(self, request: web.Request) -> web.Response:
        """Answer any request. If the client does not read its answer in time, its connection is
        closed."""
        self.busy.add(request.protocol)
        try:
            return await self._handled(request)
        finally:
            self.busy.discard(request.protocol)

    async def _handled(self, request: web.Request) -> web.Response:
        response = await self._response(request)
        line = request.transport
        if line is not None:
            # so a write ends only when the kernel has all its bytes
            line.set_write_buffer_limits(0)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    await response.prepare(request)
                    await response.write_eof()
            except TimeoutError:
                line.abort()
            except ConnectionError:
                pass  # the client has left
        return response

    async def _response(self, request: web.Request) -> web.Response:
        path = request.path.rstrip("/")
        route = MESSAGES if path == COUNT else path
        wire = WIRES.get(route)
        written = wire or WIRES[CHAT]
        given = request.headers.get("Authorization", "").removeprefix(
            "Bearer "
        ).strip() or request.headers.get("x-api-key", "")
        door = self.doors.get(given)
        if door is None:
            return refuse_request(
                written,
                401,
                "the API key names no episode; a program finds its own in OPENAI_API_KEY or"
                " ANTHROPIC_API_KEY",
            )
        if not door.open:
            return refuse_request(written, 409, "the episode is over")
        if path in MODELS and request.method == "GET":
            return web.json_response(MODELS[path])
        try:
            if wire is None:
                known = ", ".join((*WIRES, COUNT, *MODELS))
                raise Refused(404, f"there is no {path[:100]!r} here; there are {known}")
            if request.method != "POST":
                raise Refused(405, f"{path} takes POST")
            asked, digest = await self._read(request, route, door)
            if path == COUNT:
                tokens = await door.ask.count_tokens(asked.messages, asked.tools, size=asked.size)
                return web.json_response({"input_tokens": tokens})
            return await self._answered(request, wire, door, asked, digest)
        except (RequestRefused, Refused) as error:
            door.refuse(str(error))
            return refuse_request(written, getattr(error, "status", 400), str(error))
        except ConnectionError:  # the client has left
            raise
        except Exception as error:
            why = f"the endpoint failed: {type(error).__name__}: {error}"
            door.refuse(why)
            return refuse_request(written, 500, why)

    async def _read(
        self, request: web.Request, route: str, door: Door
    ) -> tuple[ChatRequest, bytes]:
        """Read a request and the digest of its body. A large request is read in a thread. Raises:
        Refused."""
        try:
            # a body with a too large length is not read at all; a body without a length is counted
            # as it arrives
            if (request.content_length or 0) > MAX_BODY:
                raise web.HTTPRequestEntityTooLarge(MAX_BODY, request.content_length or 0)
            async with asyncio.timeout(BODY_SECONDS):
                raw = await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise Refused(413, f"a request has at most {MAX_BODY >> 20} MiB") from None
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        except web.RequestPayloadError as error:
            raise Refused(400, f"the body cannot be decoded: {error}") from error

        def read() -> tuple[ChatRequest, bytes]:
            digest = hashlib.sha256(request.path.encode() + b"\0" + raw).digest()
            return read_request(route, raw, ignore=door.ignore), digest

        try:
            return read() if len(raw) < LARGE else await run_in_worker(read, None, "")
        except (ValueError, RecursionError, TypeError, AttributeError) as error:
            raise Refused(400, str(error) or "the body cannot be read") from error

    async def _answered(
        self, request: web.Request, wire: Wire, door: Door, asked: ChatRequest, digest: bytes
    ) -> web.Response:
        """Answer a request for a reply. Raises: RequestRefused."""
        if not door.open:  # it was closed while the request was read
            return refuse_request(wire, 409, "the episode is over")
        retry = request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
        task = door.reply(asked, digest, retry=retry)
        number = door.numbers[task]
        try:
            step = await asyncio.shield(task)
        except RequestRefused:
            raise
        except asyncio.CancelledError:
            if task.cancelled():
                return refuse_request(wire, 409, "the episode is over")
            raise
        except Exception as error:
            return refuse_request(
                wire, 500, f"no reply could be sampled: {type(error).__name__}: {error}"
            )
        reply = Reply(number, door.created, step, *cut_at(step.content, asked.stop))
        if not asked.stream:
            return web.json_response(wire.write(reply))
        return stream_reply(wire, reply, asked)


def _pass_over_full(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Print nothing if the process has no file descriptor left for a connection, because asyncio
    accepts the connection later."""
    if "out of system resource" not in context.get("message", ""):
        loop.default_exception_handler(context)


class Closing(asyncio.Protocol):
    """Close a connection as soon as it is made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def stream_reply(wire: Wire, reply: Reply, asked: ChatRequest) -> web.Response:
    """Return the reply as server-sent events in chunks. If the connection is cut, the client then
    sees an error instead of a shorter reply."""
    text = ""
    for name, data in wire.events(reply, asked):
        text += f"event: {name}\n" if name else ""
        text += f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
    response = web.Response(
        body=text.encode(),
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"},
    )
    response.enable_chunked_encoding()
    return response


def refuse_request(wire: Wire, status: int, sentence: str) -> web.Response:
    """Return a refusal with a status and a sentence."""
    headers = FINAL if status == 409 or status >= 500 else None
    response = web.json_response(
        wire.error(status, sentence[:2000]), status=status, headers=headers
    )
    if status in (401, 408, 409, 413):  # the body was not read
        response.force_close()
    return response


SERVERS: WeakKeyDictionary[Any, Endpoint] = WeakKeyDictionary()  # event loop → its server


@asynccontextmanager
async def open_door(
    ask: Ask, *, port: int = 0, counts: dict[str, Any] | None = None, ignore: bool = False
) -> AsyncIterator[tuple[Door, str]]:
    """Open a Door for an episode at the server of this event loop. Yield the Door and the server's
    address, `http://127.0.0.1:PORT`.

    The server starts with the first episode and stops after the last. At the end, `counts` receives
    the values of `Door.counts`. `ignore`: see `Door`.
    """
    server = SERVERS.setdefault(asyncio.get_running_loop(), Endpoint())
    door = Door(ask, ignore=ignore)
    server.users += 1
    try:
        await server.start(port)
        server.doors[door.token] = door
        yield door, f"http://127.0.0.1:{server.port}"
    finally:
        if counts is not None:
            counts.update(door.counts())
        await door.close()
        server.users -= 1
        if not server.users:
            server.doors.clear()
            await server.stop()


def list_addresses(door: Door, address: str) -> dict[str, str]:
    """Return the environment variables from which clients read their endpoint and their key."""
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_BASE": f"{address}/v1",  # read by aider
        "OPENAI_API_KEY": door.token,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": door.token,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
