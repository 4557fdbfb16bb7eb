"""Off-policy corrections between the engine that sampled and the trainer: a factor on each token's policy loss [B, T].

Two implementations of one policy give slightly different log-probs, so the samples come from a policy that is not quite
the old one. The factor is computed once over the whole update batch, without gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def no_correction(response_mask: Tensor) -> Tensor:
    """The sampler is taken for the old policy.

    w_t = 1

    Args:
      response_mask: [B, T] bool.
    Returns: [B, T] float32, all 1.
    Source: PPO as published, Schulman et al. 2017, arXiv:1707.06347, knows one policy that samples and is old.

    >>> no_correction(torch.tensor([[True, False]]))
    tensor([[1., 1.]])
    """
    return torch.ones(response_mask.shape, device=response_mask.device)
