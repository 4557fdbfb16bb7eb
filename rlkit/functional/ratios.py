"""Importance ratios: the policy being trained over the policy before the update, for each token or
for its whole rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional.masking import fill_masked, full_precision, rollout_mean

LOG_RATIO_BOUND = 20.0  # e^20 = 4.9e8: far beyond any clip, far below overflow


def token_ratio(logprobs: Tensor, logprobs_old: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the ratio of each token's probability, new policy over old.

    r_t = exp(clamp(log π_t - log π_old_t, -20, 20)); 1 if the mask is False

    Args:
      logprobs: [B, T] in nats, carries the gradient. Any value, also nan or inf, where the mask is
        False.
      logprobs_old: [B, T] in nats, a constant; no gradient flows into it.
      response_mask: [B, T] bool.
    Returns: [B, T] in [e^-20, e^20], float32 or float64. Its gradient is r_t within the clamp. It
      is 0 beyond the clamp and where the mask is False.
    Source: PPO, Schulman et al. 2017, section 3, arXiv:1707.06347; the clamp as in verl (TRL has
      none).

    >>> token_ratio(
    ...     torch.tensor([[-1.0, -1e4]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[True, False]])
    ... )
    tensor([[1., 1.]])
    """
    return torch.exp(
        log_ratio(logprobs, logprobs_old, response_mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    )


def sequence_ratio(
    logprobs: Tensor, logprobs_old: Tensor, response_mask: Tensor, rollout_ids: Tensor
) -> Tensor:
    """Compute the geometric mean of the token ratios of each whole rollout.

    s_j = exp(clamp(mean over the trained tokens of rollout j of (log π_t - log π_old_t), -20, 20));
    1 where the mask is False

    A rollout's mean is over all its rows, so all of them must be passed. `micro_batches` keeps the
    rows of a rollout together.

    Args:
      logprobs: [B, T] in nats, carries the gradient. Any value, also nan or inf, where the mask is
        False.
      logprobs_old: [B, T] in nats, a constant; no gradient flows into it.
      response_mask: [B, T] bool.
      rollout_ids: [B] int64, which rollout a row belongs to.
    Returns: [B, T], equal at all trained tokens of a rollout. The gradient of each entry is s_j /
      |y_j| with respect to every token of the rollout; aggregated by `sequence_mean`, the loss is
      the objective of the paper.
    Source: GSPO, Zheng et al. 2025 eq. 7, arXiv:2507.18071; in TRL
      `importance_sampling_level="sequence"`. The bound of ±20 on the mean is ours.

    >>> new, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.5]])
    >>> sequence_ratio(new, old, torch.tensor([[True, True]]), torch.tensor([0]))
    tensor([[1.6487, 1.6487]])
    """
    mean = rollout_mean(
        log_ratio(logprobs, logprobs_old, response_mask), response_mask, rollout_ids
    )
    ratio = torch.exp(mean.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).expand(response_mask.shape)
    return fill_masked(ratio, response_mask, 1.0)


def sequence_token_ratio(
    logprobs: Tensor, logprobs_old: Tensor, response_mask: Tensor, rollout_ids: Tensor
) -> Tensor:
    """Return the rollout's ratio as value, with each token's own gradient. It is for advantages
    with different values within a rollout.

    s_jt = sg[s_j] π_t / sg[π_t], s_j as in `sequence_ratio`; 1 where the mask is False

    Args:
      logprobs: [B, T] in nats, carries the gradient. Any value, also nan or inf, where the mask is
        False.
      logprobs_old: [B, T] in nats, a constant; no gradient flows into it.
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be passed.
    Returns: [B, T], equal at all trained tokens of a rollout. The gradient of each entry is s_j
      with respect to its own token. With equal advantages within a rollout and `sequence_mean` the
      loss has the gradient of `sequence_ratio`.
    Source: GSPO-token, Zheng et al. 2025 eq. 13-14, arXiv:2507.18071; in verl `gspo`, which caps
      s_j at e^10.

    >>> new, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.5]])
    >>> sequence_token_ratio(new, old, torch.tensor([[True, True]]), torch.tensor([0]))
    tensor([[1.6487, 1.6487]])
    """
    sequence = sequence_ratio(logprobs.detach(), logprobs_old, response_mask, rollout_ids)
    new = fill_masked(full_precision(logprobs), response_mask, 0.0)
    return sequence * torch.exp(new - new.detach())


def log_ratio(logprobs: Tensor, logprobs_old: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the difference of the log-probs of two policies, without a clamp.

    Δ_t = log π_t - log π_old_t; 0 if the mask is False

    Args:
      logprobs: [B, T] in nats, carries the gradient. Any value, also nan or inf, where the mask is
        False.
      logprobs_old: [B, T] in nats, a constant; no gradient flows into it.
      response_mask: [B, T] bool.
    Returns: [B, T] in nats, float32 or float64.
    Source: the logarithm of the ratio of PPO, Schulman et al. 2017, section 3, arXiv:1707.06347.

    >>> log_ratio(
    ...     torch.tensor([[-1.0, 9.0]]), torch.tensor([[-1.5, 0.0]]), torch.tensor([[True, False]])
    ... )
    tensor([[0.5000, 0.0000]])
    """
    new = fill_masked(full_precision(logprobs), response_mask, 0.0)
    return new - fill_masked(full_precision(logprobs_old.detach()), response_mask, 0.0)
