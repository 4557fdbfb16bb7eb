"""Defaults computed from the suggestions of several options: `${rlkit_lr:…}`,
`${rlkit_reply_length:…}`, `${rlkit_answer_room:…}`, `${rlkit_weights:}` in conf/.

An option has its advice under `suggests`. The group of a key takes the advice as the key's default,
by interpolation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOM = 256  # tokens for a reply to a row with a short answer
PER_CHARACTER = 2  # further tokens for each character of the longest answer
LOOKED_AT = 1 << 20  # characters of a file of rows
TIMES = 10  # rate of adapters over that of all weights: Schulman et al. 2025, "LoRA Without Regret"


def learning_rate(otherwise: float, *, _root_: Any) -> float:
    """optimizer.lr: `model.suggests.lora_lr` with adapters, else `.lr`; `otherwise` (with adapters
    × 10) if the model suggests none."""
    rank = _read(_root_, "model.lora.rank")
    adapters = isinstance(rank, int) and rank > 0
    suggested = _read(_root_, "model.suggests.lora_lr" if adapters else "model.suggests.lr")
    if suggested is not None:
        return suggested
    return otherwise * (TIMES if adapters else 1)


def reply_length(short: int, thinking: int, *, _root_: Any) -> int:
    """generation.max_new_tokens: the model's suggestion, if it has one for every task, otherwise
    the task's; for a mixture the largest suggestion of its parts.

    A model thinks unless `model.enable_thinking` is false: an unknown template may think by
    default, and a reply cut inside its thinking has no answer. `short` (without thinking) and
    `thinking` are for tasks without suggestions.
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


def answer_room(otherwise: int, *, _root_: Any) -> int:
    """task.suggests.max_new_tokens of a .jsonl file: ROOM tokens and PER_CHARACTER for each
    character of the longest answer in its first LOOKED_AT characters, at most `otherwise`;
    `otherwise` if `task.path` is no .jsonl file or its rows have no answers."""
    path = Path(str(_read(_root_, "task.path"))).expanduser()
    field = _read(_root_, "task.fields.answer")
    if path.suffix != ".jsonl" or not path.is_file():
        return otherwise
    with path.open(errors="replace") as file:
        lines = file.read(LOOKED_AT).splitlines()
    lengths = [length for line in lines if (length := _answer_length(line, field))]
    return min(otherwise, ROOM + PER_CHARACTER * max(lengths, default=otherwise))


def _answer_length(line: str, field: str) -> int:
    """Characters of a row's answer; 0 without one, and 0 if the line is cut or damaged. The task
    itself reports a damaged line."""
    try:
        row = json.loads(line)
    except ValueError:
        return 0
    return len(str(row.get(field) or "")) if isinstance(row, dict) else 0


def reward_weights(*, _root_: Any) -> dict[str, float]:
    """algorithm.advantage.weights of gdpo: name → weight of the reward's terms."""
    return {
        name: _read(term, "weight") for name, term in (_read(_root_, "reward.terms") or {}).items()
    }


# By their names in conf/.
RESOLVERS: dict[str, Callable] = {
    "rlkit_lr": learning_rate,
    "rlkit_reply_length": reply_length,
    "rlkit_answer_room": answer_room,
    "rlkit_weights": reward_weights,
}


def _read(node: Any, path: str) -> Any:
    """The value at a dotted path, with interpolations resolved; None if there is no value."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
