"""Off-policy corrections between the sampling engine and the trainer. Each returns a factor on each
token's policy loss [B, T].

Two implementations of one policy give slightly different log-probs, and if groups are sampled ahead
(asynchrony=lag), the sampling weights are older. So the samples come from a policy slightly
different from the old policy. The factor is computed once over the whole update batch, without
gradient; it is 1 where the mask is False. With algorithm.old=loglinear it is computed in each
micro-batch instead.

    weights                ρ
    token_correction       π_old / μ of each token
    sequence_correction    their product over all tokens of the rollout, the same for each of them

    how ρ is bounded       the factor
    truncate               min(ρ, cap)
    mask                   ρ if floor ≤ ρ ≤ cap, else 0
    keep                   1 if floor ≤ ρ ≤ cap, else 0

    masks                  1, but 0 if                                        on
    geometric_mask         the mean log ρ is outside a band                   the rollout
    divergence_mask        the mean or the largest k3 (or k2) is too large    the rollout
    binary_kl_mask         the binary KL of the token's probability is large  the token
    second_moment_mask     log² ρ is among the largest, and A raises it       the token

`product_correction` multiplies one weight and any number of masks. With floor > 0, truncate also
bounds ρ from below. A masked token still counts in the aggregation's denominator, as in IcePop.
verl's rejection sampling does not count it.

A token's own factor does not correct the bias from the tokens before it. The factor of the sequence
has no bias below the cap, but its variance grows with the length. Other libraries differ. TRL's
default is the factor of the sequence, masked above 3. verl truncates at 2, only from above, and can
divide by the mean of the batch, as `normalise` does here. OpenRLHF's sequence mask keeps or drops a
sequence and does not bound the weights of the kept sequences. With `automatic_correction` the run
chooses between no correction and the truncated token factor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.kl import k2, k3
from rlkit.functional.masking import fill_masked, full_precision, rollout_mean, segment_sum
from rlkit.functional.proximal import binary_kl
from rlkit.functional.ratios import LOG_RATIO_BOUND, log_ratio, token_ratio
from rlkit.types import safe


def no_correction(response_mask: Tensor) -> Tensor:
    """Return 1 everywhere: no correction. The sampler is treated as the old policy.

    w_t = 1

    Args:
      response_mask: [B, T] bool.
    Returns: [B, T] float32, all 1.
    Source: PPO as published, Schulman et al. 2017, arXiv:1707.06347, where the old policy is the
      sampler.

    >>> no_correction(torch.tensor([[True, False]]))
    tensor([[1., 1.]])
    """
    return torch.ones(response_mask.shape, device=response_mask.device)


def automatic_correction(
    logprobs_old: Tensor, logprobs_sampler: Tensor, response_mask: Tensor
) -> Tensor:
    """Return `token_correction` truncated at 2. `algorithm/correction=auto` is this function until
    the run has chosen a correction.

    The check before the first step compares the engine's log-probs with the trainer's. If they
    agree in float32 and no sample is stale, or if the ratio of the loss is to the sampler, the run
    uses `no_correction` instead (`rlkit.training.experiment.settle_correction`). A run without this
    check keeps this function.

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer before the update. Any value, also nan
        or inf, where the mask is False.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine.
      response_mask: [B, T] bool.
    Returns: [B, T] in 0 … 2, float32 or float64, without gradient; 1 if both log-probs agree, and
      where the mask is False.
    Source: as `token_correction`; a bound of 2 is verl's default, and its correction is off by
      default.

    >>> old, sampler = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.5, 0.3]]).log()
    >>> automatic_correction(old, sampler, torch.tensor([[True, True]]))
    tensor([[1., 2.]])
    """
    return token_correction(logprobs_old, logprobs_sampler, response_mask)


def token_correction(
    logprobs_old: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    mode: Literal["truncate", "mask", "keep"] = "truncate",
    normalise: bool = False,
) -> Tensor:
    """Compute each token's own importance weight, within bounds.

    ρ_t = exp(clamp(log π_old_t - log μ_t, -20, 20))
    mode=truncate: w_t = min(max(ρ_t, floor), cap)
    mode=mask: w_t = ρ_t if floor ≤ ρ_t ≤ cap, else 0 (with floor > 0 this is IcePop; with 0 it is
      IcePop without its lower bound)
    mode=keep: w_t = 1 if floor ≤ ρ_t ≤ cap, else 0
    normalise: w_t / mean of w over the trained tokens of the batch

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer before the update. Any value, also nan
        or inf, where the mask is False.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool.
      cap: upper bound, > 0; inf is no bound.
      floor: lower bound, 0 … cap; 0 is no bound.
      mode: what happens to a weight outside the bounds. truncate sets it to the nearest bound. mask
        sets it to 0, so its token leaves the policy loss. keep does the same, and gives all other
        tokens the weight 1.
      normalise: divide by the mean weight afterwards, unless the mean is 0. In verl this is
        rollout_is_batch_normalize, off by default; slime has it on.
    Returns: [B, T] in 0 … cap (unless normalised), float32 or float64, without gradient. It is 1
      where the mask is False, and, if 1 is within the bounds, where both log-probs agree.
    Raises: ValueError naming the cap, the floor or the mode.
    Source: truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly
      Brings You Off-Policy RL Training", fengyao.notion.site/off-policy-rl; the bound itself:
      Ionides 2008, "Truncated importance sampling". IcePop: Ling Team 2025, arXiv:2510.18855,
      section 2.3.2, eq. 1 and 2; the paper, AReaL and verl take 0.5 … 5.

    >>> old, sampler = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.25, 0.3]]).log()
    >>> token_correction(old, sampler, torch.tensor([[True, True]]))
    tensor([[2., 2.]])
    >>> token_correction(old, sampler, torch.tensor([[True, True]]), cap=2.5, mode="mask")
    tensor([[2., 0.]])
    >>> token_correction(
    ...     sampler, old, torch.tensor([[True, True]]), cap=5.0, floor=0.4, mode="mask"
    ... )  # of 0.5 and 0.33
    tensor([[0.5000, 0.0000]])
    """
    weights = _bound_ratio(
        token_ratio(logprobs_old.detach(), logprobs_sampler, response_mask),
        response_mask,
        cap,
        floor,
        mode,
    )
    return (
        _divide_by_mean(weights, response_mask, response_mask.to(weights.dtype))
        if normalise
        else weights
    )


def sequence_correction(
    logprobs_old: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    mode: Literal["truncate", "mask", "keep"] = "truncate",
    normalise: bool = False,
) -> Tensor:
    """Compute the importance weight of the whole rollout, within bounds, and repeat it at each of
    its tokens.

    ρ_j = exp(clamp(Σ over the trained tokens of rollout j of (log π_old_t - log μ_t), -20, 20)); w
    as in `token_correction`

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer before the update. Any value, also nan
        or inf, where the mask is False.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be passed.
      cap: upper bound, > 0; inf is no bound.
      floor: lower bound, 0 … cap; 0 is no bound.
      mode: what happens to a weight outside the bounds. truncate sets it to the nearest bound. mask
        sets it to 0, so its rollout leaves the policy loss. keep does the same, and gives all other
        rollouts the weight 1.
      normalise: divide by the mean weight of the rollouts with a trained token.
    Returns: [B, T] in 0 … cap (unless normalised), float32 or float64, without gradient, equal at
      all trained tokens of a rollout; 1 where the mask is False.
    Raises: ValueError naming the cap, the floor or the mode.
    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
      Training-Inference Mismatch"; TRL's default is mode=mask with a cap of 3; verl's sequence mask
      (MIS) has a floor of 0.5 beside a cap of 2.

    >>> old, sampler = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.25, 0.6]]).log()
    >>> sequence_correction(old, sampler, torch.tensor([[True, True]]), torch.tensor([0]), cap=4.0)
    tensor([[3.0000, 3.0000]])
    """
    total = segment_sum(
        log_ratio(logprobs_old.detach(), logprobs_sampler, response_mask), rollout_ids
    )
    ratio = total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[rollout_ids].unsqueeze(-1)
    weights = _bound_ratio(ratio.expand(response_mask.shape), response_mask, cap, floor, mode)
    counts = segment_sum(response_mask, rollout_ids).clamp_min(1)[rollout_ids].unsqueeze(-1)
    return (
        _divide_by_mean(weights, response_mask, response_mask.to(weights.dtype) / counts)
        if normalise
        else weights
    )


def geometric_mask(
    logprobs_old: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    *,
    low: float = 0.05,
    high: float = 0.05,
    scaled: bool = True,
) -> Tensor:
    """Mask the rollouts whose mean log-ratio per token is further from 0 than chance explains.

    m_j = mean over the l_j trained tokens of rollout j of (log π_old_t - log μ_t)
    w_j = 1 if -low / √l_j ≤ m_j ≤ high / √l_j, else 0

    With scaled=false, the bounds of m_j are -low and high, without √l_j.

    The mean of l independent log-ratios of standard deviation σ has the standard deviation σ / √l.
    So low and high can be read as multiples of σ, and the share of rollouts masked by chance alone
    does not depend on their length. A fixed band fits one length only: with σ = 0.02, a band of
    ±0.001 keeps 18 % of the rollouts of 20 tokens, and 89 % of the rollouts of 1,000 tokens.

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be passed.
      low, high: half-widths of the band, ≥ 0, in nats: of one token's log-ratio if scaled, of the
        mean log-ratio if not.
      scaled: if True, the band narrows with the length.
    Returns: [B, T] of 0 and 1, equal at all trained tokens of a rollout; 1 where the mask is False,
      and for a rollout whose log-probs agree.
    Raises: ValueError naming low or high.
    Source: the geometric mask of Liu et al. 2025, "When Speed Kills Stability"; the mean of k1 in
      verl's rejection sampling. verl's k1 has the opposite sign, so its upper bound is `low` here
      and its lower bound is `high`. Fixed bands: verl 0.999 … 1.001, NeMo 0.999 … 1.002,
      slime 0.9999 … 1.0001, SkyRL 0.99 … 1.01. NeMo also weighs the tokens of kept rollouts by
      their unbounded ratios. The scaling is the standard deviation of a mean;
      0.05 is verl's band at 2,500 tokens and SkyRL's at 25.

    >>> old, everywhere, one = (
    ...     torch.tensor([[-1.0, -1.0]]),
    ...     torch.ones(1, 2).bool(),
    ...     torch.tensor([0]),
    ... )
    >>> (
    ...     geometric_mask(old, old - 0.03, everywhere, one),
    ...     geometric_mask(old, old - 0.04, everywhere, one),
    ... )
    (tensor([[1., 1.]]), tensor([[0., 0.]]))
    """
    for name, width in (("low", low), ("high", high)):
        require(width >= 0, name, width, "≥ 0")
    mean = rollout_mean(
        log_ratio(logprobs_old.detach(), logprobs_sampler, response_mask),
        response_mask,
        rollout_ids,
    )
    if scaled:
        mean = mean * segment_sum(response_mask, rollout_ids)[rollout_ids].to(
            mean.dtype
        ).sqrt().unsqueeze(-1)
    return _mark_kept((mean >= -low) & (mean <= high), mean, response_mask)


def divergence_mask(
    logprobs_old: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    *,
    estimator: Literal["k2", "k3"] = "k3",
    over: Literal["mean", "max"] = "mean",
    bound: float = 0.01,
) -> Tensor:
    """Mask the rollouts whose tokens are far from the sampler, on average or at their worst token.
    Log-ratios of opposite sign do not cancel.

    w_j = 1 if the mean (max) of k_t over the trained tokens of rollout j ≤ bound, else 0
    k3: k_t = ρ_t - 1 - log ρ_t, k2: k_t = ½ log² ρ_t, log ρ_t = clamp(log π_old_t - log μ_t, -20,
    20)

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be passed.
      estimator: k2 or k3, as an estimate of KL(μ‖π_old).
      over: with mean, the mean over the tokens is bounded. With max, the worst token alone decides,
        as a veto.
      bound: ≥ 0, in nats. For the mean of k3 verl recommends 0.001 … 0.01. For the max of k2, 42.4
        is slime's 1e-4 in both directions; verl's example takes 2.5, a ratio of 9.4.
    Returns: [B, T] of 0 and 1, equal at all trained tokens of a rollout; 1 where the mask is False,
      and for a rollout whose log-probs agree.
    Raises: ValueError naming the estimator, over or bound.
    Source: rejection sampling by seq_mean_k3 and seq_max_k2, verl's page on rollout correction; the
      veto below 1e-4: slime's mis.py.

    >>> sampler, everywhere = torch.tensor([[0.5, 0.5]]).log(), torch.ones(1, 2).bool()
    >>> divergence_mask(
    ...     torch.tensor([[0.4, 0.6]]).log(), sampler, everywhere, torch.tensor([0])
    ... )  # 0.0231 and 0.0177
    tensor([[0., 0.]])
    """
    require(estimator in ("k2", "k3"), "estimator", estimator, "k2 or k3")
    require(over in ("mean", "max"), "over", over, "mean or max")
    require(bound >= 0, "bound", bound, "≥ 0")
    per_token = (k2 if estimator == "k2" else k3)(logprobs_sampler.detach(), logprobs_old.detach())
    per_token = fill_masked(per_token, response_mask, 0.0)
    found = (
        rollout_mean(per_token, response_mask, rollout_ids)
        if over == "mean"
        else _rollout_max(per_token, rollout_ids)
    )
    return _mark_kept(found <= bound, found, response_mask)


def binary_kl_mask(
    logprobs_old: Tensor, logprobs_sampler: Tensor, response_mask: Tensor, *, bound: float = 2.0
) -> Tensor:
    """Mask the tokens whose probabilities in trainer and sampler are far apart. A rare token may
    differ by a larger ratio than a likely token.

    w_t = 1 if max(k(π_old_t, μ_t), k(μ_t, π_old_t)) ≤ bound, else 0; k is `binary_kl`

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ). Both log-probs are
        clamped to [-100, 0], and 1 - probability to at least 1e-12.
      response_mask: [B, T] bool.
      bound: largest binary KL of a kept token, ≥ 0, in nats.
    Returns: [B, T] of 0 and 1, float32 or float64, without gradient; 1 where the mask is False, and
      where both log-probs agree.
    Raises: ValueError naming the bound.
    Source: KPop, Guo et al. 2026, ringtech.notion.site/kpop, as the mask in AReaL, with a bound of
      2. AReaL also weighs the kept tokens by ρ_t, without a bound, and clamps both probabilities to
      1e-8 … 1 - 1e-8.

    >>> sampler = torch.tensor([[0.9, 1e-6]]).log()
    >>> binary_kl_mask(
    ...     torch.tensor([[0.02, 1e-3]]).log(), sampler, torch.ones(1, 2).bool()
    ... )  # 3.2 and 0.006, ratios 0.02 and 1000
    tensor([[0., 1.]])
    """
    require(bound >= 0, "bound", bound, "≥ 0")
    old, sampler = (
        fill_masked(full_precision(x.detach()), response_mask, 0.0)
        for x in (logprobs_old, logprobs_sampler)
    )
    found = torch.maximum(binary_kl(old, sampler), binary_kl(sampler, old))
    return _mark_kept(found <= bound, found, response_mask)


def second_moment_mask(
    logprobs_old: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    advantages: Tensor,
    *,
    bound: float = 0.04,
) -> Tensor:
    """Mask the tokens pushed furthest from the sampler by the update.

    The candidates are the trained tokens with A_t > 0 and ρ_t > 1, or with A_t < 0 and ρ_t < 1: the
    update pushes them further from the sampler. Candidates are masked (w_t = 0) in falling order of
    log² ρ_t, until the mean of log² ρ_t over the remaining candidates is ≤ bound. Tokens with equal
    log² ρ_t are masked together. All other tokens have w_t = 1, however large their ratio, because
    the update pulls them back. They do not count in the mean.

    The paper differs in three ways. First, the paper takes the ratio of the policy at each update;
    here it is the ratio of the policy before the step (log ρ_t = log π_old_t - log μ_t). With one
    update per step both are the same. With more updates, the paper's mask would depend on the split
    into micro-batches. Second, in the paper the mask replaces the clip. Here the policy loss keeps
    its clip of π / π_old, and the clip bounds the moves within the step. Third, the paper's loss
    weighs each kept token with π / μ, without a bound. Here a kept token has the weight 1, and
    `product_correction` can add one.

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool, of the whole update batch.
      advantages: [B, T]; only their sign is used.
      bound: > 0, in nats². If all log-ratios are small, no token is masked.
    Returns: [B, T] of 0 and 1, float32 or float64, without gradient; 1 where the mask is False, and
      where both log-probs agree. If log² ρ exceeds the bound for every candidate, all candidates
      are masked.
    Raises: ValueError naming the bound.
    Source: M2PO, arXiv:2510.01161, section 5.2 and algorithm 1, with 0.04. The authors' code caps
      the ratios of these tokens instead, as a clip does, in each micro-batch. AReaL masks tokens of
      either sign, by the mean over all tokens of a micro-batch.

    >>> gaps, both = torch.tensor([[0.5, 0.3, 0.2, 0.1, -0.9]]), torch.ones(1, 5).bool()
    >>> second_moment_mask(
    ...     gaps, torch.zeros(1, 5), both, torch.ones(1, 5)
    ... )  # (.04 + .01) / 2 is left
    tensor([[0., 0., 1., 1., 1.]])
    """
    require(bound > 0, "bound", bound, "> 0")
    gaps = log_ratio(logprobs_old.detach(), logprobs_sampler, response_mask)
    region = response_mask & (advantages.detach().sign() * gaps > 0)
    squares = gaps.square()
    ordered = squares[region].double().sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    dropped = ordered[means > bound]  # sorted, so the running means grow
    far = torch.zeros_like(region)
    if len(dropped):
        far = region & (squares.double() >= dropped[0])
    return _mark_kept(~far, squares, response_mask)


@safe("parts")
def product_correction(
    logprobs_old: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    advantages: Tensor,
    *,
    parts: Mapping[str, Callable[..., Tensor]],
) -> Tensor:
    """Multiply several corrections: at most one weight, and any number of masks.

    w_t = Π_p w_t of part p

    Each part sees all tokens, also tokens dropped by another part. Two weights would correct twice,
    so the config refuses them.

    Args:
      logprobs_old: [B, T] in nats, computed by the trainer.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine (μ).
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be passed.
      advantages: [B, T].
      parts: name → correction. Each correction receives the quantities named by its parameters. No
        part means no correction.
    Returns: [B, T] ≥ 0, float32 or float64, without gradient; 1 where the mask is False.
    Source: Geo-RS-Token-TIS, the geometric mask with token weights, in verl's page on rollout
      correction.

    >>> old, sampler = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.25, 0.9]]).log()
    >>> given = (old, sampler, torch.tensor([[True, True]]), torch.tensor([0]), torch.ones(1, 2))
    >>> product_correction(*given, parts={"weight": token_correction, "mask": binary_kl_mask})
    tensor([[2., 1.]])
    """
    given = {
        "logprobs_old": logprobs_old,
        "logprobs_sampler": logprobs_sampler,
        "response_mask": response_mask,
        "rollout_ids": rollout_ids,
        "advantages": advantages,
    }
    factor = no_correction(response_mask)
    for part in parts.values():
        factor = factor * part(
            **{name: given[name] for name in inspect.signature(part).parameters if name in given}
        )
    return factor


def _bound_ratio(
    ratio: Tensor, response_mask: Tensor, cap: float, floor: float, mode: str
) -> Tensor:
    """Bound the ratio as `mode` says; 1 where the mask is False. nan stays nan."""
    require(cap > 0, "cap", cap, "> 0")
    require(0 <= floor <= cap, "floor", floor, f"0 … cap ({cap})")
    require(mode in ("truncate", "mask", "keep"), "mode", mode, "truncate, mask or keep")
    if mode == "truncate":
        return fill_masked(ratio.clamp(floor, cap), response_mask, 1.0)
    kept = _mark_kept((ratio >= floor) & (ratio <= cap), ratio, response_mask)
    return (
        kept
        if mode == "keep"
        else fill_masked(fill_masked(ratio, kept != 0, 0.0), response_mask, 1.0)
    )


def _mark_kept(kept: Tensor, measured: Tensor, response_mask: Tensor) -> Tensor:
    """Return 1 for kept and 0 for dropped tokens, in the dtype of `measured`; 1 where the mask is
    False. A nan in `measured` stays nan."""
    return fill_masked(
        torch.where(measured.isnan(), measured, kept.to(measured.dtype)).expand(
            response_mask.shape
        ),
        response_mask,
        1.0,
    )


def _divide_by_mean(weights: Tensor, response_mask: Tensor, shares: Tensor) -> Tensor:
    """Divide the weights by their mean. `shares` says how much each trained token counts in the
    mean. If the mean is 0, the weights stay as they are."""
    mean = (weights * shares).sum() / shares.sum().clamp_min(1)
    return fill_masked(weights / mean.where(mean != 0, 1.0), response_mask, 1.0)


def _rollout_max(values: Tensor, rollout_ids: Tensor) -> Tensor:
    """Return for each row the largest entry of its whole rollout, [B, 1]. All entries are ≥ 0."""
    largest = values.new_zeros(int(rollout_ids.max()) + 1 if rollout_ids.numel() else 0)
    return largest.scatter_reduce(0, rollout_ids, values.amax(-1), "amax")[rollout_ids].unsqueeze(
        -1
    )
