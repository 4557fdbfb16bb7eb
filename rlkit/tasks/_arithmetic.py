"""Generated arithmetic word problems: the embedded default task.

A problem has a name, an item, a start amount and one to three operations on it. Some problems have
a distractor sentence about another person. Everything follows from (seed, index). An *expression*
is a test problem if it falls in one tenth of the hash space, and a validation problem in another
tenth. So no expression is in two splits, under any wording or seed. The warm-up of the embedded
model has seen train and validation expressions, never a test one.
"""

from __future__ import annotations

import functools
import operator
import random
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlkit.tasks.splits import check_split
from rlkit.types import Split, Task, ranges, safe

NAMES = (
    "Ann",
    "Ben",
    "Cem",
    "Dan",
    "Eva",
    "Fay",
    "Gus",
    "Ida",
    "Jim",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pia",
    "Sam",
)
ITEMS = (
    "pens",
    "hats",
    "cups",
    "eggs",
    "nuts",
    "keys",
    "toys",
    "figs",
    "pins",
    "bags",
    "maps",
    "jars",
)

# operation -> (kind, sentence); a demonstration can get a kind wrong systematically
ADD = (
    ("buys", "{name} buys {x} more."),
    ("finds", "{name} finds {x} more."),
    ("gets", "{other} gives {name} {x} more."),
)
SUB = (
    ("gives", "{name} gives {x} to {other}."),
    ("eats", "{name} uses {x}."),
    ("loses", "{name} loses {x}."),
)
SHARE = ("shares", "{name} packs them equally into {x} boxes. How many {item} are in each box?")
TOTAL = "How many {item} does {name} have now?"


class Problem(NamedTuple):
    """One word problem. `operations` are (operator, operand) pairs applied from left to right to
    `start`."""

    question: str
    start: int
    operations: tuple[tuple[str, int], ...]
    kinds: tuple[str, ...]  # of the operations, then "distractor" if there is one
    distractor: int | None

    @property
    def expression(self) -> str:
        """The operations as one calculator expression. A final division may need parentheses."""
        return expression(self.start, self.operations)

    @property
    def answer(self) -> int:
        """The value of the expression; always a positive integer."""
        return compute_value(self.start, self.operations)


def expression(start: int, operations: tuple[tuple[str, int], ...]) -> str:
    """`start` and its operations in infix form: (6, ((*, 4), (+, 5))) → "6 * 4 + 5"."""
    text = str(start)
    for i, (sign, operand) in enumerate(operations):
        if sign == "/" and i and operations[i - 1][0] in "+-":
            text = f"({text})"
        text += f" {sign} {operand}"
    return text


APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def compute_value(start: int, operations: tuple[tuple[str, int], ...]) -> int:
    """The value of the operations applied from left to right; division is exact by construction."""
    total = start
    for sign, x in operations:
        total = APPLY[sign](total, x)
    return total


def split_of_expression(text: str) -> Split:
    """The split of an expression: by CRC-32 modulo 10, test at 0, validation at 1, train above."""
    tenth = zlib.crc32(text.encode()) % 10
    if tenth == 0:
        return "test"
    return "validation" if tenth == 1 else "train"


# three splits of the default size; a run asks again for every split and phase
@functools.lru_cache(maxsize=16384)
def problem(seed: int, index: int, split: Split) -> Problem:
    """Problem number `index` of a split, from a generator of its own."""
    return draw_from_splits(random.Random(f"arithmetic {seed} {split} {index}"), (split,))


def draw_from_splits(rng: random.Random, splits: Collection[Split]) -> Problem:
    """Draw from a generator until a problem's expression belongs to one of the splits."""
    while True:
        drawn = _draw(rng)
        if drawn is not None and split_of_expression(drawn.expression) in splits:
            return drawn


def _draw(rng: random.Random) -> Problem | None:
    """Draw one problem; None if its numbers do not fit (a negative total, a division with a
    remainder)."""
    name, other = rng.sample(NAMES, 2)
    item, other_item = rng.sample(ITEMS, 2)
    words = {"name": name, "other": other, "item": item}
    count = rng.randint(1, 3)
    start = rng.randint(2, 20)
    sentences = [f"{name} has {start} {item}."]
    operations = []
    kinds = []
    if rng.random() < 0.3:
        x = rng.randint(2, 9)
        sentences = [f"{name} has {start} boxes of {x} {item}."]
        operations = [("*", x)]
        kinds = ["boxes"]
    share = len(operations) < count and rng.random() < 0.3
    while len(operations) < count - share:
        sign, choices, top = rng.choice((("+", ADD, 20), ("-", SUB, 12)))
        kind, sentence = rng.choice(choices)
        x = rng.randint(2, top)
        operations.append((sign, x))
        kinds.append(kind)
        sentences.append(sentence.format(x=x, **words))
    question = TOTAL
    if share:
        x = rng.randint(2, 6)
        operations.append(("/", x))
        kinds.append(SHARE[0])
        question = SHARE[1].replace("{x}", str(x))
    if not _fits(start, operations):
        return None
    distractor = rng.randint(2, 20) if rng.random() < 0.4 else None
    if distractor is not None:
        kinds.append("distractor")
        sentences.insert(rng.randint(1, len(sentences)), f"{other} has {distractor} {other_item}.")
    return Problem(
        " ".join([*sentences, question.format(**words)]),
        start,
        tuple(operations),
        tuple(kinds),
        distractor,
    )


def _fits(start: int, operations: Sequence[tuple[str, int]]) -> bool:
    """Whether every intermediate total is a positive integer."""
    total = start
    for sign, x in operations:
        if sign == "/" and total % x:
            return False
        total = APPLY[sign](total, x)
        if total <= 0:
            return False
    return True


@safe("environment")
@ranges(max_samples=(1, None))
def arithmetic(
    *,
    split: Split = "train",
    seed: int = 0,
    max_samples: int | None = 4096,
    environment: str = "tool_use",
) -> list[Task]:
    """Word problems as Tasks, scored as numbers, solved with the calculator.

    Args:
      split: "test" and "validation" for a tenth of all expressions each, "train" for the others.
      seed: another seed makes other problems of the same split.
      max_samples: number of problems, > 0; None means the default 4096.
      environment: its name in every row.
    Raises: DataError for another split.
    """
    check_split(split)
    tasks = []
    for i in range(4096 if max_samples is None else max_samples):
        p = problem(seed, i, split)
        tasks.append(
            Task(
                id=f"arithmetic/{split}/{seed}/{i}",
                messages=({"role": "user", "content": p.question},),
                answer=str(p.answer),
                reward="numeric",
                environment=environment,
                metadata={"expression": p.expression, "kinds": list(p.kinds)},
            )
        )
    return tasks
