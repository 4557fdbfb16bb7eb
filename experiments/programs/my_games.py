"""Tasks for guess-a-number games hosted by a program.

The task gives the first message, and the program writes the reward.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.types import Split, Task


def games(*, split: Split = "train", seed: int = 0, max_samples: int = 512) -> Sequence[Task]:
    """Return tasks with different ids; library_agent.py derives a hidden number from each id."""
    message = {"role": "user", "content": "Guess my number from 1 to 20. I say higher or lower."}
    return [
        Task(f"games/{split}/{seed}/{i}", (message,), reward="environment")
        for i in range(max_samples)
    ]
