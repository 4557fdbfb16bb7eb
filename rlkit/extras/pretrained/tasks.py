"""A first skill for a small pretrained model: a number in words, written in digits."""

from __future__ import annotations

import random

from rlkit.tasks.splits import check_split, choose_split
from rlkit.types import Message, Split, Task, ranges

ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
EXAMPLES = (58, 731)


def spell(number: int) -> str:
    """Return a number from 0 to 9,999 in words, such as "seven thousand and twelve"."""
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    size, unit = (1000, "thousand") if number >= 1000 else (100, "hundred")
    count, rest = divmod(number, size)
    joint = " and " if rest < 100 else " "
    return f"{ONES[count]} {unit}" + (joint + spell(rest) if rest else "")


def ask(number: int) -> Message:
    return {"role": "user", "content": f"Write {spell(number)} in digits."}


@ranges(max_samples=(1, None))
def digits(*, split: Split = "train", seed: int = 0, max_samples: int = 1024) -> list[Task]:
    """Numbers from 1,000 to 9,999 in words, after two worked examples; the reply has the digits.

    A number occurs once. A fifth of all numbers is test and a tenth is validation, so a split has
    at most some 6,300, 900 or 1,800 tasks.

    Args:
      seed: another seed puts the numbers in another order.
      max_samples: number of tasks.
    Raises: DataError for another split.
    """
    check_split(split)
    shown: list[Message] = []
    for number in EXAMPLES:
        shown += [ask(number), {"role": "assistant", "content": str(number)}]
    numbers = [
        number
        for number in range(1000, 10_000)
        if choose_split([number], validation=0.1, held_out=0.2) == split
    ]
    random.Random(f"digits/{seed}/{split}").shuffle(numbers)
    return [
        Task(
            f"digits/{split}/{number}", (*shown, ask(number)), str(number), "numeric", "single_turn"
        )
        for number in numbers[:max_samples]
    ]
