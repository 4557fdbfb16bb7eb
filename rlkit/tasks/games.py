"""Make tasks of seeds and of hidden numbers, for environments that make their own problems."""

from __future__ import annotations

import random
from collections.abc import Sequence

from rlkit.errors import DataError
from rlkit.tasks.splits import check_max_samples, check_split, cut
from rlkit.types import Split, Task, ranges, safe

# split → (first seed, distance between two seeds)
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
    """Return tasks without messages. The environment makes the first prompt, and its rewards are
    the reward.

    Args:
      split: train has the seeds divisible by 4, validation has the other even seeds, and test has
        the odd seeds.
      seed: seed of the draw. Another seed draws other episodes.
      max_samples: number of tasks, > 0; None means 1024.
      environment: name of the environment, for `environment=by_task`.
      reward: name of the reward, for `reward=by_task`.
    Returns: tasks with `metadata["seed"]`, 0 … 2³¹ - 1.
    Raises: ConfigError for max_samples below 1; DataError for an unknown split.
    """
    check_split(split)
    check_max_samples(max_samples, "1024")
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
    """Return games as Tasks for the environment guess_number. The score falls with the number of
    guesses.

    All prompts are alike, so the splits cannot have disjoint prompts. With `validation` and
    `held_out`, they have disjoint hidden numbers. By default they do not: in every split, the
    hidden number can be any number of the range. The policy does not see the number, so it cannot
    learn a game by heart. If training never hid some numbers, the policy would learn never to say
    them. So the figures of a run measure the whole game, not unseen games.

    Each number of a split is drawn once before any number is drawn again. So if both shares are 0,
    `evaluation.n` = high - low + 1 plays each game exactly once.

    Args:
      split: train, validation or test. Each split has its own order.
      seed: seed of the order.
      max_samples: number of games, > 0. None means 1024.
      low, high: smallest and largest number, told to the policy, 0 ≤ low < high.
      validation, held_out: shares of the numbers that are hidden only in validation games and only
        in test games. The hash of range and number decides. If both are 0, every number can be
        hidden in every split.
    Raises: DataError if low and high are no range, or if the shares leave a split without a number.
      ConfigError if a share is out of range.
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
            # a game counts as correct if the number is found at all, but only a right first guess
            # earns 1
            metadata={"low": low, "high": high, "correct_from": 1e-6},
        )
        for i, number in enumerate(drawn[:count])
    ]
