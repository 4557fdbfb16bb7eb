"""Held-out evaluation: the same episodes and verifiers as training, with sampling settings of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlkit.functional.statistics import mean_interval, pass_at_k, wilson
from rlkit.rewards import Reward, score
from rlkit.rollouts.collect import collect
from rlkit.types import Policy, Rollout, Task

CORRECT = 1.0  # a verifier's score of a right answer, where the task's metadata names no other as `correct_from`


def is_correct(rollout: Rollout) -> bool:
    """Whether the verifier gave what counts as right: full marks, or the task's own `correct_from` where even the best earns less."""
    return rollout.reward is not None and rollout.reward >= rollout.task.metadata.get("correct_from", CORRECT)


def greedy_accuracy(
    policy: Policy, tasks: Sequence[Task], *, reward: Reward, temperature: float = 0.0, **collecting: Any
) -> tuple[dict[str, Any], list[Rollout]]:
    """One episode per task, greedy unless a temperature is given.

    Args:
      reward: the verifier; which of its scores are right is told by `is_correct`.
      temperature: ≥ 0. A policy that plays by chance may do nothing but repeat itself in greedy decoding.
      collecting: generate, environment and max_new_tokens, as for `collect`.
    Returns: accuracy and its Wilson 95 % interval [low, high], n, the mean reward of what could be scored and its 95 % interval over
      tasks, and the temperature; and the rollouts.
    """
    rollouts = score(collect(policy, tasks, temperature=temperature, **collecting), reward)
    right = sum(map(is_correct, rollouts))
    mean, low, high = _mean_interval([r.reward for r in rollouts if r.reward is not None])
    result = {"accuracy": right / len(rollouts), "interval": list(wilson(right, len(rollouts))), "n": len(rollouts)}
    return result | {"reward": mean, "reward_interval": [low, high], "temperature": temperature}, rollouts


def sampled_accuracy(
    policy: Policy, tasks: Sequence[Task], *, reward: Reward, samples: int, k: Sequence[int], temperature: float, **collecting: Any
) -> tuple[dict[str, Any], list[Rollout]]:
    """Several sampled replies per task.

    Returns: for avg@samples, every pass@k and the mean reward of what could be scored a value and its 95 % interval over tasks; and the
      rollouts.
    Raises: ValueError where a k is larger than `samples`.
    """
    if max(k) > samples:
        raise ValueError(f"evaluation.k: pass@{max(k)} needs at least {max(k)} samples a task; evaluation.samples is {samples}")
    rollouts = score(collect(policy, tasks, group_size=samples, temperature=temperature, **collecting), reward)
    right = [sum(map(is_correct, rollouts[i : i + samples])) for i in range(0, len(rollouts), samples)]
    curves = {f"avg@{samples}": [c / samples for c in right]}
    curves |= {f"pass@{j}": [pass_at_k(samples, c, j) for c in right] for j in k}
    out = {}
    for name, values in curves.items():
        mean, low, high = mean_interval(values)
        out[name] = {"value": mean, "interval": [max(0.0, low), min(1.0, high)]}
    by_task = [[r.reward for r in rollouts[i : i + samples] if r.reward is not None] for i in range(0, len(rollouts), samples)]
    mean, low, high = _mean_interval([math.fsum(rewards) / len(rewards) for rewards in by_task if rewards])
    return out | {"reward": {"value": mean, "interval": [low, high]}}, rollouts


def _mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """As `mean_interval`; nan without values."""
    return mean_interval(values) if values else (math.nan, math.nan, math.nan)
