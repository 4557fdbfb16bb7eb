"""Advantages and losses of rollouts, and of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import rlkit.functional as F
from rlkit.algorithm import KL, Algorithm, call, estimate_advantages, loss_weights, surrogate
from rlkit.notebook.configs import algorithm_of, asks_for, create_grpo_config
from rlkit.notebook.stacked import stack_rollouts
from rlkit.notebook.tensors import mask_like, mean_of_tokens, per_token_of, required, same_shape
from rlkit.types import Estimate, Rollout, TokenLogprobs


def compute_advantages(rollouts: Sequence[Rollout], normalize: bool = True) -> Tensor:
    """GRPO's advantages [B, T]: the reward above the mean of its prompt's group, over the group's standard deviation if `normalize`.

    The same on all tokens of a rollout, 0 beyond its last. Equal rewards, a group of one and what cannot be scored give 0.
    """
    algorithm = create_grpo_config(normalize_advantages=normalize).algorithm
    return required(estimate_advantages(stack_rollouts(rollouts), algorithm).advantages)


def compute_policy_gradient_loss(rollouts: Sequence[Rollout], advantages: Tensor) -> Tensor:
    """REINFORCE: Σ_t -A_t log π_t, averaged over each rollout's tokens and then over rollouts; only the gradient means anything.

    Args:
      rollouts: of `attach_logprobs`. advantages: [B, T] or [B], a constant, on any device.
    """
    return _policy_loss(rollouts, advantages, algorithm_of("reinforce", policy_loss=F.reinforce))


def compute_grpo_loss(rollouts: Sequence[Rollout], advantages: Tensor, *, clip_range: float = 0.2) -> Tensor:
    """GRPO's clipped surrogate, averaged over each rollout's tokens and then over rollouts.

    Args:
      rollouts: of `attach_logprobs`. advantages: [B, T] or [B], a constant, on any device. clip_range: 0 < clip_range ≤ 1.
    """
    return _policy_loss(rollouts, advantages, create_grpo_config(clip_range=clip_range).algorithm)


def _policy_loss(rollouts: Sequence[Rollout], advantages: Tensor, algorithm: Algorithm) -> Tensor:
    batch = stack_rollouts(rollouts)
    logprobs, mask = batch.logprobs_sampler, batch.response_mask
    old = [r.metadata.get("old_logprobs") for r in rollouts]
    if all(o is not None for o in old):
        batch = batch._replace(logprobs_old=pad_sequence([torch.as_tensor(o) for o in old], batch_first=True).to(logprobs.device))
    batch = batch._replace(advantages=F.fill_masked(per_token_of(advantages, logprobs), mask, 0.0))
    loss, _ = surrogate(loss_weights(batch, algorithm), TokenLogprobs(logprobs, torch.zeros_like(logprobs)), algorithm, KL("none"))
    return loss


def compute_ppo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None, *, clip_range: float = 0.2
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped surrogate, averaged over all tokens, and how the update stands.

    Args:
      logprobs: [B, T] in nats, of the policy now, carries the gradient. old_logprobs: [B, T], of the policy before the first update.
      advantages: [B, T] or [B], a constant, on any device. mask: [B, T], True where a token counts. clip_range: in (0, 1].
    Returns: scalar loss; approx_kl (nats), clipfrac (share of tokens without gradient), ratio_mean, ratio_std (population).
    Raises: ValueError where shapes differ.

    >>> loss, stats = compute_ppo_loss(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.tensor([2.0]))
    >>> loss, stats["ratio_mean"], stats["ratio_std"]
    (tensor(-2.), 1.0, 0.0)
    """
    same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    mask, old = mask_like(logprobs, mask), old_logprobs.detach().to(logprobs.device)
    advantages = F.fill_masked(per_token_of(advantages, logprobs), mask, 0.0)
    ratio = F.token_ratio(logprobs, old, mask)
    per_token = F.clipped(ratio, advantages, clip_low=clip_range, clip_high=clip_range)
    mean, variance, _ = F.ratio_statistics(ratio, mask)
    low, high = F.clip_fractions(ratio, advantages, mask, clip_low=clip_range, clip_high=clip_range)
    stats = {"approx_kl": F.approximate_kl(logprobs, old, mask), "clipfrac": low + high, "ratio_mean": mean, "ratio_std": variance.sqrt()}
    return mean_of_tokens(per_token, mask), {name: float(value) for name, value in stats.items()}


