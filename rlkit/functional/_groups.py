"""Statistics of groups of rewards, for advantages and their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.filters import mixed_groups


def centre_groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute each reward's deviation from the mean of its group.

    The arithmetic is in float64. A deviation is exactly 0 for a nan reward, and in a group whose
    rewards are all equal.

    Returns: the deviations [N], the number of scored rollouts of each group [groups], and the index
      of each rollout's group [N].
    """
    require(rewards.is_floating_point(), "rewards.dtype", rewards.dtype, "floating-point numbers")
    shapes = tuple(rewards.shape), tuple(group_ids.shape)
    require(shapes[0] == shapes[1], "rewards.shape", shapes[0], f"that of group_ids, {shapes[1]}")
    groups, group = group_ids.unique(return_inverse=True)
    scored = ~rewards.isnan()
    scores = rewards.double().where(scored, 0.0)
    zeros = scores.new_zeros(groups.numel())
    count = zeros.index_add(0, group, scored.double())
    mean = zeros.index_add(0, group, scores) / count.clamp_min(1)
    deviation = (scores - mean[group]).where(scored & mixed_groups(rewards, group_ids), 0.0)
    return deviation, count, group


def spread(rewards: Tensor, group_ids: Tensor, std: str, eps: float) -> Tensor:
    """Return the standard deviation of each rollout's group plus eps [N]. It is 1 for a group whose
    rewards are all equal, because their deviations are 0 already."""
    deviation, count, group = centre_groups(rewards, group_ids)
    squares = torch.zeros_like(count).index_add(0, group, deviation.square())
    free = (count - 1 if std == "sample" else count).clamp_min(1)
    return ((squares / free).sqrt() + eps).where(squares > 0, 1.0)[group]
