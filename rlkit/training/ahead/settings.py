"""A digest of what decides the groups of a step beside weights and prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlkit.algorithm import asks
from rlkit.errors import written
from rlkit.training.experiment import Experiment


def settings_of(x: Experiment) -> str:
    """Digest sampling, environment, reward, batch and refills of a step's experiment. Functions
    count by name."""
    refills = (x.algorithm.max_refills, x.algorithm.group_filter) if x.algorithm.max_refills else ()
    greedy = [True] if asks(x.algorithm.advantage, "greedy_rewards") else []
    chosen = [] if x.sampler.weigh is None else [x.sampler]
    parts = _plain(
        [
            x.batch,
            x.generation.params,
            x.environment,
            x.reward,
            refills,
            x.algorithm.episodes,
            *greedy,
            *chosen,
        ]
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _plain(part: Any) -> Any:
    if isinstance(part, partial):
        return [written(part), _plain(part.keywords)]
    if hasattr(part, "_asdict"):
        part = part._asdict()
    if isinstance(part, Mapping):
        return {str(key): _plain(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    return part if isinstance(part, int | float | str | None) else written(part)
