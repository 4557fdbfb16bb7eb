"""Provide functions for all games: seed and close an instance, check its values, and set a
reward."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from rlkit.environments.toolbox import close_instance
from rlkit.errors import Hung
from rlkit.system.loops import closing
from rlkit.types import Rollout, Task


async def close_quietly(instance: Any) -> None:
    """Close an instance. Errors are ignored, so the finished episode is not lost. Raises: Hung if
    an async close does not end."""
    try:
        with closing():
            await close_instance(instance)
    except Hung:
        raise
    except Exception:
        pass


def derive_seed(task: Task) -> int:
    """Return the seed for the resets of a task's episodes."""
    return int(task.metadata.get("seed", zlib.crc32(task.id.encode())))


def unpack(given: Any, names: str) -> Sequence[Any]:
    """Check that a game's method returned as many values as `names` lists, and return the values.
    Raises: TypeError if not. A text counts as one value, not as its letters."""
    if isinstance(given, tuple | list) and len(given) == 1 + names.count(","):
        return given
    raise TypeError(f"it must return ({names}), and it returned {given!r:.200}")


def set_last_reward(rollout: Rollout, reward: float) -> Rollout:
    """Set the reward of the rollout's last step."""
    return rollout._replace(steps=(*rollout.steps[:-1], rollout.steps[-1]._replace(reward=reward)))
