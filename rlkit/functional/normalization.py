"""Normalisations of advantages: (advantages [B, T], …) → [B, T], computed over the whole update
batch and without gradient.

Any advantage can be combined with any normalisation. Entries outside the response mask are ignored
and may have any value. The arithmetic is in float64 and the result has the dtype of `advantages`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlkit.functional._arguments import require, require_unsigned
from rlkit.functional._groups import spread
from rlkit.functional.masking import fill_masked, rollout_mean


def no_normalization(advantages: Tensor) -> Tensor:
    """Return the advantages unchanged, in units of reward.

    A_t

    Args:
      advantages: [B, T].
    Returns: [B, T], `advantages` itself.
    Source: Dr. GRPO, Liu et al. 2025, section 3.2, arXiv:2503.20783.

    >>> no_normalization(torch.tensor([[2.0]]))
    tensor([[2.]])
    """
    return advantages


def normalize_group(
    advantages: Tensor,
    rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    *,
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-4,
) -> Tensor:
    """Divide each advantage by the standard deviation of its group's rewards: GRPO with
    `group_mean`.

    A_t / (std_g(R) + eps)

    Args:
      advantages: [B, T], in units of reward.
      rewards: [N], nan for an unscored rollout, which does not count in the deviation.
      group_ids: [N] any integers.
      rollout_ids: [B], for each row an index into `rewards` and `group_ids`.
      std: "sample" divides the sum of squares by n-1 (TRL, verl, OpenRLHF), "population" by n
        (open-instruct). The paper leaves it open. Two rollouts with the rewards 0 and 1 get
        ±0.71 with "sample" and ±1 with "population".
      eps: ≥ 0, in units of reward. TRL uses 1e-4, verl and SkyRL 1e-6, OpenRLHF 1e-9.
    Returns: [B, T], dimensionless. Advantages are unchanged in a group of one and in a group with
      equal rewards. In these groups an advantage relative to the group is 0 anyway, and dividing
      any other advantage by epsilon would blow it up.
    Raises: ValueError naming `std` or `eps`.
    Source: GRPO, Shao et al. 2024, section 4.1.2, arXiv:2402.03300.

    >>> advantages, rewards = torch.tensor([[0.5], [-0.5]]), torch.tensor([1.0, 0.0])
    >>> normalize_group(
    ...     advantages,
    ...     rewards,
    ...     torch.tensor([0, 0]),
    ...     torch.tensor([0, 1]),
    ...     std="population",
    ...     eps=0.0,
    ... )
    tensor([[ 1.],
            [-1.]])
    """
    _require_deviation(std, eps)
    return (
        advantages.double() / spread(rewards, group_ids, std, eps)[rollout_ids].unsqueeze(-1)
    ).to(advantages.dtype)


def normalize_batch(
    advantages: Tensor,
    rewards: Tensor,
    *,
    std: Literal["sample", "population"] = "sample",
    eps: float = 1e-4,
) -> Tensor:
    """Divide the advantages by the standard deviation of all rewards of the batch. Easy and hard
    prompts share one scale.

    A_t / (std(R) + eps)

    Args:
      advantages: [B, T], in units of reward.
      rewards: [N], nan for an unscored rollout, which does not count in the deviation.
      std: "sample" or "population", as in `normalize_group`.
      eps: ≥ 0, in units of reward.
    Returns: [B, T], dimensionless. Advantages are unchanged if all rewards are equal, or if only
      one rollout is scored.
    Raises: ValueError naming `std` or `eps`.
    Source: Liu et al. 2025, "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning",
      arXiv:2508.08221; in TRL `scale_rewards="batch"`.

    >>> normalize_batch(
    ...     torch.tensor([[0.5], [-0.5]]), torch.tensor([1.0, -1.0]), std="population", eps=0.25
    ... )
    tensor([[ 0.4000],
            [-0.4000]])
    """
    _require_deviation(std, eps)
    # one scale for all rows; empty if N is 0
    scale = spread(rewards, torch.zeros_like(rewards, dtype=torch.int64), std, eps)[:1]
    return (advantages.double() / scale).to(advantages.dtype) if scale.numel() else advantages


def normalize_advantages(
    advantages: Tensor,
    rewards: Tensor,
    rollout_ids: Tensor,
    response_mask: Tensor,
    *,
    eps: float = 1e-4,
) -> Tensor:
    """Divide the advantages by their own standard deviation over the rollouts of the batch. Unlike
    the deviation of rewards, this scale does not grow if prompts have different mean rewards.

    A_t / (std(Â) + eps), Â_j the mean of A over the trained tokens of rollout j,
    std of a sample (n - 1)

    Args:
      advantages: [B, T].
      rewards: [N], nan for an unscored rollout, which does not count in the deviation.
      rollout_ids: [B], for each row an index into `rewards`.
      response_mask: [B, T] bool.
      eps: ≥ 0, in units of `advantages`.
    Returns: [B, T], dimensionless. Advantages are unchanged if all Â_j are equal.
    Raises: ValueError naming eps.
    Source: ScaleRL, Khatri et al. 2025, arXiv:2510.13786. TRL's paper index instead divides by
      the deviation of the batch's rewards, as `normalize_batch` does. TRL's ScaleRLTrainer divides
      by the root of a running mean of A² over the rollouts of mixed groups.

    >>> advantages, mask = torch.tensor([[2.0], [-2.0]]), torch.ones(2, 1).bool()
    >>> normalize_advantages(advantages, torch.ones(2), torch.tensor([0, 1]), mask, eps=0.0)
    tensor([[ 0.7071],
            [-0.7071]])
    """
    require_unsigned(eps=eps)
    counted = response_mask & ~rewards.isnan()[rollout_ids].unsqueeze(-1)
    of_rollouts = rollout_mean(advantages.double(), counted, rollout_ids)[:, 0]
    rows = counted.any(1)
    means = rewards.new_full(rewards.shape, torch.nan, dtype=torch.float64).index_put(
        (rollout_ids[rows],), of_rollouts[rows]
    )
    means = means[~means.isnan()]
    scale = means.std() + eps if len(means) > 1 and means.max() > means.min() else 1.0
    return (advantages.double() / scale).to(advantages.dtype)


def whiten(
    advantages: Tensor,
    rewards: Tensor,
    rollout_ids: Tensor,
    response_mask: Tensor,
    *,
    eps: float = 1e-8,
) -> Tensor:
    """Standardise the advantages over all trained tokens of the batch. With `gae` this is PPO, with
    `reward_to_go` it is REINFORCE++.

    (A_t - mean(A)) / √(var(A) + eps), var of a sample (n - 1)

    Args:
      advantages: [B, T].
      rewards: [N], nan for an unscored rollout, whose tokens do not count.
      rollout_ids: [B], for each row an index into `rewards`.
      response_mask: [B, T] bool.
      eps: ≥ 0, in squared units of `advantages`; 1e-8 as in verl.
    Returns: [B, T], dimensionless; sums to 0 over the trained tokens of scored rollouts and is 0
      everywhere else. All are 0 if the advantages are equal, or with fewer than two tokens.
    Raises: ValueError naming eps.
    Source: Andrychowicz et al. 2021, section 3.3, arXiv:2006.05990, who standardise each minibatch
      instead of the batch; REINFORCE++, Hu 2025, arXiv:2501.03262, who adds eps to the
      deviation. OpenRLHF divides by the number of tokens and takes max(variance, 1e-8).

    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> whiten(
    ...     torch.tensor([[1.0, 9.0], [0.0, 0.0]]),
    ...     torch.tensor([1.0, 0.0]),
    ...     torch.tensor([0, 1]),
    ...     mask,
    ... )
    tensor([[ 1.1547,  0.0000],
            [-0.5774, -0.5774]])
    """
    require_unsigned(eps=eps)
    counts = response_mask & ~rewards.isnan()[rollout_ids].unsqueeze(-1)
    counted = advantages.double()[counts]
    if counted.numel() < 2 or bool((counted == counted[0]).all()):
        return torch.zeros_like(advantages)
    return fill_masked(
        (advantages.double() - counted.mean()) / (counted.var() + eps).sqrt(), counts, 0.0
    ).to(advantages.dtype)


def _require_deviation(std: str, eps: float) -> None:
    require(std in ("sample", "population"), "std", std, "sample or population")
    require_unsigned(eps=eps)
