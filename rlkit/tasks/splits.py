"""Which split a problem belongs to, told by what it asks and by nothing around it; and the order of
the rows of a split."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlkit.errors import ConfigError, DataError
from rlkit.types import SPLITS, Split, Splits, Task

Row = TypeVar("Row")


def split_of(content: Any, *, validation: float, held_out: float) -> Split:
    """The split of a problem: "test" for a share `held_out` of all contents, "validation" for a
    share `validation`, else "train".

    u = (first 48 bits of SHA-256 of the content as JSON) / 2⁴⁸, 0 ≤ u < 1; test: u < held_out;
    validation: u ≥ 1 - validation

    The split follows from the content alone. So no row is moved by the order or the number of the
    others, rows with equal contents share a split, and each share moves rows between its own split
    and train only.

    Args:
      content: what makes the problem, such as its prompt: text, or lists and mappings that JSON can
        hold.
      validation, held_out: shares, ≥ 0, with a sum below 1 (see `check_split`).
    """
    text = json.dumps(content, sort_keys=True, default=str)
    u = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
    if u < held_out:
        return "test"
    return "validation" if u >= 1 - validation else "train"


def check_split(split: str, validation: float = 0.0, held_out: float = 0.0) -> None:
    """Raises DataError for a name that is no split; ConfigError for shares that are below 0 or
    leave nothing to train on."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; use train, validation or test")
    for name, share in (("validation", validation), ("held_out", held_out)):
        if not 0 <= share < 1:
            raise ConfigError(f"task.{name} is {share}; it must be at least 0 and below 1")
    if not validation + held_out < 1:
        raise ConfigError(
            f"task.validation={validation} and task.held_out={held_out} leave nothing to train on;"
            " lower one of them"
        )


def cut(
    rows: Sequence[Row],
    content: Callable[[Row], Any],
    split: str,
    what: str,
    *,
    validation: float,
    held_out: float,
) -> Sequence[Row]:
    """The rows that belong to a split, in their order.

    Args:
      content: row → what makes the problem. Shares as in `split_of`.
      what: which rows they are, for the message, such as "rows of task.path=rows.jsonl".
    Raises: DataError where the shares leave the split without rows.
    """
    kept = [
        row
        for row in rows
        if split_of(content(row), validation=validation, held_out=held_out) == split
    ]
    if rows and not kept:
        name, share, instead = {
            "validation": ("validation", validation, "raise it, or set evaluation.every=0"),
            "test": ("held_out", held_out, "raise it, or set evaluation.n=0"),
            "train": ("held_out", held_out, f"lower it or task.validation={validation}"),
        }[split]
        none = f"none of the {len(rows)} {what} falls there"
        raise DataError(
            f"task.{name}={share} leaves no {split} rows ({none}); {instead}, or add rows"
        )
    return kept


def in_order(
    tasks: Sequence[Task], *, seed: int, max_samples: int | None, source: str
) -> list[Task]:
    """The tasks in an order that the seed fixes, cut to `max_samples` after the shuffle.

    Args:
      source: where the tasks come from, for the message.
    Raises: DataError where there is no task; ConfigError for max_samples below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ConfigError(
            f"task.max_samples is {max_samples}; it must be at least 1, or null for all rows"
        )
    if not tasks:
        raise DataError(f"task.path={source} holds no rows; give a source with at least one")
    shuffled = list(tasks)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:max_samples]


def overlaps(splits: Splits) -> list[str]:
    """Sentences on problems that stand in two splits: with the same prompt and answer, or without a
    prompt with the same metadata.

    The shares of one source never overlap. Files of a user's own may, and so may games whose
    instances are few.
    """
    keys = [[problem_of(task) for task in tasks] for tasks in splits]
    out = []
    for (a, first), (b, second) in itertools.combinations(zip(SPLITS, keys, strict=True), 2):
        known = set(first)
        shared = sum(key in known for key in second)
        if shared:
            share = "validation" if b == "validation" else "held_out"
            out.append(
                f"{shared} of {len(second)} {b} problems have the prompt and the answer of a {a}"
                f" problem, so {b} figures are not of unseen problems; take the rows out of one of"
                f" the two, or set task.{share} where the task has it"
            )
    return out


def problem_of(task: Task) -> str:
    """What makes a task's problem: its prompt and answer, or without a prompt its metadata. Rows
    with the same are one problem."""
    return json.dumps(
        [task.messages, task.answer] if task.messages else dict(task.metadata),
        sort_keys=True,
        default=str,
    )


def count_distinct(tasks: Sequence[Task]) -> int:
    """How many problems the rows hold, each counted once."""
    return len({problem_of(task) for task in tasks})


def count_in_words(rows: int, distinct: int) -> str:
    """Rows and distinct problems in words.

    >>> count_in_words(300, 42), count_in_words(42, 42)
    ('300 (42 distinct)', '42')
    """
    return f"{rows} ({distinct} distinct)" if distinct < rows else str(rows)
