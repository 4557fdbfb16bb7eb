"""Make controllers, and test conditions. A controller is a number that changes with a run's
metrics; its state is explicit. A condition tests a step's metrics, for example `reward/mean > 0.8
for 5`."""

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
    """Hold a condition `metric operator bound`. The condition is fulfilled once it has held on
    `times` consecutive steps."""

    metric: str
    operator: str
    bound: float
    times: int = 1


@functools.lru_cache(maxsize=64)
def read_condition(text: str) -> Condition:
    """Read a condition: METRIC, one of > >= < <=, NUMBER, and optionally `for N`. N is the number
    of consecutive steps on which the condition must hold.

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
    """Return the number of consecutive steps on which a condition has held, up to and including the
    present step. A metric of nan does not fulfil the condition.

    A step without the metric does not change the number. Therefore `eval/accuracy > 0.9 for 2`
    asks for two consecutive evaluations.

    Args:
      before: the number of consecutive steps before the present step.
      metrics: the metrics of the present step.
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
    """Make a coefficient that keeps a divergence near a target.

    After each RL step the coefficient is multiplied by `1 + clip(KL / target - 1, ±limit) · min(1,
    1 / (horizon · steps))`. A step without a finite KL changes nothing.

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2, have 0.1 in place of min(…). Their code and
    verl count a horizon in rollouts: a horizon of H rollouts, with n rollouts in a step,
    corresponds to `horizon = H / (n · steps)`. Here the
    horizon is a share of the run. Therefore the coefficient can change as much in a short run as in
    a long run. With the defaults this is a factor of about e², up or down. Their KL is k1 summed
    over a rollout and `metric` is a mean over tokens, so their targets do not carry over.

    Args:
      start: coefficient of the first step, greater than 0, because the coefficient is only ever
        multiplied.
      target: value of `metric` to stay near, in nats, greater than 0.
      horizon: share of `steps`, in (0, 1]. During this share of the run the coefficient changes by
        at most about the share `limit` of its value.
      limit: largest relative error that counts, in (0, 1).
      metric: the metric to hold at the target. kl/ref_k3 is in nats per token.
      steps: the number of RL steps that the horizon is a share of. None: all steps of the run, or
        of the phase that defines the controller.
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
    """Make a coefficient that keeps the entropy near a target. After an RL step with an entropy
    below the target, the coefficient grows by `step`. After an RL step with an entropy above the
    target, the coefficient falls by `step`. The coefficient stays within [low, high].

    The rule is from He et al. 2025, arXiv:2505.22312, as in TRL. In the paper the bonus counts only
    while the entropy is at most the target. Here the bonus always counts, and the coefficient falls
    while the entropy is above the target. A step without a finite entropy changes nothing.

    Args:
      start: coefficient of the first step.
      target: nats per sampled token.
      step: change of the coefficient after an RL step, greater than 0.
      low, high: bounds of the coefficient, low ≤ start ≤ high.
      metric: the metric to hold at the target.
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
