"""Losses of the critic per token: (values, values_old, returns) → [B, T], neither masked nor
reduced.

They are reduced with the weights of the policy loss, so the critic learns from the same tokens in
the same proportions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional._arguments import require_positive


def squared_error(values: Tensor, returns: Tensor) -> Tensor:
    """Compute half the squared distance of the value from the return.

    loss_t = ½ (V_t - G_t)²

    Args:
      values: [B, T] in units of reward, carries the gradient.
      returns: [B, T] in units of reward, a constant; no gradient flows into it.
    Returns: [B, T] ≥ 0, in squared units of reward.
    Source: Schulman et al. 2017, section 5, arXiv:1707.06347, without the factor ½. The factor is
      as in OpenAI baselines, ppo2.

    >>> squared_error(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    tensor([[2.]])
    """
    return 0.5 * (values - returns.detach()).square()


def clipped_squared_error(
    values: Tensor, values_old: Tensor, returns: Tensor, *, clip: float = 0.2
) -> Tensor:
    """Compute half the squared distance of the value from the return, or of the clipped value,
    whichever is larger. The value is clipped to within `clip` of the old value.

    loss_t = ½ max((V_t - G_t)², (clip(V_t, V_old_t - clip, V_old_t + clip) - G_t)²)

    The gradient is 0 if the value has moved by more than `clip` and is nearer to the return than
    the clipped value.

    Args:
      values: [B, T] in units of reward, carries the gradient.
      values_old: [B, T] before the update, a constant; no gradient flows into it.
      returns: [B, T] in units of reward, a constant; no gradient flows into it.
      clip: > 0, in units of reward. TRL and SkyRL 0.2, verl and OpenRLHF 0.5.
    Returns: [B, T] ≥ 0, in squared units of reward; never less than `squared_error`.
    Raises: ValueError naming clip.
    Source: the implementation of Schulman et al. 2017, arXiv:1707.06347 (OpenAI baselines, ppo2).
      Engstrom et al. 2020, section 3, arXiv:2005.12729, print min in place of max.

    >>> clipped_squared_error(
    ...     torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]), clip=0.5
    ... )
    tensor([[0.1250]])
    """
    require_positive(clip=clip)
    values_old = values_old.detach()
    returns = returns.detach()
    held = torch.clamp(values, values_old - clip, values_old + clip)
    return 0.5 * torch.maximum((values - returns).square(), (held - returns).square())
