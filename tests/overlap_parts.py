"""Parts for the laws of asynchrony=overlap, named by configs: the sampling process imports them
too."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager
from pathlib import Path

from rlkit.environments import tool_use
from rlkit.environments.session import open_session

CLOCK = random.SystemRandom()  # no seed decides how long anything takes


def slowed(*, seconds: float, straggler: int = 1, **settings):
    """tool_use whose sessions take a random time to open and to answer; about one in ten takes
    `straggler` times as long."""
    base = tool_use(**settings)

    @asynccontextmanager
    async def session(task):
        longest = seconds * (straggler if CLOCK.random() < 0.1 else 1)
        async with open_session(base, task) as inner:
            await asyncio.sleep(longest * CLOCK.random())
            answer = inner.answer

            async def slow(rollout):
                await asyncio.sleep(longest * CLOCK.random())
                return await answer(rollout)

            inner.answer = slow
            yield inner

    return base._replace(session=session)


async def drawn(rollout, index):
    """The next message is drawn from python's generator, after a wait."""
    await asyncio.sleep(0.01 * CLOCK.random())
    return f"{random.randrange(100)} + {random.randrange(100)} = ?"


def locked(rollout, index):
    raise OSError("the door is locked")


def killed(rollout, index):
    """Ends the sampling process; the checks before the first step play in the trainer."""
    if b"sampling_main" in Path("/proc/self/cmdline").read_bytes():
        os.kill(os.getpid(), signal.SIGKILL)


def even(rollout):
    """A reward that any reply may have: the share of its tokens that are even."""
    ids = rollout.steps[-1].response_ids
    return sum(token % 2 == 0 for token in ids) / max(1, len(ids))
