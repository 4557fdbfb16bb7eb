"""Policy losses per token: [B, T], neither masked nor reduced. The weights of `aggregation` do
both.

Inputs must be finite everywhere: `token_ratio` and `fill_masked` first put neutral constants where
the mask is False.

A loss declares by `@clips` how its clip acts on a token. The metrics clip/* are computed from this
declaration, and a loss without it has none of them. A loss declares by `@vanishes` that a token
with advantage 0 has no gradient. Only with this declaration is an update skipped if all advantages
are 0.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rlkit.functional._arguments import require, require_positive, require_unsigned
from rlkit.functional.masking import fill_masked, full_precision, rollout_mean, segment_sum
from rlkit.functional.proximal import binary_kl
from rlkit.functional.ratios import LOG_RATIO_BOUND, log_ratio, token_ratio
from rlkit.types import clips, vanishes


def _mark_held_by_interval(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    delta: float | None,
) -> Tensor:
    """Mark the tokens without gradient: the ratio has left the interval in the direction of the
    advantage, or it has passed a cap at a negative advantage."""
    cap = min([c for c in (dual_clip, delta) if c is not None], default=float("inf"))
    high = ratio > 1 + clip_high
    low = (ratio < 1 - clip_low) | (ratio > cap)
    return ((advantages > 0) & high) | ((advantages < 0) & low)


def _capped_weight(ratio: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    return (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


def _mark_held_in_mean(
    logprobs: Tensor,
    logprobs_old: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    *,
    clip_log_low: float,
    clip_log_high: float,
) -> Tensor:
    difference = log_ratio(logprobs, logprobs_old, response_mask)
    return ((advantages > 0) & (difference > clip_log_high)) | (
        (advantages < 0) & (difference < -clip_log_low)
    )


def _mark_held_by_divergence(
    logprobs: Tensor,
    logprobs_sampler: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"],
    delta: float,
    two_sided: bool,
    penalty: float,
) -> Tensor:
    """Mark the tokens further than delta from the sampler. Unless the mask is two-sided, mark only
    tokens moved in the direction of the advantage."""
    now = full_precision(logprobs.detach())
    sampler = full_precision(logprobs_sampler)
    moved = now.exp() - sampler.exp()
    far = (moved.abs() if divergence == "tv" else binary_kl(sampler, now)) > delta
    return far & ((advantages != 0) if two_sided else (advantages * moved > 0))


@clips(held=_mark_held_by_interval)
@vanishes("without_advantages")
def clipped(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """Compute the clipped surrogate loss (PPO), per token.

    loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    dual_clip: min(loss_t, -dual_clip · A_t) where A_t < 0
    delta: min(r_t, delta) in place of the first r_t

    A token has no gradient once its ratio has left the interval in the direction of its advantage.
    For a negative advantage the loss is not bounded from above, because r_t may be arbitrarily
    large. Either dual_clip or delta bounds it. With equal values, the two give the same loss.

    Args:
      ratio: [B, T] π / π_old, > 0, carries the gradient.
      advantages: [B, T] a constant; no gradient flows into it.
      clip_low, clip_high: dimensionless half-widths, 0 < clip_low ≤ 1, clip_high > 0. DAPO: 0.2 and
        0.28.
      dual_clip: cap on the loss, > 1 + clip_high; None is no cap. verl's default loss has 3, TRL's
        has no such cap.
      delta: cap on the ratio, > 1 + clip_high; None is no cap. TRL calls it `delta` too.
    Returns: [B, T] loss in units of advantage.
    Raises: ValueError naming the argument, its value and the allowed range.
    Source: Schulman et al. 2017 eq. 7, arXiv:1707.06347; two widths Yu et al. 2025 (DAPO) eq. 10,
      arXiv:2503.14476; dual clip Ye et al. 2020, arXiv:1912.09729; delta INTELLECT-2, Prime
      Intellect 2025, arXiv:2505.07291.

    >>> clipped(torch.tensor([[1.5]]), torch.tensor([[1.0]]))
    tensor([[-1.2000]])
    """
    _require_widths(clip_low, clip_high)
    for name, cap in (("dual_clip", dual_clip), ("delta", delta)):
        require(
            cap is None or 1 + clip_high < cap < float("inf"),
            name,
            cap,
            "> 1 + clip_high and finite, or None",
        )
    advantages = advantages.detach()
    free = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(free * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return (
        loss
        if dual_clip is None
        else torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    )


@clips(capped=_capped_weight)
@vanishes("without_advantages")
def cispo(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Tensor:
    """Compute a score-function loss weighted by a clipped ratio, per token. The clip bounds the
    weight, and every token keeps a gradient.

    loss_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t log π_t

    Args:
      ratio: [B, T] π / π_old, > 0; only its value is used, not its gradient.
      advantages: [B, T] a constant; no gradient flows into it.
      logprobs: [B, T] in nats, carries the gradient.
      clip_low, clip_high: half-widths around 1, as in verl and SkyRL: 0 < clip_low ≤ 1, clip_high >
        0. The defaults keep the weight in [0, 5] (SkyRL); clip_low = 1 is no lower bound, as in the
        paper. verl uses 0.2 and 0.2. In TRL, epsilon_high is the cap itself: epsilon_high = 5 is
        clip_high = 4 here. TRL's default of 0.2 makes every weight small.
    Returns: [B, T]; only its gradient means anything.
    Raises: ValueError naming the argument, its value and the allowed range.
    Source: CISPO, MiniMax-M1, Chen et al. 2025, section 3.1, arXiv:2506.13585.

    >>> cispo(torch.tensor([[9.0]]), torch.tensor([[2.0]]), torch.tensor([[-0.5]]))
    tensor([[5.]])
    """
    _require_widths(clip_low, clip_high)
    return -ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages.detach() * logprobs


@clips()
@vanishes("without_advantages")
def sapo(
    ratio: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Compute a surrogate loss with a soft gate, per token. The gradient fades gradually as the
    ratio moves away from 1.

    loss_t = -(4/τ) σ(τ (r_t - 1)) A_t, τ = tau_positive where A_t > 0, tau_negative elsewhere

    The gradient with respect to r_t is -4 p (1 - p) A_t, p = σ(τ (r_t - 1)). At r_t = 1 it equals
    the gradient of REINFORCE.

    Args:
      ratio: [B, T] π / π_old, > 0, carries the gradient.
      advantages: [B, T] a constant; no gradient flows into it.
      tau_positive, tau_negative: > 0, dimensionless; the larger, the faster the gradient fades.
    Returns: [B, T] loss in units of advantage; at r_t = 1 it is -2 A_t / τ.
    Raises: ValueError naming the argument, its value and the allowed range.
    Source: SAPO, Gao et al. 2025, section 3, arXiv:2511.20347.

    >>> sapo(torch.tensor([[1.0]]), torch.tensor([[1.0]]))
    tensor([[-2.]])
    """
    require_positive(tau_positive=tau_positive, tau_negative=tau_negative)
    advantages = advantages.detach()
    tau = torch.where(
        advantages > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative)
    )
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages


