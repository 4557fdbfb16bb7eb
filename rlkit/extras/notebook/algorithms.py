"""Compute advantages and losses of rollouts in the documents' form. The gradient of a loss reaches
the rollouts' log-probs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.extras.notebook.data import Rollout
from rlkit.extras.notebook.views import groups, stacked, task_rewards

PairSelector = Callable[[Sequence[Rollout]], Iterable[tuple[int, int]]]


def compute_advantages(
    rollouts: Sequence[Rollout],
    normalize: bool = True,
    advantage_fn: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute GRPO's advantages [B, T]. With `normalize`, they are divided by the standard
    deviation of the group. The KL penalty is subtracted. They are 0 for rollouts without a
    score."""
    if advantage_fn is not None:
        return advantage_fn(rollouts, normalize)
    ids = groups(rollouts)
    rewards = task_rewards(rollouts)
    if len(ids) > 1 and len(ids.unique()) == len(ids):
        warnings.warn(
            "compute_advantages: each prompt has one rollout, so all advantages are 0; give a"
            " prompt several times",
            stacklevel=2,
        )
    advantages = F.group_mean(rewards, ids)[:, None]
    if normalize:
        advantages = F.normalize_group(advantages, rewards, ids, torch.arange(len(ids)))
    penalties = torch.tensor([r.kl_penalty for r in rollouts])[:, None]
    advantages = F.fill_masked(advantages - penalties, ~rewards.isnan()[:, None], 0.0)
    masks = torch.nn.utils.rnn.pad_sequence(
        [r.generation.valid_mask.cpu() for r in rollouts], batch_first=True
    )
    return advantages * masks


def compute_policy_gradient_loss(
    rollouts: Sequence[Rollout], advantages: Tensor, loss_fn: Callable[..., Tensor] | None = None
) -> Tensor:
    """Compute REINFORCE's loss -A log π, averaged over all tokens. Only its gradient has a meaning.
    advantages: [B, T], a constant."""
    if loss_fn is not None:
        return loss_fn(rollouts, advantages)
    logprobs, mask = stacked(rollouts)
    return -(_constant(advantages, mask) * F.fill_masked(logprobs, mask, 0.0))[mask].mean()


def compute_ppo_loss(
    rollouts: Any,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_range: float = 0.2,
    *,
    clip_epsilon: float = 0.0,
    mask: Any = None,
) -> Any:
    """Compute PPO's clipped surrogate loss, averaged over all tokens. Given rollouts, return the
    loss. Given log-probs [B, T], return the loss and its statistics.

    old_logprobs: [B, T] in nats. advantages: [B, T] or [B]. Both are constants. clip_range,
    clip_epsilon: two names of the same number, in (0, 1]; clip_epsilon is used unless it is 0.
    mask: [B, T], True for tokens that count; None: all tokens count.
    """
    clip = clip_epsilon or clip_range
    logprobs, mask = (rollouts, mask) if isinstance(rollouts, Tensor) else stacked(rollouts)
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask.bool()
    old = _constant(old_logprobs, mask)
    ratio = F.token_ratio(logprobs, old, mask)
    loss = F.clipped(ratio, _constant(advantages, mask), clip_low=clip, clip_high=clip)[mask].mean()
    if not isinstance(rollouts, Tensor):
        return loss
    ratios = ratio.detach()[mask]
    stats = {
        "policy_loss": float(loss.detach()),
        "approx_kl": float(F.approximate_kl(logprobs.detach(), old, mask)),
    }
    stats |= {"clipfrac": float(((ratios - 1).abs() > clip).float().mean())}
    return loss, stats | {
        "ratio_mean": float(ratios.mean()),
        "ratio_std": float(ratios.std(correction=min(1, len(ratios) - 1))),
    }


def compute_dapo_loss(
    rollouts: Sequence[Rollout], beta: float = 0.1, pair_selector: PairSelector | None = None
) -> Tensor:
    """Compute the preference loss -log σ(β (log π(better) - log π(worse))), averaged over pairs.
    Without any pair, the loss and its gradient are 0.

    beta: > 0, per nat. pair_selector: function that chooses the pairs; None: every pair of rollouts
    of a prompt. Ties, pairs from two prompts and rollouts without a score are skipped.
    """
    logprobs, mask = stacked(rollouts)
    pairs = selected(pair_selector, rollouts)(task_rewards(rollouts), groups(rollouts)).to(
        logprobs.device
    )
    losses = F.pairwise_loss(
        logprobs, mask, torch.arange(len(mask), device=mask.device), pairs, beta=beta
    )
    return losses.sum() / max(1, len(pairs))


def selected(
    pair_selector: PairSelector | None, rollouts: Sequence[Rollout]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Turn a pair_selector into the core's form: a function from (rewards [N], group_ids [N]) to
    pairs [P, 2], with the better rollout first and without ties."""
    if pair_selector is None:
        return F.all_pairs

    def selector(rewards: Tensor, group_ids: Tensor) -> Tensor:
        chosen = {frozenset(map(int, pair)) for pair in pair_selector(rollouts)}
        comparable = F.all_pairs(rewards, group_ids)
        kept = [frozenset(pair) in chosen for pair in comparable.tolist()]
        return comparable[torch.tensor(kept, dtype=torch.bool, device=comparable.device)]

    return selector


def _constant(values: Tensor, mask: Tensor) -> Tensor:
    """Return values [B], [B, T] or wider as a constant [B, T] in the shape of the mask, and 0 where
    the mask is False."""
    values = values.detach().to(mask.device).reshape(len(mask), -1)
    return F.fill_masked(values[:, : mask.shape[1]].expand(mask.shape), mask, 0.0)
