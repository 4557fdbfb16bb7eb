"""What games share: how an instance is seeded and closed, and where a reward stands."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
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


def unpack(given: Any, names: str) -> Sequence[Any]:
    """What a game's method gave, which must be as many values as `names` lists. A text is not
    unpacked to its letters. Raises: TypeError."""
    if isinstance(given, tuple | list) and len(given) == 1 + names.count(","):
        return given
    raise TypeError(f"it must give ({names}), and it gave {given!r:.200}")


def rewarded(rollout: Rollout, reward: float) -> Rollout:
    """The rollout with this reward at its last step."""
    return rollout._replace(steps=(*rollout.steps[:-1], rollout.steps[-1]._replace(reward=reward)))