def compute_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, mask: Tensor | None = None, *, clip_range: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Half the mean squared distance of the values from the returns, clipped about the old values where `clip_range` is given.

    Args:
      values: [B, T] in units of reward, carries the gradient. returns: the same shape, a constant. mask: True where a token counts.
      old_values: before the first update, for clipping. clip_range: > 0, in units of reward; None: no clipping.
    Returns: scalar loss; value_mean, value_std (population), return_mean over the tokens that count.
    Raises: ValueError where shapes differ, [B, T, 1] against [B, T] included, or old values are missing.

    >>> compute_value_loss(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    (tensor(2.), {'value_mean': 1.0, 'value_std': 0.0, 'return_mean': 3.0})
    """
    if clip_range is not None and old_values is None:
        raise ValueError(f"clip_range={clip_range} needs old_values, the values before the first update")
    old_values = values.detach() if old_values is None else old_values
    same_shape(values=values, returns=returns, old_values=old_values)
    mask = mask_like(values, mask)
    given = {"values": values, "values_old": old_values, "returns": returns}
    given = {name: F.fill_masked(F.full_precision(x).to(values.device), mask, 0.0) for name, x in given.items()}
    per_token = call(F.squared_error if clip_range is None else partial(F.clipped_squared_error, clip=clip_range), given)
    mean, variance, _ = F.ratio_statistics(given["values"].detach(), mask)
    stats = {"value_mean": mean, "value_std": variance.sqrt(), "return_mean": F.masked_mean(given["returns"], mask)}
    return mean_of_tokens(per_token, mask), {name: float(value) for name, value in stats.items()}


def compute_advantages_and_returns(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    use_gae: bool = True,
    truncated: Tensor | None = None,
    bootstrap_truncated: bool = False,
) -> Estimate:
    """Advantages and returns of the steps of episodes: generalised advantage estimation, or the return minus the value.

    Args:
      rewards: [B, S] of each step, an outcome reward at the last; [S] is one episode.
      values: the same shape, of the state before each step. mask: the same shape, True on real steps; None: everywhere.
      gamma, lam: 0 … 1, per step. use_gae: False is lam = 1, the discounted return minus the value.
      truncated: [B] bool, cut off by a limit. bootstrap_truncated: their last value is used for what was cut off.
    Returns: both in the shape of rewards; 0 under the mask. Raises: ValueError where shapes differ or a number is out of range.

    >>> compute_advantages_and_returns(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), gamma=1.0, use_gae=False)
    Estimate(advantages=tensor([0.5000, 0.5000]), returns=tensor([1., 1.]))
    """
    same_shape(rewards=rewards, values=values)
    mask = mask_like(rewards, mask)
    rewards2, values2, mask2 = (x.reshape(-1, x.shape[-1]) for x in (rewards, values.to(rewards.device), mask))
    n, device = len(mask2), mask.device
    cut = torch.zeros(n, dtype=torch.bool, device=device) if truncated is None else truncated
    steps = torch.arange(mask2.shape[1], device=device).expand(mask2.shape)
    numbers: dict[str, Any] = {"gamma": gamma, "lam": lam if use_gae else 1.0, "bootstrap_truncated": bootstrap_truncated}
    estimate = F.gae(rewards2, values2, cut, torch.arange(n, device=device), steps, mask2, **numbers)
    return Estimate(*(x.reshape(rewards.shape) for x in estimate))


PairSelector = Callable[[Sequence[Rollout]], Iterable[tuple[int, int]]]


def compute_pairwise_loss(
    rollouts: Sequence[Rollout],
    advantages: Tensor | None = None,
    *,
    pair_selector: Callable[..., Any] | None = None,
    beta: float = 0.1,
    length_normalise: bool = False,
) -> Tensor:
    """The preference loss -log σ(β (log π(better) - log π(worse))), averaged over pairs. The notebooks call it compute_dapo_loss.

    Args:
      rollouts: of `attach_logprobs`, scored. advantages: not used, since the rewards order a pair.
      pair_selector: (rollouts) → [(i, j)], or one of the core; None: every pair of a prompt. Ties, pairs over two prompts and rollouts
        without a score are skipped; without any pair the loss is 0, with a gradient of 0.
      beta: > 0, per nat; no coefficient of any KL. length_normalise: means of log-probs instead of sums.
    """
    batch = stack_rollouts(rollouts)
    device = batch.rewards.device
    scored = batch.rewards.where(batch.lengths > 0, torch.nan)
    pairs = core_selector(pair_selector, rollouts)(scored, batch.group_ids).to(device)
    losses = F.pairwise_loss(
        batch.logprobs_sampler, batch.response_mask, batch.rollout_ids, pairs, beta=beta, length_normalise=length_normalise
    )
    return losses.sum() / max(1, len(pairs))


def core_selector(pair_selector: Callable[..., Any] | None, rollouts: Sequence[Rollout]) -> Callable[[Tensor, Tensor], Tensor]:
    """A pair_selector as the core takes it: (rewards [N], group_ids [N]) → [P, 2], the better rollout first, without ties."""
    if pair_selector is None or asks_for(pair_selector, "rewards"):
        return pair_selector or F.all_pairs

    def selector(rewards: Tensor, group_ids: Tensor) -> Tensor:
        pairs = torch.tensor(list(pair_selector(rollouts)), dtype=torch.int64, device=rewards.device).reshape(-1, 2)
        chosen = torch.zeros(len(rewards), len(rewards), dtype=torch.bool, device=rewards.device)
        chosen[pairs[:, 0], pairs[:, 1]] = chosen[pairs[:, 1], pairs[:, 0]] = True
        comparable = F.all_pairs(rewards, group_ids)
        return comparable[chosen[comparable[:, 0], comparable[:, 1]]]

    return selector
