"""Which rows of a split become tasks, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlkit.errors import ConfigError, DataError
from rlkit.types import Task


def select(tasks: Sequence[Task], *, seed: int, max_samples: int | None, source: str) -> list[Task]:
    """The tasks in an order that the seed fixes, cut to `max_samples` after the shuffle.

    Args:
      source: where the tasks come from, for the message.
    Raises: DataError where there is no task; ConfigError for max_samples below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"task.max_samples is {max_samples}; it must be at least 1, or null for all rows")
    if not tasks:
        raise DataError(f"task.path={source} holds no rows; give a source with at least one")
    shuffled = list(tasks)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:max_samples]
