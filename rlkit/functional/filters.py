"""Filters. A rollout filter, (rewards, group_ids) → [N] bool, chooses the rollouts of the update. A
token filter, (…) → [B, T] bool, chooses its tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.masking import full_precision
from rlkit.functional.sampling import gumbel_noise
from rlkit.types import safe


def keep_all(rewards: Tensor) -> Tensor:
    """Keep every rollout, even an unscored rollout (its advantage is 0).

    Args:
      rewards: [N].
    Returns: [N] bool, all True.
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> keep_all(torch.tensor([1.0, float("nan")]))
    tensor([True, True])
    """
    return torch.ones_like(rewards, dtype=torch.bool)


def mixed_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Keep the groups with different rewards. A group of only successes or only failures has no
    signal.

    keep_i = max_{j in group of i} R_j > min_{j in group of i} R_j

    The comparison is exact, on the raw rewards. Comparing a standard deviation with 0 would not be
    exact, because rounding can make it positive for equal rewards.

    Args:
      rewards: [N], nan for an unscored rollout; an unscored rollout takes no part in the
        comparison.
      group_ids: [N] any integers; the rollouts of a group need not be neighbours.
    Returns: [N] bool. All rollouts of a kept group are kept, also its unscored rollouts. A group
      with fewer than two scored rollouts is dropped.
    Source: dynamic sampling, DAPO, Yu et al. 2025, section 3.2, arXiv:2503.14476. The paper
      requires 0 < number correct < G; for rewards of two values this is the same.

    >>> mixed_groups(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([5, 5, 9, 9]))
    tensor([ True,  True, False, False])
    """
    _, group = group_ids.unique(return_inverse=True)
    scored = ~rewards.isnan()
    highest = torch.full_like(rewards, -torch.inf).scatter_reduce(
        0, group, rewards.where(scored, -torch.inf), "amax"
    )
    lowest = torch.full_like(rewards, torch.inf).scatter_reduce(
        0, group, rewards.where(scored, torch.inf), "amin"
    )
    return (highest > lowest)[group]


@safe("component")
def mixed_component(
    rewards: Tensor,
    components: Mapping[str, Tensor],
    group_ids: Tensor,
    *,
    component: str | None = None,
) -> Tensor:
    """Keep the groups whose rollouts differ in one component of the reward, for example accuracy.
    Differences in other terms, such as format or length, do not count.

    keep_i = max_{j in group of i} r_j > min_{j in group of i} r_j, r the component

    Args:
      rewards: [N], used if `components` is empty.
      components: name → [N], nan for an unscored rollout.
      group_ids: [N].
      component: name of the component; None takes the first term of the reward.
    Returns: [N] bool, `mixed_groups` of this component.
    Raises: ValueError naming `component` if it does not exist.
    Source: dynamic sampling, DAPO, Yu et al. 2025, section 3.2, eq. 11, arXiv:2503.14476: 0 <
      number correct < G.

    >>> components = {"right": torch.tensor([1.0, 1.0]), "format": torch.tensor([0.0, 1.0])}
    >>> mixed_component(torch.tensor([1.0, 1.1]), components, torch.tensor([5, 5]))
    tensor([False, False])
    """
    require(
        component is None or component in components,
        "component",
        component,
        f"one of {', '.join(components)}, or None",
    )
    return mixed_groups(
        next(iter(components.values()), rewards) if component is None else components[component],
        group_ids,
    )


def every_token(response_mask: Tensor) -> Tensor:
    """Keep the policy loss of every sampled token.

    Args:
      response_mask: [B, T] bool.
    Returns: [B, T] bool, `response_mask` itself.
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> every_token(torch.tensor([[True, False]]))
    tensor([[ True, False]])
    """
    return response_mask


def top_entropy(entropy_old: Tensor, response_mask: Tensor, *, fraction: float = 0.2) -> Tensor:
    """Keep only the tokens with the highest entropy, where the policy is least certain.

    keep_t = H_t ≥ the (1 - fraction) quantile of H over all trained tokens of the update batch

    The quantile is interpolated between two neighbours. So the `⌊fraction · (n - 1)⌋ + 1` highest
    of n tokens are kept, and every token tied with the last of these. The loss is still a mean over
    all n tokens: a dropped token adds 0 to the loss and keeps its KL.

    Args:
      entropy_old: [B, T] in nats, before the update. Any value, also nan or inf, where the mask is
        False.
      response_mask: [B, T] bool.
      fraction: share of the tokens to keep, in (0, 1]; 1 keeps every token.
    Returns: [B, T] bool, False where `response_mask` is False; at least one True if any token is
      trained.
    Raises: ValueError naming the fraction.
    Source: Wang et al. 2025, "Beyond the 80/20 rule", section 5, arXiv:2506.01939; the quantile and
      the denominator as in TRL; tokens equal to the quantile are kept. The paper divides by the
      number of kept tokens only (eq. 6), so its loss is about 1 / fraction times as large. The
      paper and TRL take the entropy of the policy in training and the quantile of each micro-batch.
      The authors' code keeps exactly ⌈fraction · n⌉ tokens there, whatever is tied.

    >>> top_entropy(torch.tensor([[0.1, 2.0, 0.3, 9.0]]), torch.tensor([[True, True, True, False]]))
    tensor([[False,  True, False, False]])
    """
    require(0 < fraction <= 1, "fraction", fraction, "0 < fraction ≤ 1")
    entropies = full_precision(entropy_old)
    trained = entropies[response_mask]
    if not trained.numel():
        return response_mask
    kept = int(round(fraction * (trained.numel() - 1), 6)) + 1  # rounded: 0.29 · 100 is 28.999…
    # torch.quantile fails above 16 million entries
    threshold = trained.kthvalue(trained.numel() - kept + 1).values
    return response_mask & ~(entropies < threshold)  # "not less", so nan stays visible


