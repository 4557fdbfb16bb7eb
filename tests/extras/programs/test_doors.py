"""What docs/doors.md shows is so: its example plays with a server that speaks OpenEnv's four
messages."""

from __future__ import annotations

import asyncio
import textwrap
from functools import partial
from pathlib import Path

from rlkit.environments import gymnasium
from rlkit.episodes.episode import play
from rlkit.system.loops import run
from rlkit.types import Step, Task

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doors.md"


def shown(name: str) -> dict:
    """The names that a file of the page defines."""
    lines = PAGE.read_text().partition(f"    # {name}\n")[2].splitlines()
    end = next(
        i
        for i, line in enumerate(lines)
        if line.startswith("    PYTHONPATH") or (line and line[0] != " ")
    )
    names: dict = {}
    exec(textwrap.dedent("\n".join(lines[:end])), names)
    return names


async def served(heard: list):
    """A server of OpenEnv's protocol on this machine: an episode is over at its second step. "lose"
    is an error."""
    from aiohttp import web

    async def speak(request):
        socket, steps = web.WebSocketResponse(), 0
        await socket.prepare(request)
        async for message in socket:
            said = message.json()
            heard.append(said["type"])
            steps = 0 if said["type"] == "reset" else steps + 1
            seen = {
                "observation": f"step {steps} {said['data']}",
                "reward": 0.5 if steps else None,
                "done": steps == 2,
            }
            lost = {"type": "error", "data": {"message": "no such message", "code": "LOST"}}
            if said["type"] != "close":
                await socket.send_json(
                    lost
                    if said["data"].get("message") == "lose"
                    else {"type": "observation", "data": seen}
                )
        return socket

    app = web.Application()
    app.router.add_get("/ws", speak)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"ws://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/ws"


def test_the_example_of_openenv_plays():
    heard: list[str] = []

    async def say(rollout, messages, session):
        return Step(
            tuple(messages),
            (),
            (),
            (),
            "stop",
            content="lose" if rollout.sample else f"move {len(rollout.steps)}",
        )

    async def main():
        runner, url = await served(heard)
        environment = gymnasium(make=partial(shown("my_openenv.py")["OpenEnv"], url=url))
        try:
            task = Task("t/0", (), metadata={"seed": 7})
            return await asyncio.gather(*(play(task, environment, say, sample=i) for i in range(2)))
        finally:
            await runner.cleanup()

    fine, lost = run(main())
    assert [s.prompt[0]["content"] for s in fine.steps] == [
        "step 0 {'seed': 7}",
        "step 1 {'message': 'move 0'}",
    ]
    assert ([s.reward for s in fine.steps], fine.status) == ([0.5, 0.5], "terminated")
    assert lost.truncation == "error" and "LOST: no such message" in lost.error
    assert heard.count("close") == 2


def test_the_game_of_two_players_counts_points():
    game = shown("my_games.py")["Bid"]()
    game.reset(seed=0)
    given = [game.step(action)[1:3] for action in ("20", "3", "21", "1", "5", "5")]
    assert given == [
        ((0, 0), False),
        ((1, -1), False),
        ((0, 0), False),
        ((-1, 1), False),
        ((0, 0), False),
        ((0, 0), True),
    ]
