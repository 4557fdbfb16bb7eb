"""An old policy interpolated between sampler and trained policy, without a forward pass of its own;
and the binary KL of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional.masking import fill_masked, full_precision


def interpolated_old(
    logprobs: Tensor, logprobs_sampler: Tensor, old_share: Tensor, response_mask: Tensor
) -> Tensor:
    """Interpolate the old policy's log-probs between sampler and current policy, instead of
    computing them in a forward pass before the update.

    log old_t = log μ_t + a_t (log π_t - log μ_t), a constant

    a = 0 gives the sampler, a = 1 the current policy. (old / μ) (π / old) = π / μ holds for every
    a. Suppose the sampler's weights are d versions older than the policy's, and a = (d - 1) / d.
    Then π / old = (π / μ)^(1/d). This ratio is one of the d equal steps from sampler to policy, the
    step of this update. The current policy changes during the update, so old is computed again in
    every minibatch.

    Args:
      logprobs: [B, T] in nats, of the policy being trained; no gradient flows into it.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      old_share: [B, T], the interpolation weight a, 0 … 1.
      response_mask: [B, T] bool.
    Returns: [B, T] in nats, float32 or float64; 0 where the mask is False.
    Source: log-linear approximation of the proximal policy, A-3PO, arXiv:2512.06547. AReaL gives
      the policy in training the version from the start of the step, so its d is smaller by one, and
      a = 0 at d ≤ 1.

    >>> now, sampler, everywhere = (
    ...     torch.tensor([[-1.0, -1.0]]),
    ...     torch.tensor([[-2.0, -2.0]]),
    ...     torch.ones(1, 2).bool(),
    ... )
    >>> interpolated_old(now, sampler, torch.tensor([[0.0, 0.75]]), everywhere)  # d = 1 and d = 4
    tensor([[-2.0000, -1.2500]])
    """
    now, sampler, share = (
        fill_masked(full_precision(x.detach()), response_mask, 0.0)
        for x in (logprobs, logprobs_sampler, old_share)
    )
    return torch.where(share == 0, sampler, sampler + share * (now - sampler))


def binary_kl(logprobs: Tensor, logprobs_other: Tensor) -> Tensor:
    """Compute the KL between two policies over two outcomes: this token, or any other token.

    k(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b)), a = π_t, b = the other's

    Args:
      logprobs, logprobs_other: any shape, in nats; clamped to [-100, 0], and 1 - probability at
        1e-12.
    Returns: the same shape, in nats, ≥ 0 up to rounding; 0 if both agree. It is at most the KL of
      the whole next-token distributions.
    Source: the log sum inequality, Cover and Thomas 2006, section 2.7; as in DPPO,
      arXiv:2602.04879.

    >>> binary_kl(
    ...     torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    ... )  # 0.5 log 2 + 0.5 log(2 / 3)
    tensor([0.1438])
    """
    first, other = (full_precision(x).clamp(-100.0, 0.0) for x in (logprobs, logprobs_other))
    rest, rest_other = ((-torch.expm1(x)).clamp_min(1e-12) for x in (first, other))
    return first.exp() * (first - other) + rest * (rest.log() - rest_other.log())