@clips(held=_mark_held_in_mean)
@vanishes("without_advantages")
def gmpo(
    logprobs: Tensor,
    logprobs_old: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    advantages: Tensor,
    *,
    clip_log_low: float = 0.4,
    clip_log_high: float = 0.4,
) -> Tensor:
    """Compute a surrogate loss of the geometric mean of a rollout's clipped ratios. The ratio of a
    single token changes the mean only little.

    loss_t = -s_j A_t, s_j = exp(clamp(mean over the trained tokens of rollout j of Δ'_t, -20, 20))
    Δ_t = log π_t - log π_old_t
    Δ'_t = min(Δ_t, clip_log_high) where A_t > 0, max(Δ_t, -clip_log_low) elsewhere

    All tokens of a rollout have the same s_j, so `sequence_mean` gives the mean over rollouts of
    -s_j A_j.

    Args:
      logprobs: [B, T] in nats, carries the gradient. Any value where the mask is False.
      logprobs_old: [B, T] in nats, a constant.
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be passed, as `micro_batches` does.
      advantages: [B, T] a constant; no gradient flows into it.
      clip_log_low, clip_log_high: widths in nats, > 0; the paper's interval is (e^-0.4, e^0.4). In
        verl they are clip_ratio_low and clip_ratio_high, also in nats, with a default of 0.2.
    Returns: [B, T] loss in units of advantage.
    Raises: ValueError naming the argument, its value and the allowed range.
    Source: GMPO, Zhao et al. 2025, section 3, arXiv:2507.20673. The bound of ±20 on the mean is
      ours.

    >>> old, new, mask = (
    ...     torch.zeros(1, 2),
    ...     torch.tensor([[0.2, 9.0]]),
    ...     torch.ones(1, 2, dtype=torch.bool),
    ... )
    >>> gmpo(new, old, mask, torch.tensor([0]), torch.ones(1, 2))  # (0.2 + 0.4) / 2 = 0.3
    tensor([[-1.3499, -1.3499]])
    """
    require_positive(clip_log_low=clip_log_low, clip_log_high=clip_log_high)
    advantages = advantages.detach()
    difference = log_ratio(logprobs, logprobs_old, response_mask)
    clip = torch.where(
        advantages > 0, difference.clamp(max=clip_log_high), difference.clamp(min=-clip_log_low)
    )
    return (
        -rollout_mean(clip, response_mask, rollout_ids)
        .clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        .exp()
        * advantages
    )


