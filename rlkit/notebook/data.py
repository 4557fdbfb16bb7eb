"""The data of a notebook, where the core has no shape of its own for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlkit.types import Message, Task

Prompt = str | Sequence[Message] | Task


class TrainingState(NamedTuple):
    """Where a run stands: plain numbers, for the next iteration and for the checkpoint."""

    step: int = 0  # RL steps done
    total_tokens: int = 0  # of all rollouts, prompts included
    metrics: Mapping[str, float] = {}  # of the last step
    ema_metrics: Mapping[str, float] = {}


def update_ema_metrics(ema_metrics: Mapping[str, float], metrics: Mapping[str, float], decay: float = 0.9) -> dict[str, float]:
    """decay · average + (1 - decay) · value, by name. A new name starts at its value; a value that is not finite changes nothing.

    >>> update_ema_metrics({"loss": 1.0}, {"loss": 0.0, "reward": 2.0, "kl": float("nan")})
    {'loss': 0.9, 'reward': 2.0}
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {**ema_metrics, **{name: decay * ema_metrics.get(name, value) + (1 - decay) * value for name, value in finite.items()}}


def as_task(prompt: Prompt, index: int) -> Task:
    if isinstance(prompt, Task):
        return prompt
    messages: tuple[Message, ...] = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    return Task(id=f"prompt_{index}", messages=messages)
