"""Estimates of KL(π‖ref) per token, from log-probs of the tokens that π sampled.

Every estimator is an expectation over tokens drawn from π, and a gradient through the estimate alone leaves out that
the draw depends on π too. So the value and the gradient are two questions (on-policy, mean over tokens):

    estimator   expected value    its gradient in the loss    the gradient of ratio × estimator in the loss
    k1          KL(π‖ref)         0                           ∇KL(π‖ref)
    k2          ½ E[q²]           ∇KL(π‖ref)                  ∇ ½ E[q²]
    k3          KL(π‖ref)         ∇KL(ref‖π)                  ∇KL(π‖ref)

with q = log ref - log π. So k1 in the loss needs the ratio; in the reward, where no gradient flows, k1 is the natural
one. Log-ratios are clamped to ±20, beyond which the gradient is 0; within, nothing is biased. Nothing flows into the
reference. Estimators that need more than two log-probs (reverse, confident, full) belong here too.

Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional.masking import full_precision
from rlkit.functional.ratios import LOG_RATIO_BOUND


def k1(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """The log-ratio itself: unbiased, of either sign.

    k1_t = log π_t - log ref_t

    Value: E[k1] = KL(π‖ref). Gradient in the loss: 0 in expectation, noise otherwise; times the ratio it is ∇KL(π‖ref).

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
    Returns: [B, T] in nats, within ±20.
    Source: Schulman 2020, "Approximating KL divergence"; the penalty in the reward of Ouyang et al. 2022,
      arXiv:2203.02155.

    >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.5000]])
    """
    return -_log_ratio(logprobs, logprobs_ref)


def k2(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """Half the squared log-ratio: never negative, biased, close to KL for policies that are close.

    k2_t = ½ (log ref_t - log π_t)²

    Value: E[k2] → KL(π‖ref) as the policies meet. Gradient in the loss: ∇KL(π‖ref), exactly; no ratio wanted.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
    Returns: [B, T] in nats, 0 … 200.
    Source: Schulman 2020, "Approximating KL divergence".

    >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1250]])
    """
    return _log_ratio(logprobs, logprobs_ref).square() / 2


def k3(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """The log-ratio with a control variate: unbiased and never negative.

    k3_t = e^q - q - 1, q = log ref_t - log π_t

    Value: E[k3] = KL(π‖ref), with finite variance only where ref / π is bounded. Gradient in the loss: ∇KL(ref‖π), the
    other direction; times the ratio it is ∇KL(π‖ref). GRPO as published uses it without the ratio.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
    Returns: [B, T] in nats, 0 … e^20 (verl and OpenRLHF also clamp the result to ±10; TRL clamps nothing).
    Source: Schulman 2020, "Approximating KL divergence"; GRPO, Shao et al. 2024 eq. 4, arXiv:2402.03300.

    >>> k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1065]])
    """
    q = _log_ratio(logprobs, logprobs_ref)
    return torch.expm1(q) - q  # expm1: e^q - 1 loses all its digits where q is small


def _log_ratio(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """q = log ref - log π, clamped to ±20; the reference is a constant."""
    difference = full_precision(logprobs_ref.detach()) - full_precision(logprobs)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
