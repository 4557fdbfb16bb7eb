"""Defaults that follow from what several options suggest: `${rlkit_lr:…}`,
`${rlkit_reply_length:…}`, `${rlkit_weights:}` in conf/.

An option says under `suggests` what would suit it, and the group that owns a key interpolates that
as its default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    """generation.max_new_tokens: the model's, if it suggests one for every task, otherwise the
    task's; of a mixture the longest part's.

    A model thinks unless `model.enable_thinking` is false: the default of an unknown template may
    be to think, and a reply that is cut inside its thinking has no answer. `short` and `thinking`
    are for a task that suggests none, without and with thinking.
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


def reward_weights(*, _root_: Any) -> dict[str, float]:
    """algorithm.advantage.weights of gdpo: name → weight of the reward's terms."""
    return {
        name: _read(term, "weight") for name, term in (_read(_root_, "reward.terms") or {}).items()
    }


# By their names in conf/.
RESOLVERS: dict[str, Callable] = {
    "rlkit_lr": learning_rate,
    "rlkit_reply_length": reply_length,
    "rlkit_weights": reward_weights,
}


def _read(node: Any, path: str) -> Any:
    """The value at a dotted path, its interpolations resolved; None if there is none."""
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node
