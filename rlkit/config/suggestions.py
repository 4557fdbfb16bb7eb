"""Compute defaults from the suggestions of several options: `${rlkit_lr:…}`,
`${rlkit_reply_length:…}`, `${rlkit_answer_room:…}`, `${rlkit_weights:}` in conf/.

An option may suggest values for keys of other groups, under its key `suggests`. A key in another
group refers to a suggestion as its default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOM = 256  # tokens of room for a reply, before those for the answer's length
PER_CHARACTER = 2  # further tokens for each character of the longest answer
LOOKED_AT = 1 << 20  # number of characters to read from a file of rows
TIMES = 10  # the learning rate for adapters, relative to all weights: Schulman et al. 2025


def learning_rate(otherwise: float, *, _root_: Any) -> float:
    """Compute the default of optimizer.lr. The default is `model.suggests.lora_lr` with adapters,
    and `model.suggests.lr` without. If the model suggests no rate, the default is 10 · `otherwise`
    with adapters, and `otherwise` without."""
    rank = _read(_root_, "model.lora.rank")
    adapters = isinstance(rank, int) and rank > 0
    suggested = _read(_root_, "model.suggests.lora_lr" if adapters else "model.suggests.lr")
    if suggested is not None:
        return suggested
    return otherwise * (TIMES if adapters else 1)


def reply_length(short: int, thinking: int, *, _root_: Any) -> int:
    """Compute the default of generation.max_new_tokens. The default is the model's suggestion if
    the model has one, otherwise the task's suggestion. A mixture's suggestion is the largest
    suggestion of its parts.

    A model counts as thinking unless `model.enable_thinking` is false, because an unknown template
    may think by default, and a reply cut off while thinking has no answer. A task without a
    suggestion gets `thinking`, or `short` without thinking.
    """
    own = _read(_root_, "model.suggests.max_new_tokens")
    if own is not None:
        return own
    key, otherwise = (
        ("max_new_tokens", short)
        if _read(_root_, "model.enable_thinking") is False
        else ("max_new_tokens_thinking", thinking)
    )
    parts = _read(_root_, "task.parts")
    places = [f"task.parts.{name}" for name in parts] if isinstance(parts, Mapping) else ["task"]
    lengths = [_read(_root_, f"{place}.suggests.{key}") for place in places]
    return max(
        (length if isinstance(length, int) else otherwise for length in lengths), default=otherwise
    )


def answer_room(otherwise: int, *, _parent_: Any) -> int:
    """Compute suggests.max_new_tokens of a task with a .jsonl file. The number is ROOM plus
    PER_CHARACTER for each character of the longest answer, and at most `otherwise`. Only the file's
    first LOOKED_AT characters are read. The number is `otherwise` if the task's `path` is not a
    .jsonl file, or if its rows have no answers."""
    task = _parent_._get_parent()
    path = Path(str(task.get("path"))).expanduser()
    field = _read(task, "fields.answer")
    if path.suffix != ".jsonl" or not path.is_file():
        return otherwise
    with path.open(errors="replace") as file:
        lines = file.read(LOOKED_AT).splitlines()
    lengths = [length for line in lines if (length := _answer_length(line, field))]
    return min(otherwise, ROOM + PER_CHARACTER * max(lengths, default=otherwise))


def _answer_length(line: str, field: str) -> int:
    """Count the characters of a row's answer. The count is 0 without an answer, or if the line is
    cut off or damaged. The task itself reports a damaged line."""
    try:
        row = json.loads(line)
    except ValueError:
        return 0
    return len(str(row.get(field) or "")) if isinstance(row, dict) else 0


def reward_weights(*, _root_: Any) -> dict[str, float]:
    """Compute the default of algorithm.advantage.weights for gdpo: name of a reward term → weight
    of the term."""
    return {
        name: _read(term, "weight") for name, term in (_read(_root_, "reward.terms") or {}).items()
    }


# the functions by their names in conf/
RESOLVERS: dict[str, Callable] = {
    "rlkit_lr": learning_rate,
    "rlkit_reply_length": reply_length,
    "rlkit_answer_room": answer_room,
    "rlkit_weights": reward_weights,
}


def _read(node: Any, path: str) -> Any:
    """Return the value at a dotted path, with interpolations resolved. Return None if the path has
    no value."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