@clips()
@vanishes("without_advantages", coef=0)
def kl_cov(
    ratio: Tensor,
    advantages: Tensor,
    logprobs: Tensor,
    logprobs_old: Tensor,
    covariance_rank: Tensor,
    *,
    share: float = 2e-4,
    coef: float = 1.0,
) -> Tensor:
    """Compute a surrogate loss without a clip, plus a penalty on a few tokens. The penalty holds
    the tokens of the highest covariance near the old policy.

    loss_t = -r_t A_t + coef |log π_t - log π_old_t| where covariance_rank_t < share, -r_t A_t
    elsewhere

    Args:
      ratio: [B, T] π / π_old, > 0, carries the gradient.
      logprobs: [B, T] in nats, carries the gradient.
      advantages, logprobs_old: [B, T], without gradient.
      covariance_rank: [B, T], from the function of the same name.
      share: share of the step's N trained tokens with a penalty, in [0, 1]. These are ⌈share · N⌉
        tokens, plus any tokens tied with the last of them. verl uses 2e-4. The authors' scripts use
        2e-3 for a model of 7B and 2e-4 for 32B.
      coef: weight of the penalty, ≥ 0, in units of advantage per nat. The authors' scripts use 1,
        verl's config has 0.1.
    Returns: [B, T] loss in units of advantage; the penalty has no gradient at r_t = 1.
    Raises: ValueError naming `share` or `coef`.
    Source: KL-Cov, Cui et al. 2025, arXiv:2505.22617. The authors' code takes exactly max(1, ⌊share
      · N⌋) tokens of each micro-batch, ignoring ties, and ranks them by its current log-probs. The
      paper writes the penalty as KL(π_old‖π) (eq. 14); the authors' code takes the absolute
      log-ratio, as here.

    >>> ratio, old, rank = torch.tensor([[2.0, 2.0]]), torch.zeros(1, 2), torch.tensor([[0.0, 0.5]])
    >>> kl_cov(ratio, torch.ones(1, 2), ratio.log(), old, rank, share=0.5)
    tensor([[-1.3069, -2.0000]])
    """
    require(0 <= share <= 1, "share", share, "0 ≤ share ≤ 1")
    require_unsigned(coef=coef)
    penalty = fill_masked((logprobs - logprobs_old.detach()).abs(), covariance_rank < share, 0.0)
    return -ratio * advantages.detach() + coef * penalty


@vanishes("without_advantages")
def vespo(
    logprobs: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    advantages: Tensor,
    *,
    k_positive: float = 2.0,
    lam_positive: float = 3.0,
    k_negative: float = 3.0,
    lam_negative: float = 2.0,
) -> Tensor:
    """Compute a score-function loss with a soft weight for the whole rollout. The weight fades as
    policy and sampler move apart.

    loss_t = -sg[φ(w_j)] A_t log π_t
    φ(w) = w^k e^(λ (1 - w))
    w_j = exp(Σ over rollout j of (log π_t - log μ_t)), clamped to [1e-8, e^20]

    φ(1) = 1, and φ is largest at k/λ. w is the ratio to the sampler μ, so it is already an
    off-policy correction: algorithm/correction=auto then means none.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool.
      rollout_ids: [B]; all rows of a rollout must be passed.
      advantages: [B, T], without gradient.
      k_positive, lam_positive: k and λ of tokens with A_t ≥ 0, each > 0.
      k_negative, lam_negative: k and λ of tokens with A_t < 0, each > 0.
    Returns: [B, T]; only its gradient means anything.
    Raises: ValueError naming the argument, its value and the allowed range.
    Source: VESPO, Shen et al. 2026, arXiv:2602.10693; the defaults and bounds of w are those of the
      authors' code and of TRL. The authors' code takes the sign of a rollout's first advantage for
      all its tokens. Both of them also clamp each token's log-ratio to ±20 before the sum. Both
      take the ratio to the sampler only if their truncated correction is on, and then with its
      truncated weights. Here w always takes the whole ratio.

    >>> mask, rollout = torch.ones(1, 1).bool(), torch.tensor([0])
    >>> vespo(
    ...     torch.tensor([[0.5]]).log(),
    ...     torch.tensor([[0.25]]).log(),
    ...     mask,
    ...     rollout,
    ...     torch.ones(1, 1),
    ... )  # 4 e^-3 log 2
    tensor([[0.1380]])
    """
    numbers = {
        "k_positive": k_positive,
        "lam_positive": lam_positive,
        "k_negative": k_negative,
        "lam_negative": lam_negative,
    }
    require_positive(**numbers)
    total = segment_sum(log_ratio(logprobs.detach(), logprobs_sampler, response_mask), rollout_ids)
    log_w = total.clamp(math.log(1e-8), LOG_RATIO_BOUND)[rollout_ids].unsqueeze(-1)
    sign = (advantages < 0).long()
    advantages = advantages.detach()
    k, lam = (
        log_w.new_tensor([numbers[f"{name}_positive"], numbers[f"{name}_negative"]])[sign]
        for name in ("k", "lam")
    )
    return -(k * log_w + lam * (1 - log_w.exp())).exp() * advantages * logprobs


