"""Estimates of KL(π‖ref) per token, from log-probs of the tokens that π sampled; `full` from the
whole vocabulary.

Every estimator f is an expectation over tokens drawn from π. The draw depends on π too, and a
gradient through the estimate alone leaves this out. So value and gradient are separate questions,
and the placement decides the gradient. The table gives the on-policy gradient that is descended,
per unit of the coefficient, with q = log ref - log π:

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

The reward's gradient of k2 is ∇ ½ E[q²] - ∇KL(π‖ref), that of reverse is E_ref[q ∇log π]. forward
and reverse already carry the importance weight, so they refuse a second. In the reward the ratio of
forward is 1, which makes it k1. full in the reward gives ∇KL(π‖ref) of the tokens that come after,
so 0 for one token.

The table is for one state. Over a rollout, the gradient of the loss is its expectation over the
visited states, as if π did not decide which states are visited. The reward adds the gradient of V
of the later tokens through the states in which they are drawn. So `reward` with k1 gives ∇KL(π‖ref)
of whole rollouts. For an estimator without a ratio, loss and reward together give ∇V. The exception
is k3+ (`k3_straight_through`), since its gradient is not that of its value.
`reward_sequence` is `reward` with f / |y| in place of f: the mean over a rollout instead of the
sum. `in_baseline` has the same expected gradient if the baseline does not depend on the rollout's
own reward (`raw`, `leave_one_out`).

So k1 (or forward) is the right choice for the reward. Near the reference, k2, k3 and truncated in
the reward only have a gradient of second order in q, so they do not pull towards the reference.
reverse in the reward pushes away from it. full in the reward is the part of the gradient that full
in the loss leaves out.

The ratio is that of the token, π_t / old_t from `logprobs_old`, even if the policy loss uses a
ratio per sequence. So `forward`, `reverse` and every estimator with importance_weight have the
right value and gradient on samples of the old policy, state by state. `full` has them without a
ratio. Log-ratios of tokens are clamped to ±20. Beyond the clamp the gradient of the estimate is 0;
within it nothing is biased. No gradient flows into the reference or the old policy.

Where policy and reference are the same model, k2, k3, k3+, truncated, confident and full are
exactly 0, and so is their gradient. They declare this by `@vanishes`, and an update without any
other term is then skipped. The gradients of k1, forward and reverse are 0 only in expectation.

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
    """The log-ratio itself: unbiased, of either sign.

    k1_t = log π_t - log ref_t

    Value: E[k1] = KL(π‖ref). Gradient in the loss: 0 in expectation, noise otherwise; times the
    ratio it is ∇KL(π‖ref).

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, on the same
        tokens; a constant.
    Returns: [B, T] in nats, within ±20.
    Source: Schulman 2020, "Approximating KL divergence"; the penalty in the reward of Ouyang et al.
      2022, arXiv:2203.02155.

    >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.5000]])
    """
    return -_log_ratio(logprobs, logprobs_ref)


@vanishes("at_reference")
def k2(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """Half the squared log-ratio: never negative, biased, close to KL for policies that are close.

    k2_t = ½ (log ref_t - log π_t)²

    Value: E[k2] → KL(π‖ref) as the policies meet. Gradient in the loss: ∇KL(π‖ref), exactly,
    without a ratio.

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, on the same
        tokens; a constant.
    Returns: [B, T] in nats, 0 … 200.
    Source: Schulman 2020, "Approximating KL divergence".

    >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1250]])
    """
    return _log_ratio(logprobs, logprobs_ref).square() / 2


@vanishes("at_reference")
def k3(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """The log-ratio with a control variate: unbiased and never negative.

    k3_t = e^q - q - 1, q = log ref_t - log π_t

    Value: E[k3] = KL(π‖ref), with finite variance only if ref / π is bounded. Gradient in the loss:
    ∇KL(ref‖π), the other direction; times the ratio it is ∇KL(π‖ref). GRPO as published uses it
    without the ratio.

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, on the same
        tokens; a constant.
    Returns: [B, T] in nats, 0 … e^20 (verl and OpenRLHF also clamp the result to ±10; TRL clamps
      nothing).
    Source: Schulman 2020, "Approximating KL divergence"; GRPO, Shao et al. 2024 eq. 4,
      arXiv:2402.03300.

    >>> k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1065]])
    """
    q = _log_ratio(logprobs, logprobs_ref)
    return torch.expm1(q) - q  # expm1: e^q - 1 loses all its digits if q is small


@vanishes("at_reference")
def k3_straight_through(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """k2_t - sg(k2_t) + sg(k3_t): the value of k3 with the gradient of k2.

    Value: E[k3] = KL(π‖ref). Gradient in the loss: ∇KL(π‖ref), exactly, without a ratio.

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, a constant.
    Returns: [B, T] in nats, 0 … e^20; without a gradient where the log-ratio is beyond ±20.
    Source: `k3+` in verl; the gradient of k2, Tang and Munos 2025, arXiv:2506.09477.

    >>> k3_straight_through(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1065]])
    """
    square = k2(logprobs, logprobs_ref)
    return square - square.detach() + k3(logprobs.detach(), logprobs_ref)


def forward(logprobs: Tensor, logprobs_ref: Tensor, logprobs_old: Tensor) -> Tensor:
    """k1 for the loss: the log-ratio times the ratio, with the gradient of the divergence.

    forward_t = r_t (log π_t - log ref_t), r_t = π_t / old_t

    Value: E_old[forward] = KL(π‖ref). Gradient in the loss: ∇KL(π‖ref), through r_t; the part
    through the log-ratio has expectation 0. Beyond the clamp of the log-ratio the gradient still
    points towards the reference, with the log-ratio taken as ±20.

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, on the same
        tokens; a constant.
      logprobs_old: [B, T] in nats, of the policy that the samples are taken to come from; a
        constant.
    Returns: [B, T] in nats, of either sign.
    Source: Schulman 2020, "Approximating KL divergence"; the ratio as in Tang and Munos 2025,
      arXiv:2506.09477.

    >>> forward(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[-1.0]]))
    tensor([[0.5000]])
    """
    return _ratio(logprobs, logprobs_old) * k1(logprobs, logprobs_ref)


def reverse(logprobs: Tensor, logprobs_ref: Tensor, logprobs_old: Tensor) -> Tensor:
    """KL(ref‖π), the divergence of the reference from the policy, from the policy's samples by
    importance weights.

    reverse_t = r_t e^q q, q = log ref_t - log π_t, r_t = π_t / old_t; its gradient is -r_t e^q ∇log
    π_t

    Value: E_old[reverse] = E_ref[q] = KL(ref‖π). Gradient in the loss: ∇KL(ref‖π) = -E_ref[∇log π].
    Within the clamp, the expression as written has the same gradient, because two terms in e^q q
    cancel. Beyond the clamp only one of the two terms would remain, with the wrong sign. So here
    the value is a constant, and the gradient is added separately; it is 0 beyond the clamp. The
    variance is that of ref / π, so use this estimator only if the two are close.

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, on the same
        tokens; a constant.
      logprobs_old: [B, T] in nats, of the policy that the samples are taken to come from; a
        constant.
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
    """k3 of a log-ratio that is clamped on both sides: no single token dominates, and the value is
    never negative.

    truncated_t = e^q - q - 1, q = clamp(log ref_t - log π_t, -threshold, threshold)

    Value: E[truncated] = KL(π‖ref) if no log-ratio passes the threshold, biased otherwise. Gradient
    in the loss: Σ (π - ref) ∇log π over the tokens within the threshold, so ∇KL(ref‖π) if all are.
    Tokens beyond it add 0.

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, on the same
        tokens; a constant.
      threshold: in nats, 0 < threshold ≤ 20.
    Returns: [B, T] in nats, 0 … e^threshold - threshold - 1.
    Raises: ValueError naming the threshold.
    Source: k3 of Schulman 2020, "Approximating KL divergence". A clamp of one side alone can turn
      an estimate negative.

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
    """k3 on tokens that are likely under the policy, 0 on the others, so that exploration is not
    penalised.

    confident_t = e^q - q - 1 if π_t > probability, else 0; q = log ref_t - log π_t

    Value: the part of E[k3] that comes from such tokens; 0 if there is none. Gradient in the loss:
    Σ (π - ref) ∇log π over such tokens. The choice of tokens has no gradient.

    Args:
      logprobs: [B, T] in nats, carries the gradient. logprobs_ref: [B, T] in nats, on the same
        tokens; a constant.
      probability: 0 ≤ probability < 1; 0 is k3.
    Returns: [B, T] in nats, 0 … e^20.
    Raises: ValueError naming the probability.
    Source: k3 of Schulman 2020, "Approximating KL divergence", on a subset of the tokens.

    >>> confident(torch.tensor([[-1.0, -3.0]]), torch.tensor([[-1.5, -3.5]]))
    tensor([[0.1065, 0.0000]])
    """
    require(0 <= probability < 1, "probability", probability, "0 ≤ probability < 1")
    likely = ~(full_precision(logprobs.detach()).exp() <= probability)  # so that nan stays visible
    return fill_masked(k3(logprobs, logprobs_ref), likely, 0.0)


@vanishes("at_reference")
def full(full_kl: Tensor) -> Tensor:
    """The divergence itself, exact over the vocabulary at each sampled token's state, without noise
    from the draw of the token.

    full_t = Σ_v π(v) (log π(v) - log ref(v))

    Value: KL(π‖ref) at the visited states. Gradient in the loss: ∇KL(π‖ref) at these states,
    without a ratio. It runs the reference's head at every step of the update and needs no more
    memory than a chunk of logits.

    Args:
      full_kl: [B, T] in nats, of `chunked_log_probs` with a reference; in the loss it carries the
        gradient.
    Returns: [B, T] in nats, the same; ≥ 0 up to rounding.
    Source: the definition of Kullback and Leibler 1951; as a penalty in the loss, Tang and Munos
      2025, arXiv:2506.09477.

    >>> full(torch.tensor([[0.25]]))
    tensor([[0.2500]])
    """
    return full_kl


def _log_ratio(logprobs: Tensor, logprobs_ref: Tensor) -> Tensor:
    """q = log ref - log π, clamped to ±20; the reference is a constant."""
    shapes = tuple(logprobs_ref.shape), tuple(logprobs.shape)
    require(shapes[0] == shapes[1], "the other policy's shape", shapes[0], f"{shapes[1]}")
    difference = full_precision(logprobs_ref.detach()) - full_precision(logprobs)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _ratio(logprobs: Tensor, logprobs_old: Tensor) -> Tensor:
    """r = π / old, its log clamped to ±20; the old policy is a constant."""
    return (-_log_ratio(logprobs, logprobs_old)).exp()
