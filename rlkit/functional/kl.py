"""Estimates of KL(π‖ref) per token, from the log-probs of tokens sampled by π. Only `full` uses the
whole vocabulary.

Every estimator f estimates an expectation over tokens drawn from π. The draw depends on π too, but
differentiating f alone leaves this out. So a right value does not mean a right gradient, and the
gradient depends on where the KL is placed: in the loss or in the reward. The table gives the
on-policy gradient of the descent, per unit of the coefficient, with q = log ref - log π:

    estimator  value V      loss                 loss, importance_weight   reward
    k1         KL(π‖ref)    0                    ∇KL(π‖ref)                ∇KL(π‖ref)
    k2         ½ E[q²]      ∇KL(π‖ref)           ∇ ½ E[q²]                 ½ E[q² ∇log π]
    k3         KL(π‖ref)    ∇KL(ref‖π)           ∇KL(π‖ref)                ∇KL(π‖ref) - ∇KL(ref‖π)
    k3+        KL(π‖ref)    ∇KL(π‖ref)           2∇KL(π‖ref) - ∇KL(ref‖π)  ∇KL(π‖ref) - ∇KL(ref‖π)
    forward    KL(π‖ref)    ∇KL(π‖ref)           refused                   ∇KL(π‖ref)
    reverse    KL(ref‖π)    ∇KL(ref‖π)           refused                   -∇ ½ E_ref[q²]
    truncated  k3, |q| ≤ c  ∇KL(ref‖π), |q| < c  ∇V                        ∇V - that of the loss
    confident  k3, π_t > p  ∇KL(ref‖π), π_t > p  ∇V                        ∇V - that of the loss
    full       KL(π‖ref)    ∇KL(π‖ref)           ∇KL(π‖ref)                that of the later tokens

In the reward, the gradient of k2 equals ∇ ½ E[q²] - ∇KL(π‖ref), and the gradient of reverse equals
E_ref[q ∇log π]. forward and reverse already carry the importance weight, so they refuse a second.
In the reward the ratio of forward is 1, so forward is k1. full in the reward gives each token the
gradient ∇KL(π‖ref) of the later tokens; for an answer of one token this is 0.

The table is for one state. Over a rollout, the loss averages this gradient over the visited states,
as if π did not decide which states are visited. The reward also carries the effect of a token on V
at the later states. So `reward` with k1 gives ∇KL(π‖ref) of whole rollouts. For an estimator
without a ratio, loss and reward together give ∇V. The exception is k3+ (`k3_straight_through`),
since its gradient is not the gradient of its value. `reward_sequence` is `reward` with f / |y| in
place of f, so it penalises the mean over a rollout instead of the sum. `in_baseline` has the same
expected gradient as `reward` if the baseline does not depend on the rollout's own reward (`raw`,
`leave_one_out`).

So k1 (or forward) is the right choice for the reward. Near the reference, k2, k3 and truncated in
the reward only have a gradient of second order in q, so they do not pull towards the reference.
reverse in the reward pushes away from it. full in the reward is the part of the gradient that full
in the loss leaves out.

The ratio is the token's own, π_t / old_t from `logprobs_old`, even if the policy loss uses a ratio
per sequence. So `forward`, `reverse` and every estimator with importance_weight have the right
value and gradient on samples of the old policy, state by state. `full` is right without a ratio.
Log-ratios of tokens are clamped to ±20. Beyond the clamp the gradient of the estimate is 0; within
it nothing is biased. No gradient flows into the reference or the old policy.

Where policy and reference are the same model, k2, k3, k3+, truncated, confident and full are
exactly 0, and so is their gradient. They declare this by `@vanishes`. An update without any other
term is then skipped. The gradients of k1, forward and reverse are 0 only in expectation.

Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.masking import fill_masked, full_precision
from rlkit.functional.ratios import LOG_RATIO_BOUND
from rlkit.types import vanishes


def k1(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """Return the log-ratio itself: unbiased, of either sign.

    k1_t = log π_t - log ref_t

    Value: E[k1] = KL(π‖ref). Gradient in the loss: only noise, 0 in expectation. Multiplied by the
    ratio, k1 has the gradient ∇KL(π‖ref).

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
    Returns: [B, T] in nats, within ±20.
    Source: Schulman 2020, "Approximating KL divergence"; the penalty in the reward of Ouyang et al.
      2022, arXiv:2203.02155.

    >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.5000]])
    """
    return -_log_ratio(logprobs, logprobs_ref)


@vanishes("at_reference")
def k2(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """Return half the squared log-ratio: never negative, biased, close to KL for similar policies.

    k2_t = ½ (log ref_t - log π_t)²

    Value: E[k2] approaches KL(π‖ref) as the policies approach each other. Gradient in the loss:
    ∇KL(π‖ref), exactly, without a ratio.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
    Returns: [B, T] in nats, 0 … 200.
    Source: Schulman 2020, "Approximating KL divergence".

    >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1250]])
    """
    return _log_ratio(logprobs, logprobs_ref).square() / 2


@vanishes("at_reference")
def k3(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """Return the log-ratio with a control variate: unbiased and never negative.

    k3_t = e^q - q - 1, q = log ref_t - log π_t

    Value: E[k3] = KL(π‖ref), with finite variance if E[(ref / π)²] is finite. Gradient in the loss:
    ∇KL(ref‖π), the other direction. Multiplied by the ratio, k3 has the gradient ∇KL(π‖ref). GRPO
    as published uses k3 without the ratio.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
    Returns: [B, T] in nats, 0 … e^20 (verl also clamps the result to ±10, OpenRLHF the result
      alone, TRL nothing).
    Source: Schulman 2020, "Approximating KL divergence"; GRPO, Shao et al. 2024 eq. 4,
      arXiv:2402.03300.

    >>> k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1065]])
    """
    q = _log_ratio(logprobs, logprobs_ref)
    return torch.expm1(q) - q  # expm1: e^q - 1 loses all its digits if q is small


@vanishes("at_reference")
def k3_straight_through(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """Return k2_t - sg(k2_t) + sg(k3_t): the value of k3 with the gradient of k2.

    Value: E[k3] = KL(π‖ref). Gradient in the loss: ∇KL(π‖ref), exactly, without a ratio.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, a constant.
    Returns: [B, T] in nats, 0 … e^20; the gradient is 0 where the log-ratio is beyond ±20.
    Source: `k3+` in verl; the gradient of k2, Tang and Munos 2025, arXiv:2506.09477. verl also
      bounds the value by 10, and does not clamp the log-ratio of the gradient.

    >>> k3_straight_through(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1065]])
    """
    square = k2(logprobs, logprobs_ref)
    return square - square.detach() + k3(logprobs.detach(), logprobs_ref)


def forward(logprobs: Tensor, logprobs_ref: Tensor, logprobs_old: Tensor) -> Tensor:
    """Return k1 for use in the loss: the log-ratio times the ratio. Its gradient is that of the KL.

    forward_t = r_t (log π_t - log ref_t), r_t = π_t / old_t

    Value: E_old[forward] = KL(π‖ref). Gradient in the loss: ∇KL(π‖ref). It comes through r_t; the
    part through the log-ratio has expectation 0. Beyond the clamp, the log-ratio counts as ±20, and
    the gradient still points towards the reference.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
      logprobs_old: [B, T] in nats, of the old policy, treated as the sampler; without gradient.
    Returns: [B, T] in nats, of either sign.
    Source: Schulman 2020, "Approximating KL divergence"; the ratio as in Tang and Munos 2025,
      arXiv:2506.09477.

    >>> forward(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.0]]))
    tensor([[0.5000]])
    """
    return _ratio(logprobs, logprobs_old) * k1(logprobs, logprobs_ref)


def reverse(logprobs: Tensor, logprobs_ref: Tensor, logprobs_old: Tensor) -> Tensor:
    """Estimate KL(ref‖π), the opposite direction, from the policy's samples by importance weights.

    reverse_t = r_t e^q q, q = log ref_t - log π_t, r_t = π_t / old_t; its gradient is -r_t e^q ∇log
    π_t

    Value: E_old[reverse] = E_ref[q] = KL(ref‖π). Gradient in the loss: ∇KL(ref‖π) = -E_ref[∇log π].
    Within the clamp, differentiating the formula above gives the same gradient, because two terms
    in e^q q cancel. Beyond the clamp only one of the two terms would remain, with the wrong sign.
    So the code detaches the value and adds the gradient separately; this gradient is 0 beyond the
    clamp. The estimate varies as much as ref / π, so use it only if the two policies are close.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
      logprobs_old: [B, T] in nats, of the old policy, treated as the sampler; without gradient.
    Returns: [B, T] in nats, of either sign, of absolute value at most 20 e^40.
    Source: importance sampling of the definition of Kullback and Leibler 1951.

    >>> reverse(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.0]]))
    tensor([[-0.3033]])
    """
    q = _log_ratio(logprobs, logprobs_ref)
    weight = q.exp()  # carries the gradient: -e^q
    return _ratio(logprobs, logprobs_old).detach() * (
        weight - weight.detach() + (weight * q).detach()
    )


@vanishes("at_reference")
def truncated(logprobs: Tensor, logprobs_ref: Tensor, *, threshold: float = 1.0) -> Tensor:
    """Return k3 of the log-ratio, clamped on both sides. No single token dominates, and the value
    is never negative.

    truncated_t = e^q - q - 1, q = clamp(log ref_t - log π_t, -threshold, threshold)

    Value: `E[truncated] = KL(π‖ref)` if no log-ratio passes the threshold, biased otherwise.
    Gradient in the loss: `Σ (π - ref) ∇log π`, summed over the tokens within the threshold. If all
    tokens are within the threshold, the gradient is ∇KL(ref‖π). Tokens beyond the threshold add 0.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
      threshold: in nats, 0 < threshold ≤ 20.
    Returns: [B, T] in nats, 0 … e^threshold - threshold - 1.
    Raises: ValueError naming the threshold.
    Source: k3 of Schulman 2020, "Approximating KL divergence". A clamp on one side only can make an
      estimate negative.

    >>> truncated(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -9.0]]), threshold=0.5)
    tensor([[0.1065, 0.1065]])
    """
    require(
        0 < threshold <= LOG_RATIO_BOUND,
        "threshold",
        threshold,
        f"0 < threshold ≤ {LOG_RATIO_BOUND:g}",
    )
    q = _log_ratio(logprobs, logprobs_ref).clamp(-threshold, threshold)
    return torch.expm1(q) - q


@vanishes("at_reference")
def confident(logprobs: Tensor, logprobs_ref: Tensor, *, probability: float = 0.1) -> Tensor:
    """Return k3 on tokens likely under the policy and 0 on all others, so that exploration is not
    penalised.

    confident_t = e^q - q - 1 if π_t > probability, else 0; q = log ref_t - log π_t

    Value: the part of E[k3] from likely tokens; 0 if no token is likely. Gradient in the loss:
    `Σ (π - ref) ∇log π`, summed over the likely tokens. The choice of tokens has no gradient.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_ref: [B, T] in nats, on the same tokens; a constant.
      probability: a token is likely above this probability, 0 ≤ probability < 1; 0 gives k3.
    Returns: [B, T] in nats, 0 … e^20.
    Raises: ValueError naming the probability.
    Source: k3 of Schulman 2020, "Approximating KL divergence", on a subset of the tokens.

    >>> confident(torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1.5, -3.5]]))
    tensor([[0.1065, 0.0000]])
    """
    require(0 <= probability < 1, "probability", probability, "0 ≤ probability < 1")
    likely = ~(full_precision(logprobs.detach()).exp() <= probability)  # nan stays visible
    return fill_masked(k3(logprobs, logprobs_ref), likely, 0.0)


@vanishes("at_reference")
def full(full_kl: Tensor) -> Tensor:
    """Return the KL itself, exact over the vocabulary at each sampled token's state. It has no
    noise from the draw of the token.

    full_t = Σ_v π(v) (log π(v) - log ref(v))

    Value: KL(π‖ref) at the visited states. Gradient in the loss: ∇KL(π‖ref) at these states,
    without a ratio. Computing `full_kl` runs the reference's head at every step of the update. It
    needs memory for only one chunk of logits.

    Args:
      full_kl: [B, T] in nats, from `chunked_log_probs` with a reference; in the loss it carries the
        gradient.
    Returns: [B, T] in nats, `full_kl` itself; ≥ 0 up to rounding.
    Source: the definition of Kullback and Leibler 1951; as a penalty in the loss, Tang and Munos
      2025, arXiv:2506.09477.

    >>> full(torch.tensor([[0.25]]))
    tensor([[0.2500]])
    """
    return full_kl


def _log_ratio(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """Compute q = log ref - log π, clamped to ±20. No gradient flows into the reference."""
    shapes = tuple(logprobs_ref.shape), tuple(logprobs.shape)
    require(shapes[0] == shapes[1], "the other policy's shape", shapes[0], f"{shapes[1]}")
    difference = full_precision(logprobs_ref.detach()) - full_precision(logprobs)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _ratio(logprobs: Tensor, logprobs_old: Tensor) -> Tensor:
    """Compute r = π / old, with log r clamped to ±20. No gradient flows into the old policy."""
    return (-_log_ratio(logprobs, logprobs_old)).exp()
