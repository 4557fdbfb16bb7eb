"""Seeds and hidden numbers as tasks, for environments with problems of their own making."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlkit.errors import ConfigError, DataError
from rlkit.tasks.splits import check_split, cut
from rlkit.types import Split, Task, ranges, safe

# split → first of its seeds and their distance
SEEDS = {"train": (0, 4), "validation": (2, 4), "test": (1, 2)}


@safe("environment", "reward")
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
      split: train has the seeds divisible by 4, validation the other even ones, test the odd ones.
      seed: another seed makes other episodes.
      max_samples: number of tasks, > 0; None means 1024.
      environment: its name for `environment=by_task`.
      reward: its name for `reward=by_task`.
    Returns: tasks with `metadata["seed"]`, 0 … 2³¹ - 1.
    Raises: ConfigError for max_samples below 1; DataError for another split.
    """
    check_split(split)
    if max_samples is not None and max_samples < 1:
        raise ConfigError(
            f"task.max_samples is {max_samples}; it must be at least 1, or null for 1024"
        )
    first, distance = SEEDS[split]
    count = 1024 if max_samples is None else max_samples
    seeds = random.Random(f"episodes/{seed}/{split}").sample(range(first, 2**31, distance), count)
    return [
        Task(
            f"episodes/{split}/{seed}/{i}",
            (),
            reward=reward,
            environment=environment,
            metadata={"seed": number},
        )
        for i, number in enumerate(seeds)
    ]


@ranges(max_samples=(1, None))
def guess_number(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int | None = 1024,
    low: int = 1,
    high: int = 100,
    validation: float = 0.0,
    held_out: float = 0.0,
) -> list[Task]:
    """Games as Tasks for the environment guess_number. The score falls with the number of guesses.

    All prompts are alike, so prompts cannot be disjoint. Hidden numbers can, by `validation` and
    `held_out`. By default they are not: every split hides every number of the range. The number is
    secret, so no game can be learned by heart. If training never hid some numbers, the policy would
    learn never to say them. Figures of a run are of the whole game, not of unseen games.

    Every number of a split comes up once before any comes up again. So without shares,
    `evaluation.n` = high - low + 1 plays each game exactly once.

    Args:
      split: train, validation or test; each has an order of its own.
      seed: another seed gives another order.
      max_samples: number of games, > 0. None means 1024.
      low, high: the range told to the policy, 0 ≤ low < high.
      validation, held_out: shares of the numbers hidden only in validation and only in test games,
        by the hash of range and number. Both 0: all games hide all numbers.
    Raises: DataError if it is no range, or if the shares leave a split without a number.
      ConfigError for other wrong shares.
    """
    if not 0 <= low < high:
        raise DataError(
            f"task.low={low}, task.high={high}: the range of numbers needs 0 <= low < high"
        )
    check_split(split, validation, held_out)
    numbers: Sequence[int] = range(low, high + 1)
    if validation or held_out:
        numbers = cut(
            numbers,
            lambda n: [low, high, n],
            split,
            f"numbers from {low} to {high}",
            validation=validation,
            held_out=held_out,
        )
    count = 1024 if max_samples is None else max_samples
    rng = random.Random(f"guess_number/{seed}/{split}")
    drawn: list[int] = []
    while len(drawn) < count:
        drawn += rng.sample(numbers, len(numbers))
    return [
        Task(
            id=f"guess_number/{split}/{seed}/{i}",
            messages=(
                {
                    "role": "user",
                    "content": f"Guess my number from {low} to {high}. I say higher or lower.",
                },
            ),
            answer=str(number),
            reward="few_turns",
            environment="guess_number",
            # correct: found at all; only the first guess earns 1
            metadata={"low": low, "high": high, "correct_from": 1e-6},
        )
        for i, number in enumerate(drawn[:count])
    ]
