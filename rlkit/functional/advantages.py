"""Advantages of whole rollouts: [N] rewards → [N], computed once without gradient over the whole update batch.

A reward of nan cannot be scored: it takes no part in any baseline and its advantage is 0. Where the rewards compared
with each other are all equal the advantage is exactly 0, with no rounding for an epsilon to blow up. The arithmetic is
in float64 and the result has the dtype of `rewards`.

Token-level estimators ([B, T]: discounted returns, GAE) belong here too.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.filters import mixed_groups


def raw(rewards: Tensor) -> Tensor:
    """The reward itself: REINFORCE without a baseline.

    A_i = R_i

    Args:
      rewards: [N], nan where it cannot be scored.
    Returns: [N], in units of reward; 0 for nan.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", section 4.

    >>> raw(torch.tensor([1.0, float("nan"), -2.0]))
    tensor([ 1.,  0., -2.])
    """
    return rewards.where(~rewards.isnan(), 0.0)


def batch_mean(rewards: Tensor) -> Tensor:
    """The reward above the mean of the whole batch: REINFORCE with a baseline.

    A_i = R_i - mean(R)

    Args:
      rewards: [N], nan where it cannot be scored.
    Returns: [N], in units of reward; sums to 0 over the batch. All equal, or only one scored: 0.
    Source: Williams 1992, section 4; the mean includes R_i itself, which shrinks the expected gradient by (N-1)/N.

    >>> batch_mean(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 0.5000, -0.5000, -0.5000,  0.5000])
    """
    return group_mean(rewards, torch.zeros_like(rewards, dtype=torch.int64))


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward above the mean of its group, not divided by a standard deviation.

    A_i = R_i - mean_g(R)

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers; members need not be neighbours.
    Returns: [N], in units of reward; sums to 0 over a group. All equal, or a group of one: 0.
    Source: Dr. GRPO, Liu et al. 2025, section 3.2, arXiv:2503.20783.

    >>> group_mean(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([0, 0, 1]))
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    deviation, _, _ = _centred(rewards, group_ids)
    return deviation.to(rewards.dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward above the mean of the *other* rollouts of its group.

    A_i = R_i - Σ_{j≠i} R_j / (n-1) = n/(n-1) · (R_i - mean_g(R)), n scored rollouts in the group

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers.
    Returns: [N], in units of reward. All equal, or a group of one: 0 (verl's loop form gives a group of one its reward;
      its vectorised form gives 0, as here).
    Source: RLOO, Ahmadian et al. 2024, section 3.3, arXiv:2402.14740; Kool et al. 2019.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 0, 0]))
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    deviation, count, group = _centred(rewards, group_ids)
    return (deviation * (count / (count - 1).clamp_min(1))[group]).to(rewards.dtype)


def group_norm(rewards: Tensor, group_ids: Tensor, *, std: Literal["sample", "population"] = "sample", eps: float = 1e-4) -> Tensor:
    """The reward standardised within its group.

    A_i = (R_i - mean_g(R)) / (std_g(R) + eps)

    Args:
      rewards: [N], nan where it cannot be scored.
      group_ids: [N] any integers.
      std: "sample" divides the squares by n-1 (TRL, verl, OpenRLHF), "population" by n (open-instruct, the paper's code
        leaves it open). For two rollouts, 0 and 1, that is ±0.71 against ±1.
      eps: ≥ 0, in units of reward. TRL 1e-4, verl and SkyRL 1e-6, OpenRLHF 1e-9.
    Returns: [N], dimensionless. All equal, or a group of one: exactly 0 (verl gives a group of one its reward).
    Raises: ValueError naming `std` or `eps`.
    Source: GRPO, Shao et al. 2024, section 4.1.2, arXiv:2402.03300.

    >>> group_norm(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), std="population", eps=0.0)
    tensor([ 1., -1.])
    """
    require(std in ("sample", "population"), "std", std, "sample or population")
    require(0 <= eps < float("inf"), "eps", eps, "≥ 0 and finite")
    deviation, count, group = _centred(rewards, group_ids)
    squares = torch.zeros_like(count).index_add(0, group, deviation.square())
    free = (count - 1 if std == "sample" else count).clamp_min(1)
    scale = (squares / free).sqrt() + eps
    scale = scale.where(squares > 0, 1.0)  # nothing to divide in a group without spread
    return (deviation / scale[group]).to(rewards.dtype)


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Deviations from the group's mean [N], scored rollouts a group [groups], and which group each rollout is in [N].

    Deviations are exactly 0 for nan rewards and in groups without spread.
    """
    groups, group = group_ids.unique(return_inverse=True)
    scored = ~rewards.isnan()
    scores = rewards.double().where(scored, 0.0)
    zeros = scores.new_zeros(groups.numel())
    count = zeros.index_add(0, group, scored.double())
    mean = zeros.index_add(0, group, scores) / count.clamp_min(1)
    deviation = (scores - mean[group]).where(scored & mixed_groups(rewards, group_ids), 0.0)
    return deviation, count, group
