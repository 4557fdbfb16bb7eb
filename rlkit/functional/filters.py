"""Filters: which rollouts take part in the update, (rewards, group_ids) → [N] bool; which tokens, (…) → [B, T] bool."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_all(rewards: Tensor) -> Tensor:
    """Every rollout is kept, also those that cannot be scored (their advantage is 0).

    Args:
      rewards: [N].
    Returns: [N] bool, all True.
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> keep_all(torch.tensor([1.0, float("nan")]))
    tensor([True, True])
    """
    return torch.ones_like(rewards, dtype=torch.bool)


def mixed_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Keep the groups whose rewards differ; a group that all succeeds or all fails has no signal.

    keep_i = max_{j in group of i} R_j > min_{j in group of i} R_j

    The comparison is exact, on the raw rewards: a standard deviation of equal rewards need not be 0 in floating point.

    Args:
      rewards: [N], nan where it cannot be scored; nan rewards take no part in the comparison.
      group_ids: [N] any integers; members need not be neighbours.
    Returns: [N] bool. A kept group is kept whole, its unscored rollouts included; a group with fewer than two scored
      rollouts is dropped.
    Source: dynamic sampling, DAPO, Yu et al. 2025, section 3.2, arXiv:2503.14476, which asks 0 < number correct < G;
      the same for rewards of two values.

    >>> mixed_groups(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([5, 5, 9, 9]))
    tensor([ True,  True, False, False])
    """
    _, group = group_ids.unique(return_inverse=True)
    scored = ~rewards.isnan()
    highest = torch.full_like(rewards, -torch.inf).scatter_reduce(0, group, rewards.where(scored, -torch.inf), "amax")
    lowest = torch.full_like(rewards, torch.inf).scatter_reduce(0, group, rewards.where(scored, torch.inf), "amin")
    return (highest > lowest)[group]


def every_token(response_mask: Tensor) -> Tensor:
    """The policy loss of every sampled token counts.

    Args:
      response_mask: [B, T] bool.
    Returns: [B, T] bool, the same.
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> every_token(torch.tensor([[True, False]]))
    tensor([[ True, False]])
    """
    return response_mask
