"""Importance ratios of the policy being trained over the policy before the update, per token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional.masking import fill_masked, full_precision

LOG_RATIO_BOUND = 20.0  # e^20 = 4.9e8: far beyond any clip, far below overflow


def token_ratio(logprobs: Tensor, logprobs_old: Tensor, response_mask: Tensor) -> Tensor:
    """Ratio of each token's probability, new policy over old.

    r_t = exp(clamp(log π_t - log π_old_t, -20, 20)); 1 where the mask is False

    Args:
      logprobs: [B, T] in nats, carries the gradient. Anything, nan and inf included, under the mask.
      logprobs_old: [B, T] in nats, a constant: no gradient flows into it.
      response_mask: [B, T] bool.
    Returns: [B, T] in [e^-20, e^20], float32 or float64. Its gradient is r_t within the clamp, 0 beyond it and under
      the mask.
    Source: PPO, Schulman et al. 2017, section 3, arXiv:1707.06347; the clamp as in verl (TRL has none).

    >>> token_ratio(torch.tensor([[-1.0, -1e4]]), torch.tensor([[-1.0, 0.0]]), torch.tensor([[True, False]]))
    tensor([[1., 1.]])
    """
    new = fill_masked(full_precision(logprobs), response_mask, 0.0)
    old = fill_masked(full_precision(logprobs_old.detach()), response_mask, 0.0)
    return torch.exp((new - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
