"""What games share: how an instance is seeded and closed, and where a reward stands."""

from __future__ import annotations

import zlib
from typing import Any

from rlkit.environments.toolbox import closed
from rlkit.errors import Hung
from rlkit.system.loops import closing
from rlkit.types import Rollout, Task


async def closed_quietly(instance: Any) -> None:
    """Closes an instance. An episode that is over is not lost to an error here. Raises: Hung where
    an async close does not end."""
    try:
        with closing():
            await closed(instance)
    except Hung:
        raise
    except Exception:
        pass


def seed_of(task: Task) -> int:
    """What the task's episodes are reset with."""
    return int(task.metadata.get("seed", zlib.crc32(task.id.encode())))


def rewarded(rollout: Rollout, reward: float) -> Rollout:
    """The rollout with this reward at its last step."""
    return rollout._replace(steps=(*rollout.steps[:-1], rollout.steps[-1]._replace(reward=reward)))
