"""Seeds as tasks, for environments that make up their own problems."""

from __future__ import annotations

import random

from rlkit.errors import ConfigError
from rlkit.tasks.splits import check_split
from rlkit.types import Split, Task, ranges

SEEDS = {"train": (0, 4), "validation": (2, 4), "test": (1, 2)}  # split → first seed and distance of those it may have


@ranges(max_samples=(1, None))
def episodes(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int | None = 1024,
    environment: str = "gymnasium",
    reward: str = "environment",
) -> list[Task]:
    """Tasks without messages: the environment says the first word, and its rewards count.

    Args:
      split: train has seeds that 4 divides, validation the other even ones, test the odd ones.
      seed: another seed gives other episodes.
      max_samples: how many, > 0; None gives 1024.
      environment: what `environment=by_task` looks up.
      reward: what `reward=by_task` looks up.
    Returns: tasks with `metadata["seed"]`, 0 … 2³¹ - 1.
    Raises: ConfigError for max_samples below 1; DataError for another split.
    """
    check_split(split)
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"task.max_samples is {max_samples}; it must be at least 1, or null for 1024")
    first, distance = SEEDS[split]
    count = 1024 if max_samples is None else max_samples
    seeds = random.Random(f"episodes/{seed}/{split}").sample(range(first, 2**31, distance), count)
    return [
        Task(f"episodes/{split}/{seed}/{i}", (), reward=reward, environment=environment, metadata={"seed": number})
        for i, number in enumerate(seeds)
    ]
