"""Seeds as tasks, for environments that make up their own problems."""

from __future__ import annotations

import random
from typing import Literal

from rlkit.errors import ConfigError
from rlkit.types import Task


def episodes(
    *,
    split: Literal["train", "test"] = "train",
    seed: int = 0,
    max_samples: int | None = 1024,
    environment: str = "gymnasium",
    reward: str = "environment",
) -> list[Task]:
    """Tasks without messages: the environment says the first word, and its rewards count.

    Args:
      split: train has even seeds, test odd ones.
      seed: another seed gives other episodes.
      max_samples: how many, > 0; None gives 1024.
      environment: what `environment=by_task` looks up.
      reward: what `reward=by_task` looks up.
    Returns: tasks with `metadata["seed"]`, 0 … 2³¹ - 1.
    Raises: ConfigError for max_samples below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(f"task.max_samples is {max_samples}; it must be at least 1, or null for 1024")
    seeds = random.Random(f"episodes/{seed}/{split}").sample(range(split == "test", 2**31, 2), 1024 if max_samples is None else max_samples)
    return [
        Task(f"episodes/{split}/{seed}/{i}", (), reward=reward, environment=environment, metadata={"seed": number})
        for i, number in enumerate(seeds)
    ]
