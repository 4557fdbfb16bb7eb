"""Numbers to guess: one task a number, every tenth number held out."""

from __future__ import annotations

import random
from typing import Literal

from rlkit.errors import DataError
from rlkit.types import Task

HELD_OUT = 10  # numbers divisible by this are of the test split


def guess_number(
    *, split: Literal["train", "test"] = "train", seed: int = 0, max_samples: int | None = 1024, low: int = 1, high: int = 100
) -> list[Task]:
    """Games as Tasks, played in the environment guess_number and scored by how few guesses it took.

    Args:
      split: "test" asks for the numbers divisible by 10, "train" for all others.
      seed: another seed gives another order of the numbers.
      max_samples: how many games, > 0; numbers repeat where there are fewer. None gives 1024.
      low, high: the range that is named to the policy, 0 ≤ low < high.
    Raises: DataError where a split has no number in the range.
    """
    numbers = [n for n in range(low, high + 1) if (n % HELD_OUT == 0) == (split == "test")]
    if not numbers or low < 0:
        raise DataError(
            f"task.low={low}, task.high={high}: no number of the {split} split lies there; test has the multiples of {HELD_OUT}"
        )
    rng = random.Random(f"guess_number/{seed}/{split}")
    ask = f"I am thinking of a whole number from {low} to {high}. Guess it: I say whether it is higher or lower."
    return [
        Task(
            id=f"guess_number/{split}/{seed}/{i}",
            messages=({"role": "user", "content": ask},),
            answer=str(rng.choice(numbers)),
            reward="few_turns",
            environment="guess_number",
            metadata={"low": low, "high": high},
        )
        for i in range(1024 if max_samples is None else max_samples)
    ]
