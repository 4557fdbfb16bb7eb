"""Games of guess-a-number that the program hosts: the task says how they begin, and the reward is
what the program writes."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.types import Split, Task


def games(*, split: Split = "train", seed: int = 0, max_samples: int = 512) -> Sequence[Task]:
    """Tasks whose ids differ; library_agent.py hides another number for each."""
    message = {"role": "user", "content": "Guess my number from 1 to 20. I say higher or lower."}
    return [
        Task(f"games/{split}/{seed}/{i}", (message,), reward="environment")
        for i in range(max_samples)
    ]
