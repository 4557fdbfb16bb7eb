"""Policy losses per token: [B, T], unmasked and unreduced; the weights of `aggregation` mask and reduce.

Inputs are finite everywhere: `token_ratio` and `fill_masked` put neutral constants under the mask first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional._arguments import require


def clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Clipped surrogate loss, per token.

    loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    A token has no gradient once its ratio has left the interval in the direction that its advantage asks for.

    Args:
      ratio: [B, T] π / π_old, > 0, carries the gradient.
      advantages: [B, T] a constant: no gradient flows into it.
      clip_low, clip_high: dimensionless half-widths, 0 < clip_low ≤ 1, clip_high > 0. DAPO: 0.2 and 0.28.
    Returns: [B, T] loss in units of advantage.
    Raises: ValueError naming the argument, its value and the allowed range.
    Source: Schulman et al. 2017 eq. 7, arXiv:1707.06347; two widths Yu et al. 2025 (DAPO) eq. 10, arXiv:2503.14476. No
      dual
      clip: verl's default loss has one (c = 3), TRL's has none.

    >>> clipped(torch.tensor([[1.5]]), torch.tensor([[1.0]]))
    tensor([[-1.2000]])
    """
    require(0 < clip_low <= 1, "clip_low", clip_low, "0 < clip_low ≤ 1")
    require(clip_high > 0, "clip_high", clip_high, "> 0")
    advantages = advantages.detach()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Score-function loss, per token; for data sampled by the very policy being trained.

    loss_t = -A_t log π_t

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      advantages: [B, T] a constant: no gradient flows into it.
    Returns: [B, T]; only its gradient means anything.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", section 4.

    >>> reinforce(torch.tensor([[-0.5]]), torch.tensor([[2.0]]))
    tensor([[1.]])
    """
    return -advantages.detach() * logprobs
