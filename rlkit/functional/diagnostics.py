"""Figures on the health of an update: scalars without gradient, nan if a figure is undefined.

Entries are ignored where the mask is False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.functional.kl import k3
from rlkit.functional.masking import masked_mean
from rlkit.functional.ratios import LOG_RATIO_BOUND, log_ratio, token_ratio


@torch.no_grad()
def approximate_kl(logprobs: Tensor, logprobs_old: Tensor, response_mask: Tensor) -> Tensor:
    """Estimate how far the update has moved the policy: KL(old‖new) by k3, on samples of the old
    policy.

    mean_t (r_t - 1 - log r_t), r = π / π_old, log r_t clamped to ±20

    Args:
      logprobs: [B, T] in nats, after some updates.
      logprobs_old: [B, T] in nats, of the old policy, from which the tokens were sampled.
      response_mask: [B, T] bool.
    Returns: scalar in nats, ≥ 0; 0 if nothing is trained.
    Source: Schulman 2020, "Approximating KL divergence".

    >>> approximate_kl(torch.tensor([[-1.5]]), torch.tensor([[-1.0]]), torch.tensor([[True]]))
    tensor(0.1065)
    """
    return masked_mean(k3(logprobs_old, logprobs), response_mask)


@torch.no_grad()
def ratio_statistics(ratio: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, population variance and maximum of the ratio over trained tokens.

    With algorithm.old=trainer the mean must be 1 in the first minibatch. Any other value points to
    a bug in masks, temperatures or log-probs.

    Args:
      ratio: [B, T].
      response_mask: [B, T] bool.
    Returns: three scalars; nan if nothing is trained.
    Source: under the old policy the mean of a ratio is 1.

    >>> ratio_statistics(torch.tensor([[0.5, 1.5, 9.0]]), torch.tensor([[True, True, False]]))
    (tensor(1.), tensor(0.2500), tensor(1.5000))
    """
    trained = ratio[response_mask]
    if not trained.numel():
        return (trained.new_full((), torch.nan),) * 3
    return trained.mean(), trained.var(unbiased=False), trained.max()


@torch.no_grad()
def effective_sample_size(
    logprobs: Tensor,
    logprobs_sampler: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor | None = None,
) -> Tensor:
    """Compute the effective share of the samples, weighted by the ratio of trainer to sampler.

    ESS / n = (Σ W)² / (n Σ W²)
    of tokens:   W_t = exp(log π_t - log μ_t)
    of rollouts: W_j = exp(Σ over the trained tokens of rollout j of (log π_t - log μ_t))

    Log-ratios and their sums are clamped to ±20 and not bounded further. A small difference per
    token accumulates over a rollout. If log-ratios are normal with standard deviation σ, ESS / n is
    e^(-σ²) for tokens and e^(-Tσ²) for rollouts of T tokens.

    Args:
      logprobs: [B, T] in nats, computed by the trainer.
      logprobs_sampler: [B, T] in nats, computed by the sampling engine.
      response_mask: [B, T] bool, n trained tokens.
      rollout_ids: [B] or [B, T] int64; all tokens of a rollout must be passed. None: each token is
        a sample of its own.
    Returns: scalar in (0, 1], 1 if trainer and sampler agree; nan if nothing is trained. The
      chi-square divergence of trainer and sampler is estimated by
      n / ESS - 1 = mean(W²) / mean(W)² - 1. verl's mean(W²) - 1 can be negative.
    Source: Kong 1992, "A note on importance sampling using standardized weights".

    >>> new, old, mask = (
    ...     torch.tensor([[3.0, 1.0]]).log(),
    ...     torch.zeros(1, 2),
    ...     torch.ones(1, 2, dtype=torch.bool),
    ... )
    >>> (
    ...     effective_sample_size(new, old, mask),
    ...     effective_sample_size(new, old, mask, torch.tensor([0])),
    ... )
    (tensor(0.8000), tensor(1.))
    """
    if rollout_ids is None:
        weights = token_ratio(logprobs, logprobs_sampler, response_mask)[response_mask].double()
    else:
        gap = log_ratio(logprobs, logprobs_sampler, response_mask)[response_mask].double()
        owners = (
            rollout_ids
            if rollout_ids.dim() == response_mask.dim()
            else rollout_ids[:, None].expand(response_mask.shape)
        )
        names, own = owners[response_mask].unique(return_inverse=True)
        weights = (
            gap.new_zeros(len(names))
            .index_add(0, own, gap)
            .clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            .exp()
        )
    return (weights.sum().square() / (weights.numel() * weights.square().sum())).float()


@torch.no_grad()
def correlation(values: Tensor, others: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the Pearson correlation over trained tokens, for example of trainer and sampler
    probabilities.

    ρ = Σ (x - x̄)(y - ȳ) / √(Σ (x - x̄)² Σ (y - ȳ)²)

    Args:
      values, others: [B, T].
      response_mask: [B, T] bool.
    Returns: scalar in -1 … 1; nan if one of the two is constant, or with fewer than two tokens.
    Source: Pearson 1896; as verl's rollout_actor_probs_pearson_corr.

    >>> correlation(
    ...     torch.tensor([1.0, 2.0, 3.0]),
    ...     torch.tensor([5.0, 3.0, 1.0]),
    ...     torch.ones(3, dtype=torch.bool),
    ... )
    tensor(-1.)
    """
    x, y = (_deviations(v[response_mask].double()) for v in (values, others))
    return ((x * y).sum() / (x.square().sum() * y.square().sum()).sqrt()).clamp(-1.0, 1.0).float()


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the share of the returns' variance explained by the value function.

    EV = 1 - Var(returns - values) / Var(returns)

    Args:
      values, returns: [B, T] in units of reward.
      response_mask: [B, T] bool.
    Returns: scalar ≤ 1. 1 is a perfect prediction, 0 is no better than a constant, below 0 is worse
      than a constant; nan if the returns are constant.
    Source: 1 - (fraction of variance unexplained); as `explained_variance` in OpenAI's baselines.

    >>> explained_variance(
    ...     torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), torch.ones(2, dtype=torch.bool)
    ... )
    tensor(0.)
    """
    value = values[response_mask].double()
    target = returns[response_mask].double()
    spread = _deviations(target).square().sum()
    return (
        1 - _deviations(target - value).square().sum() / spread.where(spread > 0, torch.nan)
    ).float()


def _deviations(values: Tensor) -> Tensor:
    """Return the deviations from the mean [n]. If all values are equal, the deviations are exactly
    0, although rounding may make the float64 mean differ from the values."""
    shifted = values - values[:1]
    return shifted - shifted.mean()
