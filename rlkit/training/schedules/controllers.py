"""Numbers that follow a run's metrics: functions returning a Controller with explicit state. And
conditions on a step's metrics, such as `reward/mean > 0.8 for 5`."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlkit.types import Controller, safe

GRAMMAR = (
    "METRIC > NUMBER or METRIC > NUMBER for N, with >, >=, < or <=, N at least 1; for example"
    " 'reward/mean > 0.8 for 5'"
)
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


class Condition(NamedTuple):
    """`metric operator bound`, on `times` steps in a row."""

    metric: str
    operator: str
    bound: float
    times: int = 1


@functools.lru_cache(maxsize=64)
def read_condition(text: str) -> Condition:
    """Read a condition: METRIC, one of > >= < <=, NUMBER, and optionally `for N`, the number of
    steps in a row on which it must hold.

    Raises: ValueError with the grammar.
    >>> read_condition("reward/mean > 0.8 for 5")
    Condition(metric='reward/mean', operator='>', bound=0.8, times=5)
    """
    found = re.fullmatch(
        r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:\s+for\s+(\d+))?\s*",
        text,
    )
    if not found or int(found[4] or 1) < 1:
        raise ValueError(f"'{text}' is not a condition; write {GRAMMAR}")
    return Condition(found[1], found[2], float(found[3]), int(found[4] or 1))


def count_streak(condition: Condition, before: float, metrics: Mapping[str, float]) -> int:
    """Number of steps in a row on which a condition holds, after one more step. nan fails it.

    Steps without the metric do not count: `eval/accuracy > 0.9 for 2` asks for two evaluations in a
    row.
    """
    if condition.metric not in metrics:
        return int(before)
    return (
        int(before) + 1
        if OPERATORS[condition.operator](metrics[condition.metric], condition.bound)
        else 0
    )


@safe("metric")
def adaptive(
    *,
    start: float,
    target: float,
    horizon: float = 0.1,
    limit: float = 0.2,
    metric: str = "kl/ref_k3",
    steps: int | None = None,
) -> Controller:
    """A coefficient to keep a divergence near a target.

    After each RL step it is multiplied by 1 + clip(KL / target - 1, ±limit) · min(1, 1 / (horizon ·
    steps)). Ziegler et al. 2019, arXiv:1909.08593, section 2.2, count the horizon in rollouts:
    H rollouts at n a step correspond to horizon = H / (n · steps). Here it is a share of the run,
    so the coefficient can move as far in a short run as in a long one: with the defaults by a
    factor of about e², up or down. A step without a finite KL changes nothing.

    Args:
      start: coefficient of the first step, greater than 0, because it is only ever multiplied.
      target: nats, greater than 0, in the unit of `metric`.
      horizon: share of `steps`, in (0, 1]. Over this share of the run the coefficient changes by
        about the share `limit` at most.
      limit: largest relative error counted, in (0, 1).
      metric: the metric to hold at the target. kl/ref_k3 is in nats per token.
      steps: RL steps; the horizon is a share of them. None: all steps of the run, or of the phase
        that defines the controller.
    Raises: ValueError if a number is outside its range.
    """
    for name, value in (("start", start), ("target", target)):
        if not value > 0:
            raise ValueError(f"{name}={value}: must be greater than 0")
    if not 0 < horizon <= 1:
        raise ValueError(
            f"horizon={horizon}: is a share of the run's steps, greater than 0 and at most 1; 0.1"
            " is a tenth of the run"
        )
    if not 0 < limit < 1:
        raise ValueError(f"limit={limit}: must be greater than 0 and less than 1")
    update = functools.partial(
        _adaptive, target=target, horizon=horizon, limit=limit, metric=metric, steps=steps
    )
    return Controller(init=functools.partial(dict, value=start), update=update)


def _adaptive(
    state: Mapping[str, float],
    metrics: Mapping[str, float],
    *,
    target: float,
    horizon: float,
    limit: float,
    metric: str,
    steps: int | None,
) -> dict[str, float]:
    if steps is None:
        raise ValueError(
            "steps=None: only a schedule knows the run's length; outside a schedule give adaptive"
            " the number of steps"
        )
    divergence = metrics.get(metric, math.nan)
    if not math.isfinite(divergence):
        return dict(state)
    error = max(-limit, min(limit, divergence / target - 1))
    return {"value": state["value"] * (1 + error * min(1.0, 1 / (horizon * steps)))}


def adaptive_entropy(
    *,
    start: float = 0.0,
    target: float = 0.2,
    step: float = 0.005,
    low: float = 0.0,
    high: float = 1.0,
    metric: str = "policy/entropy",
) -> Controller:
    """A coefficient to keep the entropy near a target: it grows by `step` after an RL step with a
    lower entropy, and falls by `step` after an RL step with a higher entropy, within [low, high].

    After He et al. 2025, arXiv:2505.22312, as in TRL. In the paper the bonus counts only while the
    entropy is at most the target; here the coefficient always counts, and falls above the target. A
    step without a finite entropy changes nothing.

    Args:
      target: nats per sampled token.
      step: greater than 0.
      low, high: bounds of the coefficient, low ≤ start ≤ high.
    Raises: ValueError if a number is outside its range.
    """
    if not step > 0:
        raise ValueError(f"step={step}: must be greater than 0")
    if not low <= start <= high:
        raise ValueError(f"low={low}, start={start}, high={high}: must ascend")
    update = functools.partial(
        _adaptive_entropy, target=target, step=step, low=low, high=high, metric=metric
    )
    return Controller(init=functools.partial(dict, value=start), update=update)


def _adaptive_entropy(
    state: Mapping[str, float],
    metrics: Mapping[str, float],
    *,
    target: float,
    step: float,
    low: float,
    high: float,
    metric: str,
) -> dict[str, float]:
    entropy = metrics.get(metric, math.nan)
    change = step * ((entropy < target) - (entropy > target))  # nan is neither
    return {"value": max(low, min(high, state["value"] + change))}
