"""What becomes of rollouts that are too long: (rewards [N], …) → (rewards [N] that the advantage sees, [N] bool trained on)."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_overlong(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Length changes nothing: every rollout is trained on, with the reward that it got.

    Args:
      rewards: [N], nan where it cannot be scored.
    Returns: the same rewards [N], and all True [N].
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> keep_overlong(torch.tensor([1.0]))
    (tensor([1.]), tensor([True]))
    """
    return rewards, torch.ones_like(rewards, dtype=torch.bool)
