"""Filters: which rollouts take part in the update, (rewards, group_ids) → [N] bool, and which
tokens, (…) → [B, T] bool."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlkit.functional._arguments import require
from rlkit.functional.masking import full_precision
from rlkit.functional.sampling import gumbel_noise
from rlkit.types import safe


def keep_all(rewards: Tensor) -> Tensor:
    """Every rollout is kept, even if it cannot be scored (its advantage is then 0).

    Args:
      rewards: [N].
    Returns: [N] bool, all True.
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> keep_all(torch.tensor([1.0, float("nan")]))
    tensor([True, True])
    """
    return torch.ones_like(rewards, dtype=torch.bool)


def mixed_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Keep the groups with different rewards; a group of successes or failures alone has no signal.

    keep_i = max_{j in group of i} R_j > min_{j in group of i} R_j

    The comparison is exact, on the raw rewards: a standard deviation of equal rewards need not be 0
    in floating point.

    Args:
      rewards: [N], nan if it cannot be scored; nan rewards take no part in the comparison.
      group_ids: [N] any integers; members need not be neighbours.
    Returns: [N] bool. A kept group is kept whole, its unscored rollouts included; a group with
      fewer than two scored rollouts is dropped.
    Source: dynamic sampling, DAPO, Yu et al. 2025, section 3.2, arXiv:2503.14476, which asks 0 <
      number correct < G. For rewards of two values this is the same.

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
    """Keep the groups with differences in one component of the reward, for example accuracy,
    whatever the terms of format or length add.

    keep_i = max_{j in group of i} r_j > min_{j in group of i} r_j, r the component

    Args:
      rewards: [N], used if there are no components. components: name → [N], nan if it cannot be
        scored. group_ids: [N].
      component: its name; None: the first term of the reward.
    Returns: [N] bool, as `mixed_groups` of that component.
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
    """The policy loss of every sampled token counts.

    Args:
      response_mask: [B, T] bool.
    Returns: [B, T] bool, the same.
    Source: GRPO as published, Shao et al. 2024, arXiv:2402.03300.

    >>> every_token(torch.tensor([[True, False]]))
    tensor([[ True, False]])
    """
    return response_mask


def top_entropy(entropy_old: Tensor, response_mask: Tensor, *, fraction: float = 0.2) -> Tensor:
    """Only the tokens at which the policy is least certain train.

    keep_t = H_t ≥ the (1 - fraction) quantile of H over all trained tokens of the update batch

    The quantile is interpolated between two neighbours. So the ⌊fraction · (n - 1)⌋ + 1 highest of
    n tokens are kept, and all ties with the last of them. The loss is still a mean over all n
    tokens: the others add 0 to it, and keep their KL.

    Args:
      entropy_old: [B, T] in nats, before the update. Anything, nan and inf included, under the
        mask. response_mask: [B, T] bool.
      fraction: in (0, 1]; 1 keeps every token.
    Returns: [B, T] bool, False under the mask; at least one True if anything is trained.
    Raises: ValueError naming the fraction.
    Source: Wang et al. 2025, "Beyond the 80/20 rule", section 5, arXiv:2506.01939; the quantile as
      in TRL, ≥ kept.

    >>> top_entropy(torch.tensor([[0.1, 2.0, 0.3, 9.0]]), torch.tensor([[True, True, True, False]]))
    tensor([[False,  True, False, False]])
    """
    require(0 < fraction <= 1, "fraction", fraction, "0 < fraction ≤ 1")
    entropies = full_precision(entropy_old)
    trained = entropies[response_mask]
    if not trained.numel():
        return response_mask
    kept = int(round(fraction * (trained.numel() - 1), 6)) + 1  # rounded: 0.29 · 100 is 28.999…
    # torch.quantile ends at 16 million
    threshold = trained.kthvalue(trained.numel() - kept + 1).values
    return response_mask & ~(entropies < threshold)  # so that nan stays visible


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
    """All tokens except a few, drawn at random from those of high covariance, since these reduce
    the policy's entropy most.

    cov_t = (A_t - mean(A)) (log π_old_t - mean(log π_old)) over the N trained tokens of the step;
    of those with low < cov_t < high, max(1, ⌊share · N⌋) have no policy loss in this step. They are
    drawn by a hash of log-prob, rollout and column, so the draw is repeatable.

    Args:
      advantages: [B, T] a constant. logprobs_old: [B, T] in nats, before the update. Anything under
        the mask.
      response_mask: [B, T] bool. rollout_ids: [B].
      share: in [0, 1]. low, high: in units of advantage times nats, low < high.
    Returns: [B, T] bool, False under the mask.
    Raises: ValueError naming `share` or `low`.
    Source: Clip-Cov, Cui et al. 2025, arXiv:2505.22617. The authors' code takes the covariance of
      each micro-batch at its current log-probs, and draws among the tokens that the clip leaves.

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
    kept[band[noise.topk(min(len(band), max(1, int(share * len(covariance))))).indices]] = False
    return response_mask.masked_scatter(response_mask, kept)


def covariance_rank(advantages: Tensor, logprobs_old: Tensor, response_mask: Tensor) -> Tensor:
    """For each token, the share of the step's trained tokens with a higher covariance of advantage
    and log-prob: the highest has 0.

    rank_t = #{s: cov_s > cov_t} / N, cov as in `clip_cov`

    Args:
      advantages, logprobs_old, response_mask: [B, T], as in `clip_cov`.
    Returns: [B, T] float64, in [0, 1) on the N trained tokens, 1 under the mask. Equal covariances
      share a rank.
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
    """Of each trained token, [n] in float64."""
    a, p = (values.detach()[response_mask].double() for values in (advantages, logprobs_old))
    return (a - a.mean()) * (p - p.mean())
