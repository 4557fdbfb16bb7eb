"""Decide the split of a problem by its content alone, and order the rows of a split."""

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
# environments in which a reply can be judged only by the prompt
ALONE = ("single_turn", "tool_use")


def choose_split(content: Any, *, validation: float, held_out: float) -> Split:
    """Choose the split of a problem. A share `held_out` of all contents is "test", a share
    `validation` is "validation", and the rest is "train".

    u = (first 48 bits of SHA-256 of the content as JSON) / 2⁴⁸, 0 ≤ u < 1. The split is test if u <
    held_out, and validation if u ≥ 1 - validation.

    The split follows from the content alone. So a row stays in its split if other rows are added,
    removed or reordered, and rows with equal contents are in the same split. If a share changes,
    rows only move between its split and train.

    Args:
      content: the content of the problem, for example its prompt: a text, or lists and mappings of
        JSON types.
      validation, held_out: shares, ≥ 0, with a sum below 1 (see `check_split`).
    """
    text = json.dumps(content, sort_keys=True, default=str)
    u = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
    if u < held_out:
        return "test"
    return "validation" if u >= 1 - validation else "train"


def check_split(split: str, validation: float = 0.0, held_out: float = 0.0) -> None:
    """Raise DataError for an unknown split. Raise ConfigError for a share below 0, or if the shares
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
    """Select the rows of a split, in their order.

    Args:
      content: function from a row to the content of its problem.
      what: the rows in words for the message, for example "rows of task.path=rows.jsonl".
      validation, held_out: shares as in `choose_split`.
    Raises: DataError if the shares leave the split without rows.
    """
    kept = [
        row
        for row in rows
        if choose_split(content(row), validation=validation, held_out=held_out) == split
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


def check_max_samples(max_samples: int | None, every: str) -> None:
    """Raise ConfigError for max_samples below 1. `every` says what None means."""
    if max_samples is not None and max_samples < 1:
        raise ConfigError(
            f"task.max_samples is {max_samples}; it must be at least 1, or null for {every}"
        )


def order_tasks(
    tasks: Sequence[Task], *, seed: int, max_samples: int | None, source: str
) -> list[Task]:
    """Shuffle the tasks with the seed, and return the first `max_samples` of them.

    Args:
      source: source of the tasks, for the message.
    Raises: DataError if there is no task; ConfigError for max_samples below 1.
    """
    check_max_samples(max_samples, "all rows")
    if not tasks:
        raise DataError(f"task.path={source} holds no rows; give a source with at least one")
    shuffled = list(tasks)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:max_samples]


def find_overlaps(splits: Splits) -> list[str]:
    """Return sentences on problems that are in two splits, and on prompts with several answers. Two
    problems are the same if prompt and answer are equal, or without a prompt, if the metadata are
    equal.

    The shares of one source never overlap. A user's own files may overlap, and so may games with
    few instances.
    """
    keys = [[identify_problem(task) for task in tasks] for tasks in splits]
    answers: dict[str, set[str]] = {}
    for task in itertools.chain(*splits):
        if task.environment in ALONE:
            answers.setdefault(json.dumps(task.messages, default=str), set()).add(task.answer)
    torn = [prompt for prompt, own in answers.items() if len(own) > 1]
    out = []
    if torn:
        out.append(
            f"{len(torn)} prompts have rows with different answers, so no reply is right in all of"
            f" them; keep one row of each; one is {torn[0]:.120}"
        )
    for (a, first), (b, second) in itertools.combinations(zip(SPLITS, keys, strict=True), 2):
        known = set(first)
        shared = sum(key in known for key in second)
        if shared:
            share = "validation" if b == "validation" else "held_out"
            out.append(
                f"{shared} of {len(second)} {b} problems have the prompt and the answer of a {a}"
                f" problem, so {b} figures include seen problems; take the rows out of one of"
                f" the two, or set task.{share} where the task has it"
            )
    return out


def identify_problem(task: Task) -> str:
    """Return a text that identifies a task's problem: its prompt and answer, or without a prompt,
    its metadata. Rows with the same text are one problem."""
    return json.dumps(
        [task.messages, task.answer] if task.messages else dict(task.metadata),
        sort_keys=True,
        default=str,
    )


def count_distinct(tasks: Sequence[Task]) -> int:
    """Count the distinct problems of the rows."""
    return len({identify_problem(task) for task in tasks})


def count_in_words(rows: int, distinct: int) -> str:
    """Write the numbers of rows and of distinct problems in words.

    >>> count_in_words(300, 42), count_in_words(42, 42)
    ('300 (42 distinct)', '42')
    """
    return f"{rows} ({distinct} distinct)" if distinct < rows else str(rows)
