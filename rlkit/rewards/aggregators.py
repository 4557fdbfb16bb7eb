"""Aggregate named components to one reward. An aggregator gets the components of non-zero weight,
and none of their values is None.

Each component is multiplied by its weight, so a negative weight makes a component a penalty under
every aggregator. An aggregator marked `batched` takes all scored rollouts and the weights, and
returns a list of rewards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlkit.rewards.declarations import batched
from rlkit.types import Rollout, keeps


@keeps("non_negative", "raw")
def weighted_sum(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Compute Σ weight * score over the components, in their order.

    Args:
      scores: score of each component by name, in the component's own unit.
      weights: weight of each component by name; a negative weight makes it a penalty.
    Raises: KeyError if a component has no weight.
    """
    return sum(weights[name] * score for name, score in scores.items())


@keeps("binary", "non_negative", "raw")
def smallest(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Compute min weight * score: the worst component decides. Arguments as in `weighted_sum`, with
    at least one component."""
    return min(weights[name] * score for name, score in scores.items())


@keeps("binary", "non_negative", "raw")
def largest(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Compute max weight * score: one good component is enough. Arguments as in `weighted_sum`,
    with at least one component."""
    return max(weights[name] * score for name, score in scores.items())


@keeps("non_negative", "raw")
def mean(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Compute `Σ weight * score / Σ |weight|`. The sum of the weights does not change the scale of
    the reward. If no weight is negative, the mean lies between the smallest and the largest score.

    Args: those of `weighted_sum`, with at least one component.
    """
    return weighted_sum(scores, weights) / sum(abs(weights[name]) for name in scores)


@keeps("binary", "non_negative", "raw")
def product(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Compute Π weight * score. If one component is 0, the reward is 0. Therefore a right answer in
    the wrong form gets no reward.

    Args: those of `weighted_sum`. Components should be in 0 … 1, because two negative factors make
    a positive product.
    """
    return math.prod(weights[name] * score for name, score in scores.items())


@keeps()
@batched
def group_normalised(
    rollouts: Sequence[Rollout], weights: Mapping[str, float], *, eps: float = 1e-4
) -> list[float]:
    """Compute Σ_k weight_k * (r_k - mean_g(r_k)) / (std_g(r_k) + eps). r_k is the score of
    component k, and g is the prompt's group. Each component is divided by its own standard
    deviation within the group.

    Therefore a component with a large spread does not hide a component with a small spread. The
    rewards of a group sum to 0, so `reward/mean` is always 0. `reward/NAME/mean` shows how good the
    policy is. The published GDPO also divides by the standard deviation over the batch. To do the
    same, set algorithm/advantage=raw algorithm/normalization=batch.

    Args:
      rollouts: rollouts with their components in `rewards` and the number of their prompt in
        `group`.
      weights: weight of each component by name.
      eps: added to each standard deviation, ≥ 0, in units of a component.
    Returns: a dimensionless reward for each rollout. std is the standard deviation of a sample
      (n-1). A component adds exactly 0 if all its values in the group are equal, or if the group
      has only one rollout.
    Source: GDPO, Liu et al. 2026, arXiv:2601.05242.
    """
    groups: dict[int, list[int]] = defaultdict(list)
    for i, rollout in enumerate(rollouts):
        groups[rollout.group].append(i)
    out = [0.0] * len(rollouts)
    for members in groups.values():
        for name, weight in weights.items():
            column = [float(rollouts[i].rewards[name] or 0.0) for i in members]
            if min(column) == max(column):
                continue
            centre = fmean(column)
            spread = math.sqrt(sum((x - centre) ** 2 for x in column) / (len(column) - 1))
            for i, x in zip(members, column, strict=True):
                out[i] += weight * (x - centre) / (spread + eps)
    return out
