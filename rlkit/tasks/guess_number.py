"""Numbers to guess: one task a number."""

from __future__ import annotations

import random
from typing import Literal

from rlkit.errors import DataError
from rlkit.types import Task


def guess_number(
    *, split: Literal["train", "test"] = "train", seed: int = 0, max_samples: int | None = 1024, low: int = 1, high: int = 100
) -> list[Task]:
    """Games as Tasks, played in the environment guess_number and scored by how few guesses it took.

    The number is hidden and all prompts are alike, so no game can be learned by heart, and both splits draw from the whole range:
    numbers held out would only teach the policy never to say them. Every number comes up once before any comes up again, so
    that `evaluation.n` = high - low + 1 plays each game there is exactly once.

    Args:
      split: another split gives another order of the numbers.
      seed: likewise.
      max_samples: how many games, > 0. None gives 1024.
      low, high: the range that is named to the policy, 0 ≤ low < high.
    Raises: DataError where that is no range.
    """
    if not 0 <= low < high:
        raise DataError(f"task.low={low}, task.high={high}: the range of numbers needs 0 <= low < high")
    count = 1024 if max_samples is None else max_samples
    rng = random.Random(f"guess_number/{seed}/{split}")
    numbers: list[int] = []
    while len(numbers) < count:
        numbers += rng.sample(range(low, high + 1), high - low + 1)
    return [
        Task(
            id=f"guess_number/{split}/{seed}/{i}",
            messages=({"role": "user", "content": f"Guess my number from {low} to {high}. I say higher or lower."},),
            answer=str(number),
            reward="few_turns",
            environment="guess_number",
            metadata={"low": low, "high": high, "correct_from": 1e-6},  # found at all; only the first guess earns 1
        )
        for i, number in enumerate(numbers[:count])
    ]