def clip_cov(
    advantages: Tensor,
    logprobs_old: Tensor,
    response_mask: Tensor,
    rollout_ids: Tensor,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """Keep all tokens except a few, drawn at random from the tokens of high covariance. Those
    reduce the policy's entropy most.

    cov_t = (A_t - mean(A)) (log π_old_t - mean(log π_old)), over the N trained tokens of the step

    In this step, `max(1, ⌊share · N⌋)` of the tokens with `low < cov_t < high` have no policy loss.
    A hash of log-prob, rollout and column chooses these tokens, so the choice is repeatable.

    Args:
      advantages: [B, T], without gradient.
      logprobs_old: [B, T] in nats, before the update. Any value where the mask is False.
      response_mask: [B, T] bool.
      rollout_ids: [B].
      share: share of the trained tokens to drop, in [0, 1].
      low, high: bounds of the covariance, in units of advantage times nats, low < high.
    Returns: [B, T] bool, False where `response_mask` is False.
    Raises: ValueError naming `share` or `low`.
    Source: Clip-Cov, Cui et al. 2025, arXiv:2505.22617. The authors' code takes the covariance
      within each micro-batch at its current log-probs, and draws only from the unclipped tokens.
      Their scripts widen the clip of the ratio to 0 … 2. Here the policy loss keeps its own clip.

    >>> logprobs = torch.tensor([[-5.0, -1.0, -6.0]])
    >>> clip_cov(
    ...     torch.tensor([[-1.0, 1.0, 0.0]]), logprobs, torch.ones(1, 3).bool(), torch.tensor([0])
    ... )  # cov 1, 3 and 0
    tensor([[ True, False,  True]])
    """
    require(0 <= share <= 1, "share", share, "0 ≤ share ≤ 1")
    require(low < high, "low", low, f"< high ({high})")
    covariance = _covariance(advantages, logprobs_old, response_mask)
    rows, columns = response_mask.nonzero(as_tuple=True)
    band = ((covariance > low) & (covariance < high)).nonzero()[:, 0]
    bits = full_precision(logprobs_old.detach())[response_mask].double().view(torch.int64)[band]
    noise = gumbel_noise(bits, (rollout_ids[rows[band]] << 32) + columns[band], 1)[:, 0]
    kept = torch.ones_like(covariance, dtype=torch.bool)
    kept[
        band[noise.topk(min(len(band), max(1, int(round(share * len(covariance), 6))))).indices]
    ] = False
    return response_mask.masked_scatter(response_mask, kept)


def covariance_rank(advantages: Tensor, logprobs_old: Tensor, response_mask: Tensor) -> Tensor:
    """Rank each token by its covariance of advantage and log-prob. The rank is the share of the
    step's trained tokens with a higher covariance, so the highest has rank 0.

    rank_t = #{s: cov_s > cov_t} / N, cov as in `clip_cov`

    Args:
      advantages, logprobs_old, response_mask: [B, T], as in `clip_cov`.
    Returns: [B, T] float64, in [0, 1) on the N trained tokens, 1 where the mask is False. Equal
      covariances share a rank.
    Source: KL-Cov, Cui et al. 2025, arXiv:2505.22617.

    >>> covariance_rank(
    ...     torch.tensor([[-1.0, 1.0]]), torch.tensor([[-1.0, -3.0]]), torch.ones(1, 2).bool()
    ... )
    tensor([[0., 0.]], dtype=torch.float64)
    """
    covariance = _covariance(advantages, logprobs_old, response_mask)
    higher = len(covariance) - torch.searchsorted(covariance.sort().values, covariance, right=True)
    rank = higher.double() / max(len(covariance), 1)
    return rank.new_ones(response_mask.shape).masked_scatter(response_mask, rank)


def _covariance(advantages: Tensor, logprobs_old: Tensor, response_mask: Tensor) -> Tensor:
    """Compute the covariance term of each trained token, [n] in float64."""
    a, p = (values.detach()[response_mask].double() for values in (advantages, logprobs_old))
    return (a - a.mean()) * (p - p.mean())
