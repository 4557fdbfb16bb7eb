"""Off-policy corrections between the engine that sampled and the trainer: a factor on each token's policy loss [B, T].

Two implementations of one policy give slightly different log-probs, and with groups sampled ahead the weights that sampled are older
(asynchrony=lag), so the samples come from a policy that is not quite the old one. The factor is computed once over the whole update
batch, without gradient; it is 1 under the mask.

    function              ρ                                                  truncate       mask
    token_correction      π_old / μ of each token                            min(ρ, cap)    ρ where floor ≤ ρ ≤ cap, else 0
    sequence_correction   their product over all tokens of the rollout       min(ρ, cap)    ρ where floor ≤ ρ ≤ cap, else 0

With floor > 0, truncate bounds below too. A masked token keeps its place in the aggregation's count, as in IcePop; verl takes it out.

The factor of a token does not correct the bias from the tokens before it. The factor of a sequence has no bias below the cap, but
its variance grows with the length. Other libraries differ. TRL by default takes the factor of the sequence and masks above 3. verl
truncates at 2, only from above, and can divide by the mean of the batch, which is not done here. The sequence mask of OpenRLHF
keeps or drops a sequence and does not bound the weights that it keeps. With `automatic_correction` the run chooses between no
correction and the truncated token factor.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.masking import fill_masked, segment_sum
from rlkit.functional.ratios import LOG_RATIO_BOUND, log_ratio, token_ratio


def no_correction(response_mask: Tensor) -> Tensor:
    """No correction: the sampler is treated as the old policy.

    w_t = 1

    Args:
      response_mask: [B, T] bool.
    Returns: [B, T] float32, all 1.
    Source: PPO as published, Schulman et al. 2017, arXiv:1707.06347, knows one policy that samples and is old.

    >>> no_correction(torch.tensor([[True, False]]))
    tensor([[1., 1.]])
    """
    return torch.ones(response_mask.shape, device=response_mask.device)


def automatic_correction(logprobs_old: Tensor, logprobs_sampler: Tensor, response_mask: Tensor) -> Tensor:
    """The function of `algorithm/correction=auto` until a run has chosen: `token_correction` truncated at 2.

    The check before the first step compares the engine's log-probs with the trainer's. If they agree in float32, the run uses
    `no_correction` instead (`rlkit.training.experiment.settle_correction`). A run that is not checked keeps this function.

    Args:
      logprobs_old: [B, T] in nats, by the trainer, before the update. Anything, nan and inf included, under the mask.
      logprobs_sampler: [B, T] in nats, by the engine that sampled.
      response_mask: [B, T] bool.
    Returns: [B, T] in 0 … 2, float32 or float64, a constant; 1 where both agree, and under the mask.
    Source: as `token_correction`; truncation at 2 is verl's default.

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
    mode: Literal["truncate", "mask"] = "truncate",
) -> Tensor:
    """Each token's own importance weight, bounded.

    ρ_t = exp(clamp(log π_old_t - log μ_t, -20, 20)); w_t = min(max(ρ_t, floor), cap), or with mode=mask ρ_t where
    floor ≤ ρ_t ≤ cap, else 0: with a floor that is IcePop

    Args:
      logprobs_old: [B, T] in nats, by the trainer, before the update. Anything, nan and inf included, under the mask.
      logprobs_sampler: [B, T] in nats, by the engine that sampled (μ).
      response_mask: [B, T] bool.
      cap: > 0; inf bounds nothing. floor: in 0 … cap; 0 bounds nothing.
      mode: truncate bounds a weight that lies outside, mask takes its token out of the policy loss.
    Returns: [B, T] in 0 … cap, float32 or float64, a constant; under the mask 1, and where both agree, if 1 is within bounds.
    Raises: ValueError naming the cap, the floor or the mode.
    Source: truncated importance sampling, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
      Training", fengyao.notion.site/off-policy-rl; the bound itself: Ionides 2008, "Truncated importance sampling". IcePop: Ling Team
      2025, arXiv:2510.18855, M(k) in the objective of section 3; AReaL and verl take 0.5 … 5.

    >>> old, sampler = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.25, 0.3]]).log()
    >>> token_correction(old, sampler, torch.tensor([[True, True]]))
    tensor([[2., 2.]])
    >>> token_correction(old, sampler, torch.tensor([[True, True]]), cap=2.5, mode="mask")
    tensor([[2., 0.]])
    >>> token_correction(sampler, old, torch.tensor([[True, True]]), cap=5.0, floor=0.4, mode="mask")  # of 0.5 and 0.33
    tensor([[0.5000, 0.0000]])
    """
    return _bounded(token_ratio(logprobs_old.detach(), logprobs_sampler, response_mask), response_mask, cap, floor, mode)


def sequence_correction(
    logprobs_old: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    *,
    cap: float = 2.0,
    floor: float = 0.0,
    mode: Literal["truncate", "mask"] = "truncate",
) -> Tensor:
    """The importance weight of the whole rollout, bounded, on each of its tokens.

    ρ_j = exp(clamp(Σ over the trained tokens of rollout j of (log π_old_t - log μ_t), -20, 20)); w as in `token_correction`

    Args:
      logprobs_old: [B, T] in nats, by the trainer, before the update. Anything, nan and inf included, under the mask.
      logprobs_sampler: [B, T] in nats, by the engine that sampled (μ).
      response_mask: [B, T] bool.
      rollout_ids: [B] int64; all rows of a rollout must be there.
      cap: > 0; inf bounds nothing. floor: in 0 … cap; 0 bounds nothing.
      mode: truncate bounds a weight that lies outside, mask takes its rollout out of the policy loss.
    Returns: [B, T] in 0 … cap, float32 or float64, a constant, equal at all trained tokens of a rollout; 1 under the mask.
    Raises: ValueError naming the cap, the floor or the mode.
    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"; TRL's
      default is mode=mask with a cap of 3; verl's sequence mask has a floor of 0.5 beside a cap of 2.

    >>> old, sampler = torch.tensor([[0.5, 0.9]]).log(), torch.tensor([[0.25, 0.6]]).log()
    >>> sequence_correction(old, sampler, torch.tensor([[True, True]]), torch.tensor([0]), cap=4.0)
    tensor([[3.0000, 3.0000]])
    """
    total = segment_sum(log_ratio(logprobs_old.detach(), logprobs_sampler, response_mask), rollout_ids)
    ratio = total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[rollout_ids].unsqueeze(-1)
    return _bounded(ratio.expand(response_mask.shape), response_mask, cap, floor, mode)


def _bounded(ratio: Tensor, response_mask: Tensor, cap: float, floor: float, mode: str) -> Tensor:
    """The ratio within its bounds, or 0 where it is outside; 1 under the mask. nan stays visible."""
    require(cap > 0, "cap", cap, "> 0")
    require(0 <= floor <= cap, "floor", floor, f"0 … cap ({cap})")
    require(mode in ("truncate", "mask"), "mode", mode, "truncate or mask")
    if mode == "truncate":
        return fill_masked(ratio.clamp(floor, cap), response_mask, 1.0)
    return fill_masked(fill_masked(ratio, ~((ratio > cap) | (ratio < floor)), 0.0), response_mask, 1.0)
