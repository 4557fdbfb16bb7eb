"""Advantages and losses of rollouts in the document's shape; a loss carries the gradient that the rollouts' log-probs carry."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.notebook.data import Rollout
from rlkit.notebook.views import groups, stacked, task_rewards

PairSelector = Callable[[Sequence[Rollout]], Iterable[tuple[int, int]]]


def compute_advantages(rollouts: Sequence[Rollout], normalize: bool = True, advantage_fn: Callable[..., Tensor] | None = None) -> Tensor:
    """GRPO's advantages [B, T]: the reward above the mean of its prompt's rollouts, over their standard deviation if `normalize`; then
    less the KL penalty. The same on all tokens of a rollout, 0 beyond its last, and 0 for what cannot be scored.

    A prompt with one rollout has nothing to compare it with, and gets 0.

    Args:
      advantage_fn: (rollouts, normalize) → [B, T], in place of all this.
    """
    if advantage_fn is not None:
        return advantage_fn(rollouts, normalize)
    ids, rewards = groups(rollouts), task_rewards(rollouts)
    if len(ids) > 1 and len(ids.unique()) == len(ids):
        warnings.warn("compute_advantages: each prompt has one rollout, so all advantages are 0; give a prompt several times", stacklevel=2)
    advantages = F.group_mean(rewards, ids)[:, None]
    if normalize:
        advantages = F.normalize_group(advantages, rewards, ids, torch.arange(len(ids)))
    penalties = torch.tensor([r.kl_penalty for r in rollouts])[:, None]
    advantages = F.fill_masked(advantages - penalties, ~rewards.isnan()[:, None], 0.0)
    masks = torch.nn.utils.rnn.pad_sequence([r.generation.valid_mask.cpu() for r in rollouts], batch_first=True)
    return advantages * masks


def compute_policy_gradient_loss(rollouts: Sequence[Rollout], advantages: Tensor, loss_fn: Callable[..., Tensor] | None = None) -> Tensor:
    """REINFORCE: -A log π, averaged over all tokens; only the gradient means anything.

    Args:
      advantages: [B, T], a constant, on any device. loss_fn: (rollouts, advantages) → scalar, in place of all this.
    """
    if loss_fn is not None:
        return loss_fn(rollouts, advantages)
    logprobs, mask = stacked(rollouts)
    return _token_mean(-_constant(advantages, mask) * F.fill_masked(logprobs, mask, 0.0), mask)


def compute_ppo_loss(rollouts: Sequence[Rollout], old_logprobs: Tensor, advantages: Tensor, clip_range: float = 0.2) -> Tensor:
    """PPO's clipped surrogate, averaged over all tokens.

    Args:
      old_logprobs: [B, T] in nats, of the policy before the first update. advantages: [B, T]. Both are constants, on any device.
      clip_range: in (0, 1].
    """
    logprobs, mask = stacked(rollouts)
    ratio = F.token_ratio(logprobs, _constant(old_logprobs, mask), mask)
    return _token_mean(F.clipped(ratio, _constant(advantages, mask), clip_low=clip_range, clip_high=clip_range), mask)


def compute_dapo_loss(rollouts: Sequence[Rollout], beta: float = 0.1, pair_selector: PairSelector | None = None) -> Tensor:
    """The preference loss -log σ(β (log π(better) - log π(worse))), averaged over pairs; 0 with a gradient of 0 without any.

    Args:
      beta: > 0, per nat. pair_selector: (rollouts) → [(i, j)]; None: every pair of a prompt. Ties, pairs of two prompts and rollouts
        without a score are skipped. The reward before the KL penalty says which one is better.
    """
    logprobs, mask = stacked(rollouts)
    pairs = selected(pair_selector, rollouts)(task_rewards(rollouts), groups(rollouts)).to(logprobs.device)
    losses = F.pairwise_loss(logprobs, mask, torch.arange(len(mask), device=mask.device), pairs, beta=beta)
    return losses.sum() / max(1, len(pairs))


def selected(pair_selector: PairSelector | None, rollouts: Sequence[Rollout]) -> Callable[[Tensor, Tensor], Tensor]:
    """A pair_selector as the core takes it: (rewards [N], group_ids [N]) → [P, 2], the better rollout first, without ties."""
    if pair_selector is None:
        return F.all_pairs

    def selector(rewards: Tensor, group_ids: Tensor) -> Tensor:
        chosen = {frozenset(map(int, pair)) for pair in pair_selector(rollouts)}
        comparable = F.all_pairs(rewards, group_ids)
        kept = [frozenset(pair) in chosen for pair in comparable.tolist()]
        return comparable[torch.tensor(kept, dtype=torch.bool, device=comparable.device)]

    return selector


def _constant(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T], or wider, as a constant beside the mask, 0 under it."""
    return F.fill_masked(values.detach().to(mask.device)[:, : mask.shape[1]].expand(mask.shape), mask, 0.0)


def _token_mean(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens; 0 with a gradient where there is none."""
    return (F.token_mean(mask) * F.fill_masked(per_token, mask, 0.0)).sum()
