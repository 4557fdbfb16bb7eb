"""Filters: which rollouts take part in the update, (rewards, group_ids) → [N] bool; which tokens, (…) → [B, T] bool."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.masking import full_precision


def keep_all(rewards: Tensor) -> Tensor:
    """Every rollout is kept, even if it cannot be scored (its advantage is then 0).

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


def top_entropy(entropy_old: Tensor, response_mask: Tensor, *, fraction: float = 0.2) -> Tensor:
    """The tokens at which the policy was least certain: only they train.

    keep_t = H_t ≥ the (1 - fraction) quantile of H over all trained tokens of the update batch

    The quantile is interpolated between two neighbours. So the ⌊fraction · (n - 1)⌋ + 1 highest of n tokens are kept, and all that
    tie with the last of them. The loss is still a mean over all n
    tokens: the others add 0 to it, and keep their KL.

    Args:
      entropy_old: [B, T] in nats, before the update. Anything, nan and inf included, under the mask.
      response_mask: [B, T] bool.
      fraction: in (0, 1]; 1 keeps every token.
    Returns: [B, T] bool, False under the mask; at least one True where anything is trained.
    Raises: ValueError naming the fraction.
    Source: Wang et al. 2025, "Beyond the 80/20 rule", section 5, arXiv:2506.01939; the quantile as in TRL, ≥ kept.

    >>> top_entropy(torch.tensor([[0.1, 2.0, 0.3, 9.0]]), torch.tensor([[True, True, True, False]]))
    tensor([[False,  True, False, False]])
    """
    require(0 < fraction <= 1, "fraction", fraction, "0 < fraction ≤ 1")
    entropies = full_precision(entropy_old)
    trained = entropies[response_mask]
    if not trained.numel():
        return response_mask
    kept = int(round(fraction * (trained.numel() - 1), 6)) + 1  # rounded: 0.29 · 100 is 28.999…
    threshold = trained.kthvalue(trained.numel() - kept + 1).values  # torch.quantile ends at 16 million
    return response_mask & ~(entropies < threshold)  # so that nan stays visible