@clips(held=_mark_held_by_divergence)
@vanishes("without_advantages", penalty=0)
def dppo(
    logprobs: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    delta: float = 0.2,
    two_sided: bool = False,
    penalty: float = 1e-3,
) -> Tensor:
    """Compute a surrogate loss with a trust region on the divergence from the sampler instead of on
    the ratio. Rare tokens can move freely.

    loss_t = -r_t A_t keep_t + penalty · (log r_t)², r_t = π_t / μ_t
    keep_t = 0 if D_t > delta and the update would increase the distance (A_t > 0 and π_t > μ_t, or
    A_t < 0 and π_t < μ_t), else 1
    tv: D_t = |π_t - μ_t|; kl: D_t = k(μ_t, π_t) of `binary_kl`. two_sided: keep_t = 0 if D_t >
    delta, in either direction

    The ratio is to the sampler μ, so it is already an off-policy correction:
    algorithm/correction=auto then means none.

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool.
      advantages: [B, T] a constant; no gradient flows into it.
      divergence: tv or kl.
      delta: largest divergence of a kept token, > 0. For tv it is a difference of probabilities
        (prime-rl 0.2, verl's script 0.15), for kl it is in nats (verl's script 0.05).
      two_sided: if True, use the mask of prime-rl's IPO (there with delta 0.1), which also stops
        tokens on their way back.
      penalty: weight of the penalty on every token, ≥ 0, in units of advantage per nat². prime-rl
        uses 1e-3, verl 0.
    Returns: [B, T] loss in units of advantage. At a dropped token only the penalty has a gradient.
    Raises: ValueError naming the argument, its value and the allowed range.
    Source: DPPO, Qi et al. 2026, arXiv:2602.04879; the penalty and the two-sided mask are
      prime-rl's. The authors' code and verl take -A_t sg(min(r_t, c)) log π_t; c is 3 in both
      configs and 10,000 in verl's script. In verl r_t is the ratio to the old policy unless its
      bypass mode is on.

    >>> new, sampler, both = (
    ...     torch.tensor([[0.8, 0.004]]).log(),
    ...     torch.tensor([[0.5, 0.001]]).log(),
    ...     torch.ones(1, 2).bool(),
    ... )
    >>> dppo(
    ...     new, sampler, both, torch.ones(1, 2), penalty=0.0
    ... )  # further by 0.3, and by 0.003 with a ratio of 4
    tensor([[ 0., -4.]])
    """
    require(divergence in ("tv", "kl"), "divergence", divergence, "tv or kl")
    require_positive(delta=delta)
    require_unsigned(penalty=penalty)
    advantages = advantages.detach()
    ratio = token_ratio(logprobs, logprobs_sampler, response_mask)
    rule = partial(
        _mark_held_by_divergence,
        divergence=divergence,
        delta=delta,
        two_sided=two_sided,
        penalty=penalty,
    )
    held = rule(logprobs, logprobs_sampler, advantages)
    return -fill_masked(ratio, ~held, 0.0) * advantages + penalty * ratio.log().square()


@clips()
@vanishes("without_advantages")
def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Compute the score-function loss, per token, for data sampled by the very policy being
    trained.

    loss_t = -A_t log π_t

    Args:
      logprobs: [B, T] in nats, carries the gradient.
      advantages: [B, T] a constant; no gradient flows into it.
    Returns: [B, T]; only its gradient means anything.
    Source: Williams 1992, "Simple statistical gradient-following algorithms", section 4.

    >>> reinforce(torch.tensor([[-0.5]]), torch.tensor([[2.0]]))
    tensor([[1.]])
    """
    return -advantages.detach() * logprobs


def _require_widths(clip_low: float, clip_high: float) -> None:
    require(0 < clip_low <= 1, "clip_low", clip_low, "0 < clip_low ≤ 1")
    require_positive(clip_high=clip_high)
