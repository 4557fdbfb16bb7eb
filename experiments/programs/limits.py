"""How long does a large request stop the decoding, and what does a late turn cost?

    python experiments/programs/limits.py [--turns 1500]

The embedded model's template and tokenizer encode the requests, and the engine answers at once with
one word. A client in its own thread sends the requests. Every millisecond the script checks whether
the event loop still runs; "stands still" is the loop's longest silence during a request.

Requests of 4 MB are one long text, many short messages, and a tool with a long schema. Each is
refused, since it exceeds the context. A turn is a request with the whole conversation so far, and
its seconds are the mean of ten turns. All seconds are processor seconds of this process, including
the client's share, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import urllib.error
from collections.abc import Callable
from typing import Any

from rlkit.engines import Batched
from rlkit.episodes import collect
from rlkit.extras.programs import Client, program
from rlkit.models import load_policy
from rlkit.models.chat import encode_scaffold
from rlkit.types import Generation, Policy, Task

SIZE = 4_000_000  # bytes
USER = {"role": "user", "content": "And now?"}
LARGE: dict[str, dict[str, Any]] = {
    "one text": {"messages": [{"role": "user", "content": "seven " * (SIZE // 6)}]},
    "short messages": {"messages": [USER] * (SIZE // 41)},
    "a schema": {
        "messages": [USER],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "seven " * (SIZE // 6), "parameters": {}},
            }
        ],
    },
}


async def watched(work: Callable[[], None]) -> tuple[float, float]:
    """Run `work` in a thread.

    Returns: its seconds, and the loop's longest silence meanwhile.
    """
    begun = last = time.process_time()
    silence = 0.0
    task = asyncio.create_task(asyncio.to_thread(work))
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.process_time()
        silence = max(silence, now - last)
        last = now
    await task
    return last - begun, silence


def played(policy: Policy, play: Callable[..., Any], turns: int) -> None:
    """Play an episode of this program."""
    word = tuple(encode_scaffold(policy.renderer, "seven<|im_end|>"))
    reply = Generation(word, (-1.0,) * len(word), "stop")

    def complete(policy: Policy, prompts: Any, seeds: Any, params: Any) -> list[Generation]:
        return [reply for _ in prompts]

    environment = program(function=play, max_turns=turns, time_limit=1e6)
    task = Task("limits", (USER,))
    (rollout,) = collect(policy, [task], engine=Batched(complete), environment=environment)
    if rollout.error and rollout.steps:
        raise RuntimeError(rollout.error)


def large_requests() -> None:
    """Print the figures of the three requests of 4 MB."""

    async def play(task: Task, client: Client) -> None:
        for name, body in LARGE.items():

            def ask(body: dict[str, Any] = body) -> None:
                try:
                    client.chat(**body)
                except urllib.error.HTTPError as error:
                    assert error.code == 400, error

            taken, silence = await watched(ask)
            print(f"4 MB, {name}: {taken:.2f} s, stands still {silence:.3f} s", flush=True)

    played(load_policy(path="tiny"), play, 8)


def long_conversation(turns: int) -> None:
    """Print the seconds of some turns of one long conversation."""
    taken: list[float] = []

    def play(task: Task, client: Client) -> None:
        messages: list[Any] = []
        for _ in range(turns):
            messages.append(USER)
            begun = time.process_time()
            messages.append(client.chat(messages))
            taken.append(time.process_time() - begun)

    begun = time.process_time()
    played(load_policy(path="tiny")._replace(context_length=1 << 20), play, turns)
    whole = time.process_time() - begun
    for n in (100, 500, 1000, turns):
        if n <= turns:
            print(f"turn {n}: {sum(taken[n - 10 : n]) / 10:.4f} s")
    print(f"{turns} turns: {whole:.1f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=1500)
    long_conversation(parser.parse_args().turns)
    large_requests()
