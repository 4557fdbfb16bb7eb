"""Which split a problem belongs to, told by what it asks and by nothing around it."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any

from rlkit.errors import ConfigError, DataError
from rlkit.types import SPLITS, Split, Splits, Task


def split_of(content: Any, *, validation: float, held_out: float) -> Split:
    """The split of a problem: "test" for a share `held_out` of all contents, "validation" for a share `validation`, else "train".

    u = (first 48 bits of SHA-256 of the content as JSON) / 2⁴⁸, 0 ≤ u < 1; test: u < held_out; validation: u ≥ 1 - validation

    The split follows from the content alone. So no row is moved by the order or the number of the others, rows with equal contents share
    a split, and each share moves rows between its own split and train only.

    Args:
      content: what makes the problem, such as its prompt: text, or lists and mappings that JSON can hold.
      validation, held_out: shares, ≥ 0, with a sum below 1 (see `check_shares`).
    """
    text = json.dumps(content, sort_keys=True, default=str)
    u = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48
    return "test" if u < held_out else "validation" if u >= 1 - validation else "train"


def check_shares(validation: float, held_out: float) -> None:
    """Raises ConfigError for shares that are below 0 or leave nothing to train on."""
    for name, share in (("validation", validation), ("held_out", held_out)):
        if not 0 <= share < 1:
            raise ConfigError(f"task.{name} is {share}; it must be at least 0 and below 1")
    if not validation + held_out < 1:
        raise ConfigError(f"task.validation={validation} and task.held_out={held_out} leave nothing to train on; lower one of them")


def check_split(split: str) -> None:
    """Raises DataError for a name that is no split."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r}; use train, validation or test")


def empty_split(what: str, split: str, *, validation: float, held_out: float) -> str:
    """The sentence for a split that the shares leave without rows.

    Args:
      what: of which there are some, such as "task.path=rows.jsonl: none of the 8 rows".
    """
    name, share, instead = {
        "validation": ("validation", validation, "raise it, or set evaluation.every=0"),
        "test": ("held_out", held_out, "raise it, or set evaluation.n=0"),
        "train": ("held_out", held_out, f"lower it or task.validation={validation}"),
    }[split]
    return f"task.{name}={share} leaves no {split} rows ({what} falls there); {instead}, or add rows"


def overlaps(splits: Splits) -> list[str]:
    """Sentences on problems that stand in two splits: with the same prompt and answer, or without a prompt with the same metadata.

    The shares of one source never overlap. Files of a user's own may, and so may games whose instances are few.
    """
    keys = [[_key(task) for task in tasks] for tasks in splits]
    out = []
    for (a, first), (b, second) in itertools.combinations(zip(SPLITS, keys, strict=True), 2):
        known = set(first)
        if shared := sum(key in known for key in second):
            share = "validation" if b == "validation" else "held_out"
            out.append(
                f"{shared} of {len(second)} {b} problems have the prompt and the answer of a {a} problem, so {b} figures are not of unseen "
                f"problems; take the rows out of one of the two, or set task.{share} where the task has it"
            )
    return out


def _key(task: Task) -> str:
    return json.dumps([task.messages, task.answer] if task.messages else dict(task.metadata), sort_keys=True, default=str)
