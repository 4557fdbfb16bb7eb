"""Generate arithmetic word problems, the embedded default task.

A problem has a person's name, an item, a start amount and one to three operations on this amount.
Some problems have a distractor sentence about another person. A problem depends only on the seed,
the split and its index. The hash of its *expression* decides its split: one tenth of all hashes is
test, another tenth is validation. So no expression is in two splits, under any wording or seed. The
warm-up of the embedded model has used train and validation expressions, but no test expression.
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

# (kind, sentence) of each operation; a demonstration can systematically get all operations of a
# kind wrong
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
CHANGES = (("+", ADD, 20), ("-", SUB, 12))  # operator, sentences, largest number
BOXES = ("boxes", "{name} has {start} boxes of {x} {item}.")
SHARE = ("shares", "{name} packs them equally into {x} boxes. How many {item} are in each box?")
TOTAL = "How many {item} does {name} have now?"


class Problem(NamedTuple):
    """Hold one word problem. `operations` are pairs (operator, operand), applied from left to right
    to `start`."""

    question: str
    start: int
    operations: tuple[tuple[str, int], ...]
    kinds: tuple[str, ...]  # kinds of the operations, then "distractor" if there is one
    distractor: int | None

    @property
    def expression(self) -> str:
        """Return the operations as one calculator expression. A final division may need
        parentheses."""
        return expression(self.start, self.operations)

    @property
    def answer(self) -> int:
        """Return the value of the expression. It is always a positive integer."""
        return compute_value(self.start, self.operations)


def expression(start: int, operations: Sequence[tuple[str, int]]) -> str:
    """Write `start` and its operations in infix form: (6, ((*, 4), (+, 5))) → "6 * 4 + 5"."""
    text = str(start)
    for i, (sign, operand) in enumerate(operations):
        if sign == "/" and i and operations[i - 1][0] in "+-":
            text = f"({text})"
        text += f" {sign} {operand}"
    return text


APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


def compute_value(start: int, operations: tuple[tuple[str, int], ...]) -> int:
    """Apply the operations from left to right and return the result. A problem has only divisions
    without a remainder."""
    total = start
    for sign, x in operations:
        total = APPLY[sign](total, x)
    return total


def split_of_expression(text: str) -> Split:
    """Return the split of an expression. CRC-32 modulo 10 decides: 0 is test, 1 is validation, and
    all others are train."""
    tenth = zlib.crc32(text.encode()) % 10
    if tenth == 0:
        return "test"
    return "validation" if tenth == 1 else "train"


# room for three splits of the default size, because a run asks for each split in every phase
@functools.lru_cache(maxsize=16384)
def problem(seed: int, index: int, split: Split) -> Problem:
    """Return problem number `index` of a split. Each problem has its own random generator."""
    return draw_from_splits(random.Random(f"arithmetic {seed} {split} {index}"), (split,))


def draw_from_splits(rng: random.Random, splits: Collection[Split]) -> Problem:
    """Draw problems from a generator until the expression of one belongs to one of the splits."""
    while True:
        drawn = _draw(rng)
        if drawn and split_of_expression(expression(drawn.start, drawn.operations)) in splits:
            return _tell(drawn)


class _Drawn(NamedTuple):
    """Hold what is drawn of a problem, before it is told in words."""

    names: tuple[str, str]
    items: tuple[str, str]
    start: int
    operations: list[tuple[str, int]]
    told: list[tuple[str, str]]  # kind and sentence of each operation
    distractor: tuple[int, int] | None  # its number, and its place among the sentences


def _draw(rng: random.Random) -> _Drawn | None:
    """Draw one problem. Return None if its numbers do not fit: a total is not positive, or a
    division has a remainder."""
    names, items = _draw_two(rng, NAMES), _draw_two(rng, ITEMS)
    count = _draw_int(rng, 1, 3)
    start = _draw_int(rng, 2, 20)
    operations = []
    told = []
    boxes = rng.random() < 0.3
    if boxes:
        operations.append(("*", _draw_int(rng, 2, 9)))
        told.append(BOXES)
    share = len(operations) < count and rng.random() < 0.3
    while len(operations) < count - share:
        sign, choices, top = CHANGES[_draw_int(rng, 0, 1)]
        told.append(choices[_draw_int(rng, 0, 2)])
        operations.append((sign, _draw_int(rng, 2, top)))
    if share:
        operations.append(("/", _draw_int(rng, 2, 6)))
        told.append(SHARE)
    if not _fits(start, operations):
        return None
    distractor = None
    if rng.random() < 0.4:
        own = 1 + len(operations) - boxes - share  # sentences about the first person
        distractor = _draw_int(rng, 2, 20), _draw_int(rng, 1, own)
    return _Drawn(names, items, start, operations, told, distractor)


def _draw_int(rng: random.Random, low: int, high: int) -> int:
    """Draw the same whole number as `rng.randint(low, high)`, four times as fast. A held-out
    problem takes some fifteen draws of a problem."""
    size = high - low + 1
    bits = size.bit_length()
    while (drawn := rng.getrandbits(bits)) >= size:
        pass
    return low + drawn


def _draw_two(rng: random.Random, choices: Sequence[str]) -> tuple[str, str]:
    """Draw the same two choices as `rng.sample(choices, 2)`."""
    last = len(choices) - 1
    one, other = _draw_int(rng, 0, last), _draw_int(rng, 0, last - 1)
    return choices[one], choices[last if other == one else other]


def _tell(drawn: _Drawn) -> Problem:
    """Tell a problem in sentences."""
    (name, other), (item, other_item) = drawn.names, drawn.items
    words = {"name": name, "other": other, "item": item, "start": drawn.start}
    sentences = [f"{name} has {drawn.start} {item}."]
    question = TOTAL.format(**words)
    kinds = []
    for (kind, sentence), (_, x) in zip(drawn.told, drawn.operations, strict=True):
        kinds.append(kind)
        text = sentence.format(x=x, **words)
        if kind == "boxes":
            sentences = [text]
        elif kind == "shares":
            question = text
        else:
            sentences.append(text)
    distractor = None
    if drawn.distractor:
        distractor, place = drawn.distractor
        kinds.append("distractor")
        sentences.insert(place, f"{other} has {distractor} {other_item}.")
    sentences.append(question)
    return Problem(
        " ".join(sentences), drawn.start, tuple(drawn.operations), tuple(kinds), distractor
    )


def _fits(start: int, operations: Sequence[tuple[str, int]]) -> bool:
    """Return whether every intermediate total is a positive integer."""
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
    """Return word problems as Tasks. The policy may use the calculator, and the reward compares
    numbers.

    Args:
      split: "test" and "validation" each have one tenth of all expressions, and "train" has the
        others.
      seed: seed of the problems. Another seed makes other problems of the same split.
      max_samples: number of problems, > 0; None means the default 4096.
      environment: name of the environment, written into every task.
    Raises: DataError for an unknown split.
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
