"""What does the gateway cost per request, beside the engine?

    python experiments/programs/overhead.py [--requests 256]

The gateway is compared with a bare echo server of the same library. There is one client at a time,
or 64 at once, each with a conversation of about 8 kB. The engine answers at once. The figures are
processor seconds of this process. Both servers and the clients run in it, so the client's share is
in both figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import web

from rlkit.extras.programs.server import open_door
from rlkit.types import Step

BODY = {"model": "policy", "messages": [{"role": "user", "content": "word " * 1600}]}
STEP = Step((), (1,) * 64, (2,) * 16, (0.0,) * 16, "stop", content="An answer of a few words.")


async def timed(ask: Callable[[], Awaitable[None]], requests: int, width: int) -> float:
    """Return the processor milliseconds of a request."""
    begun = time.process_time()
    for _ in range(requests // width):
        await asyncio.gather(*(ask() for _ in range(width)))
    return 1000 * (time.process_time() - begun) / requests


async def measure(requests: int) -> dict[str, dict[str, float]]:
    """Measure both servers, with one client and with 64."""

    async def echo(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    async def answer(messages, tools=(), limit=None, **settings) -> Step:
        return STEP

    app = web.Application()
    app.router.add_post("/v1/chat/completions", echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found: dict[str, dict[str, float]] = {}
    async with (
        open_door(answer) as (door, address),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session,
    ):
        for name, at in (
            ("echo", f"http://127.0.0.1:{runner.addresses[0][1]}"),
            ("gateway", address),
        ):

            async def ask(at: str = at) -> None:
                headers = {"Authorization": f"Bearer {door.token}"}
                async with session.post(
                    f"{at}/v1/chat/completions", json=BODY, headers=headers
                ) as reply:
                    assert reply.status == 200
                    await reply.read()

            await timed(ask, 64, 64)  # warms up connections and caches
            found[name] = {
                f"{width} at once, ms": round(await timed(ask, requests, width), 3)
                for width in (1, 64)
            }
    await runner.cleanup()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    json.dump(asyncio.run(measure(**vars(parser.parse_args()))), sys.stdout, indent=1)
