"""Scales of advantages: (advantages [B, T], …) → [B, T], over the whole update batch and without gradient.

An axis of its own: any advantage with any scale. Entries outside the response mask are ignored and may be anything.
"""

from __future__ import annotations

from torch import Tensor


def no_normalization(advantages: Tensor) -> Tensor:
    """Advantages as they are, in units of reward.

    A_t

    Args:
      advantages: [B, T].
    Returns: [B, T], the same.
    Source: Dr. GRPO, Liu et al. 2025, section 3.2, arXiv:2503.20783.

    >>> import torch
    >>> no_normalization(torch.tensor([[2.0]]))
    tensor([[2.]])
    """
    return advantages
