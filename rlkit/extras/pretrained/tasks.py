"""A first skill for a small pretrained model: which of two numbers is larger?"""

from __future__ import annotations

import random

from rlkit.tasks.splits import check_split, choose_split
from rlkit.types import Message, Split, Task, ranges

LOW, HIGH = 10, 999


def ask(a: int, b: int) -> tuple[Message, ...]:
    """Ask about two numbers in a conversation, after two answered questions."""
    messages: list[Message] = []
    for first, second in ((58, 731), (904, 26), (a, b)):
        question = f"Which number is larger, {first} or {second}?"
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": str(max(first, second))},
        ]
    return tuple(messages[:-1])


@ranges(max_samples=(1, None))
def larger(*, split: Split = "train", seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Pairs of different numbers from 10 to 999; the reply names the larger one.

    A pair belongs to one split, in either order of its numbers: a fifth of all pairs to "test", a
    tenth to "validation".

    Args:
      seed: another seed makes other pairs of the same split.
      max_samples: number of tasks.
    Raises: DataError for another split.
    """
    check_split(split)
    rng = random.Random(f"larger/{seed}/{split}")
    tasks: list[Task] = []
    while len(tasks) < max_samples:
        a, b = rng.sample(range(LOW, HIGH + 1), 2)
        if choose_split(sorted((a, b)), validation=0.1, held_out=0.2) == split:
            name = f"larger/{split}/{seed}/{len(tasks)}"
            tasks.append(Task(name, ask(a, b), str(max(a, b)), "numeric", "single_turn"))
    return tasks
