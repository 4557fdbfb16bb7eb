"""Held-out evaluation: the same episodes and verifiers as training, with sampling settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlkit.functional.statistics import mean_interval, pass_at_k, wilson
from rlkit.rewards import Reward, score
from rlkit.rollouts.collect import collect
from rlkit.rollouts.summary import by_part
from rlkit.types import Policy, Rollout, Task

CORRECT = 1.0  # a verifier's score of a right answer


def is_correct(rollout: Rollout) -> bool:
    """Whether the verifier gave full marks, the rewards of the steps included."""
    return rollout.total_reward is not None and rollout.total_reward >= CORRECT


def greedy_accuracy(policy: Policy, tasks: Sequence[Task], *, reward: Reward, **collecting: Any) -> tuple[dict[str, Any], list[Rollout]]:
    """One greedy reply per task.

    Args:
      reward: the verifier; a score of 1 or more is right.
      collecting: generate, environment and max_new_tokens, as for `collect`.
    Returns: accuracy, its Wilson 95 % interval [low, high], n, and the mean reward; of a mixture, the same under `parts`; and the rollouts.
    """
    rollouts = score(collect(policy, tasks, temperature=0.0, **collecting), reward)
    return _with_parts(rollouts, accuracy), rollouts


def sampled_accuracy(
    policy: Policy, tasks: Sequence[Task], *, reward: Reward, samples: int, k: Sequence[int], temperature: float, **collecting: Any
) -> tuple[dict[str, Any], list[Rollout]]:
    """Several sampled replies per task.

    Returns: for avg@samples and every pass@k a value and its 95 % interval over tasks; of a mixture, the same under `parts`; and the
      rollouts.
    Raises: ValueError where a k is larger than `samples`.
    """
    if max(k) > samples:
        raise ValueError(f"evaluation.k: pass@{max(k)} needs at least {max(k)} samples a task; evaluation.samples is {samples}")
    rollouts = score(collect(policy, tasks, group_size=samples, temperature=temperature, **collecting), reward)
    return _with_parts(rollouts, partial(curves, samples=samples, k=k)), rollouts


def _with_parts(rollouts: Sequence[Rollout], measure: Callable[[Sequence[Rollout]], dict[str, Any]]) -> dict[str, Any]:
    """A measure of all rollouts, and under `parts` that of each part of a mixture."""
    parts = {part: measure(own) for part, own in by_part(rollouts).items()}
    return measure(rollouts) | ({"parts": parts} if parts else {})


def accuracy(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Share of right rollouts, its Wilson 95 % interval, n, and the mean reward."""
    right = sum(map(is_correct, rollouts))
    low, high = wilson(right, len(rollouts))
    scored = [total for r in rollouts if (total := r.total_reward) is not None]
    mean = sum(scored) / len(scored) if scored else float("nan")
    return {"accuracy": right / len(rollouts), "interval": [low, high], "n": len(rollouts), "reward": mean}


def curves(rollouts: Sequence[Rollout], *, samples: int, k: Sequence[int]) -> dict[str, Any]:
    """avg@samples and every pass@k of rollouts whose samples of a task stand side by side."""
    right = [sum(map(is_correct, rollouts[i : i + samples])) for i in range(0, len(rollouts), samples)]
    estimates = {f"avg@{samples}": [c / samples for c in right]}
    estimates |= {f"pass@{j}": [pass_at_k(samples, c, j) for c in right] for j in k}
    out = {}
    for name, values in estimates.items():
        mean, low, high = mean_interval(values)
        out[name] = {"value": mean, "interval": [max(0.0, low), min(1.0, high)]}
    return out
