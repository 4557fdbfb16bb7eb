"""The author's notebook signatures, lifted onto the core: plain functions of models, tokenizers and lists of rollouts, without Hydra.

No maths stands here: every function arranges tensors and calls the core. In this module `[B, T]` means B rollouts × the tokens that
each sampled, in the order of time and filled up on the right (`stack_rollouts`); prompts and tool results are not among them.

    hook            signature                                                      default
    kl_fn           (policy_logprobs, ref_logprobs, mask) → [B]                    compute_forward_kl
    ref_model_fn    (policy_model) → model                                         create_reference_model
    ref_update_fn   (ref_model, policy_model, **progress such as step, kl)         None: the reference stays
    advantage_fn    (rollouts, normalize) → [B, T]                                 the config's; compute_advantages is GRPO's
    loss_fn         (rollouts, advantages) → scalar, log-probs carry the gradient  the config's; compute_grpo_loss is GRPO's
    pair_selector   (rollouts) → [(i, j)]                                          every pair of a prompt
    switch_strategy (iteration) → algorithm name                                   grpo until step 50, then dapo
    checkpoint_fn   (model, tokenizer, step, output_dir)                           save_checkpoint

Where a hook is taken, a function of the core does as well: it is told by the names of the quantities that it asks for.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import rlkit.functional as F
from rlkit import reference
from rlkit.algorithm import (
    KL,
    Algorithm,
    Critic,
    call,
    choose,
    estimate_advantages,
    inputs,
    micro_batches,
    minibatches,
    quantities,
    scale_tokens,
    select,
    surrogate,
    value_surrogate,
    weigh,
)
from rlkit.callbacks.files import write_json
from rlkit.environments import single_turn
from rlkit.errors import DataError
from rlkit.generation import generate as sample
from rlkit.models import make_critic, make_policy, score
from rlkit.rewards import Reward, Term, exact_match, format_match, length, tool_usage, weighted_sum
from rlkit.rewards import score as score_rollouts
from rlkit.rollouts import assemble, collect
from rlkit.tasks.stream import StreamState, take
from rlkit.types import QUANTITIES, Batch, Environment, Estimate, Message, Reference, Rollout, Scores, Task

NAN = float("nan")
KLHook = Callable[..., Tensor]
UpdateHook = Callable[..., None]
Prompt = str | Sequence[Message] | Task

# ------------------------------------------------------------------------------------------------------------- KL


def compute_kl(
    policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None, kl_fn: Callable[..., Tensor] = F.forward
) -> Tensor:
    """The divergence of each sequence from the reference, by any estimate.

    Args:
      policy_logprobs: [B, T] in nats, of tokens that the policy sampled, carries the gradient; [T] is one sequence.
      ref_logprobs: the same shape, a constant.
      mask: the same shape, True where a token counts; None: everywhere. Anything may lie under it, nan and inf included.
      kl_fn: (policy_logprobs, ref_logprobs, mask) → [B], or an estimator of the core, whose mean is taken over each sequence.
    Returns: [B] in nats.
    Raises: ValueError where shapes differ or kl_fn does not give [B].

    >>> compute_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -9.0]]), torch.tensor([[True, False]]))
    tensor([0.5000])
    """
    _same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    mask = _mask_like(policy_logprobs, mask)
    if policy_logprobs.dim() == 1:
        policy_logprobs, ref_logprobs, mask = policy_logprobs[None], ref_logprobs[None], mask[None]
    policy = F.fill_masked(policy_logprobs, mask, 0.0)
    ref = F.fill_masked(ref_logprobs.detach().to(policy.device), mask, 0.0)
    if _asks_for(kl_fn, "logprobs"):
        given = {"logprobs": policy, "logprobs_ref": ref, "logprobs_old": policy.detach(), "response_mask": mask}
        return _row_mean(call(kl_fn, given), mask)
    kl = kl_fn(policy, ref, mask)
    if kl.shape != policy.shape[:1]:
        raise ValueError(f"kl_fn gave shape {tuple(kl.shape)}; it must be [B] = {tuple(policy.shape[:1])}")
    return kl


def compute_forward_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """A kl_fn: the mean of log π - log ref, an estimate of KL(π‖ref), of either sign.

    Its gradient is that of the divergence (the core's `forward` at ratio 1); the gradient of the bare mean is 0 on average.
    """
    return compute_kl(policy_logprobs, ref_logprobs, mask, F.forward)


def compute_reverse_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """A kl_fn: an estimate of KL(ref‖π) by the importance weights ref / π; not the negated forward one."""
    return compute_kl(policy_logprobs, ref_logprobs, mask, F.reverse)


def create_truncated_kl(threshold: float = 1.0) -> KLHook:
    """A kl_fn: the mean of k3 with log-ratios clamped to ±threshold (nats, 0 < threshold ≤ 20), so never negative."""
    return partial(compute_kl, kl_fn=partial(F.truncated, threshold=threshold))


def truncated_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """A kl_fn: `create_truncated_kl()`, at a threshold of 1 nat.

    >>> compute_kl(torch.tensor([[-1.0]]), torch.tensor([[-9.0]]), kl_fn=truncated_kl)
    tensor([0.3679])
    """
    return create_truncated_kl()(policy_logprobs, ref_logprobs, mask)


def create_adaptive_kl(probability: float = 0.1) -> KLHook:
    """A kl_fn: k3 on tokens that the policy gives more than `probability` (0 ≤ probability < 1), 0 on others; the mean is over all tokens.

    0 where no token qualifies: `confident_share` tells that from an agreement.
    """
    return partial(compute_kl, kl_fn=partial(F.confident, probability=probability))


def confident_share(policy_logprobs: Tensor, mask: Tensor | None = None, probability: float = 0.1) -> Tensor:
    """Which share of each sequence's tokens `create_adaptive_kl(probability)` looks at [B], in 0 … 1; 0 for one without tokens.

    >>> confident_share(torch.tensor([[-1.0, -3.0]]))
    tensor([0.5000])
    """
    mask = _mask_like(policy_logprobs, mask)
    return _row_mean(F.full_precision(policy_logprobs.detach()).exp() > probability, mask)


def compute_kl_divergence(old_logprobs: Tensor, new_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """How far an update has moved the policy: k3 estimate of KL(old‖new) on the old policy's tokens, a scalar ≥ 0 in nats.

    Args:
      old_logprobs, new_logprobs: [B, T]. mask: [B, T], True where a token counts; None: everywhere.

    >>> compute_kl_divergence(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor(0.1065)
    """
    _same_shape(old_logprobs=old_logprobs, new_logprobs=new_logprobs)
    return F.approximate_kl(new_logprobs, old_logprobs.to(new_logprobs.device), _mask_like(new_logprobs, mask))


# ------------------------------------------------------------------------------------------------------ references


def create_reference_model(policy_model: nn.Module) -> nn.Module:
    """A copy of the policy as it is now, without gradient, in evaluation mode; it shares no memory with the policy.

    Under LoRA the base is copied too. `rlkit.reference` keeps a second adapter instead; a notebook has the plain model.
    """
    return copy.deepcopy(policy_model).requires_grad_(False).eval()


def update_reference_model(ref_model: nn.Module, policy_model: nn.Module, update_fn: UpdateHook | None = None, **progress: Any) -> None:
    """Moves the reference: by `update_fn`, or without one to a copy of the policy, parameters and buffers by name.

    Args:
      update_fn: (ref_model, policy_model, …) → None. It gets those of `progress` that its signature takes, so one of two arguments works.
      progress: keywords such as step (RL steps done) and kl (nats per token, of the last step).
    """
    if update_fn is None:
        reference.follow(reference.track(ref_model), policy_model)
    else:
        update_fn(ref_model, policy_model, **_taken(update_fn, progress))


def lift_update(kept: Reference) -> UpdateHook:
    """A reference of the core that moves, as a ref update_fn: (ref_model, policy_model, **progress) → None.

    What is averaged is kept in float32 beside a narrower reference from the first call on; for a reference whose weights others
    change in between, make a new updater. Without a step in the progress, calls are counted.
    """
    states: WeakKeyDictionary[nn.Module, tuple[int, reference.Moving]] = WeakKeyDictionary()

    def update_fn(ref_model: nn.Module, policy_model: nn.Module, **progress: Any) -> None:
        calls, state = states.get(ref_model) or (0, reference.track(ref_model)._replace(model=None))
        states[ref_model] = calls + 1, kept.update(state, policy_model, **({"step": calls + 1} | progress))

    return update_fn


def create_ema_updater(decay: float = 0.999) -> UpdateHook:
    """A ref update_fn: reference ← decay · reference + (1 - decay) · policy. Averaged in float32, so that a bfloat16 reference moves."""
    return lift_update(reference.ema(decay=decay))


def create_periodic_updater(update_every: int = 20) -> UpdateHook:
    """A ref update_fn: a copy of the policy at every multiple of `update_every` steps (or calls, where no step is passed)."""
    return lift_update(reference.periodic(every=update_every))


def create_kl_updater(threshold: float = 0.5) -> UpdateHook:
    """A ref update_fn: a copy of the policy once the KL since the last copy adds up to more than `threshold` nats per token.

    It needs the keyword kl: a call without one raises TypeError, instead of never copying.
    """
    return lift_update(reference.on_kl(threshold=threshold))


# ------------------------------------------------------------------------------------------------ rollouts as tensors


def stack_rollouts(rollouts: Sequence[Rollout]) -> Batch:
    """The sampled tokens of rollouts side by side: a Batch with one row a rollout, [B, T], `response_mask` True on real tokens.

    `logprobs_sampler` carries the gradient where the steps' log-probs do (`attach_logprobs`).
    """
    logprobs = [[torch.as_tensor(step.logprobs)[step.sampled] for step in r.steps] for r in rollouts]
    device = next((part.device for parts in logprobs for part in parts), torch.device("cpu"))
    stacked = pad_sequence([torch.cat([torch.zeros(0, device=device), *parts]) for parts in logprobs], batch_first=True)
    batch = assemble([_plain(r) for r in rollouts], pad_token_id=0, device=device)
    positions, mask = _episodes(batch)
    moved = {name: F.to_episodes(value, positions, mask) for name, value in quantities(batch).items() if value.dim() == 2}
    moved |= {"attention_mask": mask, "response_mask": mask, "rollout_ids": torch.arange(len(mask), device=device)}
    return batch._replace(**moved | {"logprobs_sampler": stacked})


def _plain(rollout: Rollout) -> Rollout:
    """The rollout with log-probs as numbers."""
    return rollout._replace(steps=tuple(s._replace(logprobs=tuple(torch.as_tensor(s.logprobs).tolist())) for s in rollout.steps))


def attach_logprobs(model: nn.Module, rollouts: Sequence[Rollout], *, temperature: float = 1.0) -> list[Rollout]:
    """The rollouts with the model's own log-probs in their steps, as tensors that carry the gradient: what a loss_fn works on.

    The log-probs that the steps had go to `metadata["old_logprobs"]` [T], the "old" of ratios; what is there already stays, so that
    rollouts may be attached anew for every update.

    Args:
      model: a causal LM. rollouts: with at least one step among them. temperature: > 0, the sampler's.
    """
    batch = assemble([_plain(r) for r in rollouts], pad_token_id=0, device=next(model.parameters()).device)
    logprobs = score(model, batch.ids, batch.response_mask, temperature=temperature).logprobs
    return _attach(rollouts, batch, logprobs, batch.logprobs_sampler)


def _attach(rollouts: Sequence[Rollout], batch: Batch, logprobs: Tensor, old: Tensor) -> list[Rollout]:
    positions, mask = _episodes(batch)
    new, old = F.to_episodes(logprobs, positions, mask), F.to_episodes(old, positions, mask)
    attached = []
    for rollout, tokens, before in zip(rollouts, new, old, strict=True):
        sizes = [len(s.sampled) for s in rollout.steps]
        parts = tokens[: sum(sizes)].split(sizes) if sizes else ()
        steps = tuple(
            s._replace(logprobs=part.new_zeros(len(s.response_ids)).index_put((positions.new_tensor(s.sampled),), part))
            for s, part in zip(rollout.steps, parts, strict=True)
        )
        metadata = {"old_logprobs": before[: sum(sizes)], **rollout.metadata}
        attached.append(rollout._replace(steps=steps, metadata=metadata))
    return attached


def _episodes(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions and mask [N, T] of each rollout's sampled tokens, also for rollouts at the end without any."""
    positions, mask = F.episode_positions(batch.rollout_ids, batch.step_ids, batch.response_mask)
    padding = (0, 0, 0, len(batch.rewards) - len(mask))
    return nn.functional.pad(positions, padding), nn.functional.pad(mask, padding)


# ------------------------------------------------------------------------------------------- advantages and losses


def compute_advantages(rollouts: Sequence[Rollout], normalize: bool = True) -> Tensor:
    """GRPO's advantages: the reward above the mean of its group, over the group's standard deviation where `normalize`.

    A group is the rollouts of one prompt (`rollout.group`). Equal rewards, a group of one and what cannot be scored give 0.

    Returns: [B, T], the same on all tokens of a rollout, 0 beyond its last.
    """
    algorithm = create_grpo_config(normalize_advantages=normalize).algorithm
    return _required(estimate_advantages(stack_rollouts(rollouts), algorithm).advantages)


def compute_policy_gradient_loss(rollouts: Sequence[Rollout], advantages: Tensor) -> Tensor:
    """REINFORCE: Σ_t -A_t log π_t, averaged over each rollout's tokens and then over rollouts.

    Args:
      rollouts: of `attach_logprobs`. advantages: [B, T] or [B], a constant, on any device.
    Returns: scalar; only its gradient means anything.
    """
    return _policy_loss(rollouts, advantages, _algorithm("reinforce", policy_loss=F.reinforce))


def compute_grpo_loss(rollouts: Sequence[Rollout], advantages: Tensor, *, clip_range: float = 0.2) -> Tensor:
    """GRPO's clipped surrogate, averaged over each rollout's tokens and then over rollouts.

    Args:
      rollouts: of `attach_logprobs`. advantages: [B, T] or [B], a constant, on any device. clip_range: 0 < clip_range ≤ 1.
    Returns: scalar, carries the gradient.
    """
    return _policy_loss(rollouts, advantages, create_grpo_config(clip_range=clip_range).algorithm)


def _policy_loss(rollouts: Sequence[Rollout], advantages: Tensor, algorithm: Algorithm) -> Tensor:
    batch = stack_rollouts(rollouts)
    logprobs, mask = batch.logprobs_sampler, batch.response_mask
    old = [r.metadata.get("old_logprobs") for r in rollouts]
    if all(o is not None for o in old):
        batch = batch._replace(logprobs_old=pad_sequence([torch.as_tensor(o) for o in old], batch_first=True).to(logprobs.device))
    batch = batch._replace(advantages=F.fill_masked(_per_token(advantages, logprobs), mask, 0.0))
    loss, _ = surrogate(weigh(batch, algorithm), Scores(logprobs, torch.zeros_like(logprobs)), algorithm, KL("none"))
    return loss


def compute_ppo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None, *, clip_range: float = 0.2
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped surrogate, averaged over all tokens, and how the update stands.

    Args:
      logprobs: [B, T] in nats, of the policy now, carries the gradient.
      old_logprobs: [B, T], of the policy before the first update: frozen there, not computed anew.
      advantages: [B, T] or [B], a constant, on any device. mask: [B, T], True where a token counts; None: everywhere.
      clip_range: 0 < clip_range ≤ 1.
    Returns: scalar loss; approx_kl (nats), clipfrac (share of tokens without gradient), ratio_mean, ratio_std (population).
    Raises: ValueError where shapes differ.

    >>> loss, stats = compute_ppo_loss(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]), torch.tensor([2.0]))
    >>> loss, stats["ratio_mean"], stats["ratio_std"]
    (tensor(-2.), 1.0, 0.0)
    """
    _same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    mask, old = _mask_like(logprobs, mask), old_logprobs.detach().to(logprobs.device)
    advantages = F.fill_masked(_per_token(advantages, logprobs), mask, 0.0)
    ratio = F.token_ratio(logprobs, old, mask)
    per_token = F.clipped(ratio, advantages, clip_low=clip_range, clip_high=clip_range)
    mean, variance, _ = F.ratio_statistics(ratio, mask)
    low, high = F.clip_fractions(ratio, advantages, mask, clip_low=clip_range, clip_high=clip_range)
    stats = {"approx_kl": F.approximate_kl(logprobs, old, mask), "clipfrac": low + high, "ratio_mean": mean, "ratio_std": variance.sqrt()}
    return _reduce(per_token, mask), {name: float(value) for name, value in stats.items()}


def compute_value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, mask: Tensor | None = None, *, clip_range: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Half the mean squared distance of the values from the returns, clipped about the old values where `clip_range` is given.

    Args:
      values: [B, T] in units of reward, carries the gradient. returns: the same shape, a constant.
      old_values: the same shape, before the first update; needed for clipping. mask: the same shape; None: everywhere.
      clip_range: > 0, in units of reward; None: no clipping.
    Returns: scalar loss; value_mean, value_std (population), return_mean over the tokens that count.
    Raises: ValueError where shapes differ, [B, T, 1] against [B, T] included, or old values are missing.

    >>> compute_value_loss(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    (tensor(2.), {'value_mean': 1.0, 'value_std': 0.0, 'return_mean': 3.0})
    """
    if clip_range is not None and old_values is None:
        raise ValueError(f"clip_range={clip_range} needs old_values, the values before the first update")
    old_values = values.detach() if old_values is None else old_values
    _same_shape(values=values, returns=returns, old_values=old_values)
    mask = _mask_like(values, mask)
    given = {"values": values, "values_old": old_values, "returns": returns}
    given = {name: F.fill_masked(F.full_precision(x).to(values.device), mask, 0.0) for name, x in given.items()}
    per_token = call(F.squared_error if clip_range is None else partial(F.clipped_squared_error, clip=clip_range), given)
    mean, variance, _ = F.ratio_statistics(given["values"].detach(), mask)
    stats = {"value_mean": mean, "value_std": variance.sqrt(), "return_mean": F.masked_mean(given["returns"], mask)}
    return _reduce(per_token, mask), {name: float(value) for name, value in stats.items()}


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
      truncated: [B] bool, cut off by a limit. bootstrap_truncated: their last value stands for what was cut off.
    Returns: advantages and returns, the shape of rewards; 0 under the mask.
    Raises: ValueError where shapes differ or a number is out of range.

    >>> compute_advantages_and_returns(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5]), gamma=1.0, use_gae=False)
    Estimate(advantages=tensor([0.5000, 0.5000]), returns=tensor([1., 1.]))
    """
    _same_shape(rewards=rewards, values=values)
    mask = _mask_like(rewards, mask)
    rewards2, values2, mask2 = (x.reshape(-1, x.shape[-1]) for x in (rewards, values.to(rewards.device), mask))
    n = len(mask2)
    estimate = F.gae(
        rewards2,
        values2,
        torch.zeros(n, dtype=torch.bool, device=mask.device) if truncated is None else truncated,
        torch.arange(n, device=mask.device),
        torch.arange(mask2.shape[1], device=mask.device).expand(mask2.shape),
        mask2,
        gamma=gamma,
        lam=lam if use_gae else 1.0,
        bootstrap_truncated=bootstrap_truncated,
    )
    return Estimate(*(x.reshape(rewards.shape) for x in estimate))


# ----------------------------------------------------------------------------------------------------------- pairs

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
      rollouts: of `attach_logprobs`, scored. advantages: not used: the rewards order a pair; here so that it is a loss_fn.
      pair_selector: (rollouts) → [(i, j)], or one of the core; None: every pair of a prompt. Ties, pairs over two prompts and rollouts
        that cannot be scored are skipped, and the better rollout comes first, whatever is selected.
      beta: > 0, per nat; no coefficient of any KL. length_normalise: means of log-probs instead of sums.
    Returns: scalar; 0 with a gradient of 0 where no pair is left.
    """
    batch = stack_rollouts(rollouts)
    device = batch.rewards.device
    scored = batch.rewards.where(batch.lengths > 0, torch.nan)
    pairs = _core_selector(pair_selector, rollouts)(scored, batch.group_ids).to(device)
    losses = F.pairwise_loss(
        batch.logprobs_sampler, batch.response_mask, batch.rollout_ids, pairs, beta=beta, length_normalise=length_normalise
    )
    return losses.sum() / max(1, len(pairs))


def _core_selector(pair_selector: Callable[..., Any] | None, rollouts: Sequence[Rollout]) -> Callable[[Tensor, Tensor], Tensor]:
    """A pair_selector as the core takes it: (rewards [N], group_ids [N]) → [P, 2], the better rollout first, without ties."""
    if pair_selector is None or _asks_for(pair_selector, "rewards"):
        return pair_selector or F.all_pairs

    def selector(rewards: Tensor, group_ids: Tensor) -> Tensor:
        pairs = torch.tensor(list(pair_selector(rollouts)), dtype=torch.int64, device=rewards.device).reshape(-1, 2)
        chosen = torch.zeros(len(rewards), len(rewards), dtype=torch.bool, device=rewards.device)
        chosen[pairs[:, 0], pairs[:, 1]] = chosen[pairs[:, 1], pairs[:, 0]] = True
        comparable = F.all_pairs(rewards, group_ids)
        return comparable[chosen[comparable[:, 0], comparable[:, 1]]]

    return selector


# --------------------------------------------------------------------------------------------------------- configs


class TrainingConfig(NamedTuple):
    """An algorithm, its KL, and the numbers that a notebook sets beside them."""

    algorithm: Algorithm
    kl: KL = KL("none")
    learning_rate: float = 1e-4
    value_learning_rate: float = 1e-4  # of the critic
    max_grad_norm: float = 1.0
    group_size: int = 4  # samples a prompt


def create_grpo_config(
    *, clip_range: float = 0.2, kl_coef: float = 0.1, normalize_advantages: bool = True, **numbers: Any
) -> TrainingConfig:
    """GRPO: the group's mean as baseline, its standard deviation as scale, a clipped ratio, k3 in the loss.

    Args:
      clip_range: 0 < clip_range ≤ 1. kl_coef: ≥ 0, in units of reward per nat. normalize_advantages: False leaves the scale out.
      numbers: the other fields of TrainingConfig.
    """
    scale = F.normalize_group if normalize_advantages else F.no_normalization
    loss = partial(F.clipped, clip_low=clip_range, clip_high=clip_range)
    return TrainingConfig(_algorithm("grpo", policy_loss=loss, normalization=scale), _kl("k3", F.k3, kl_coef), **numbers)


def create_dapo_config(
    *,
    clip_range: float = 0.2,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    overlong_limit: int | None = None,
    normalize_advantages: bool = True,
    **numbers: Any,
) -> TrainingConfig:
    """DAPO of Yu et al. 2025, arXiv:2503.14476: two clip widths, a token mean, prompts with equal rewards left out, no KL.

    The notebooks' DAPO is `create_pairwise_config`. Further prompts in place of those left out are a part of `rlkit train`.

    Args:
      clip_range, clip_high: widths below and above 1. kl_coef: ≥ 0. overlong_limit: tokens of a rollout from which its reward is lower
        by 1, over the last fifth gradually; None: no penalty. normalize_advantages, numbers: as in `create_grpo_config`.
    """
    scale = F.normalize_group if normalize_advantages else F.no_normalization
    loss = partial(F.clipped, clip_low=clip_range, clip_high=clip_high)
    parts: dict[str, Any] = {"policy_loss": loss, "normalization": scale, "aggregation": F.token_mean, "group_filter": F.mixed_groups}
    if overlong_limit is not None:
        parts["overlong"] = partial(F.soft_penalty, limit=overlong_limit)
    return TrainingConfig(_algorithm("dapo", **parts), _kl("k3", F.k3, kl_coef), **numbers)


def create_pairwise_config(*, beta: float = 0.1, kl_coef: float = 0.1, length_normalise: bool = False, **numbers: Any) -> TrainingConfig:
    """The preference loss over pairs of a prompt, as an advantage with its gradient. The notebooks call it DAPO.

    Args:
      beta: > 0, per nat. kl_coef: ≥ 0; the mean KL of a sequence is taken off its reward. length_normalise: means of log-probs
        instead of sums. numbers: the other fields of TrainingConfig.
    """
    advantage = partial(F.pairwise, beta=beta, length_normalise=length_normalise)
    parts = {"advantage": advantage, "policy_loss": F.reinforce, "aggregation": partial(F.sequence_sum, constant=1.0)}
    return TrainingConfig(_algorithm("pairwise", **parts), _kl("k1", F.k1, kl_coef, "reward_sequence"), **numbers)


def create_ppo_config(
    *,
    clip_range: float = 0.2,
    kl_coef: float = 0.1,
    value_loss_coef: float = 0.5,
    value_clip_range: float | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    normalize_advantages: bool = True,
    epochs: int = 4,
    **numbers: Any,
) -> TrainingConfig:
    """PPO: GAE over steps with a value head on the policy's trunk, a clipped ratio, the mean KL of a sequence in its reward.

    Args:
      clip_range: 0 < clip_range ≤ 1. kl_coef: ≥ 0. value_loss_coef: weight of the value loss. value_clip_range: > 0; None: no clipping.
      gamma, lam: 0 … 1, per step of the episode. normalize_advantages: whitened over all tokens of the batch, not of a minibatch.
      epochs: passes over the rollouts of a step. numbers: other fields of TrainingConfig; learning_rate is 1e-5, group_size 1.
    """
    value_loss: Any = F.squared_error if value_clip_range is None else partial(F.clipped_squared_error, clip=value_clip_range)
    algorithm = _algorithm(
        "ppo",
        advantage=partial(F.turn_gae, gamma=gamma, lam=lam),
        normalization=F.whiten if normalize_advantages else F.no_normalization,
        policy_loss=partial(F.clipped, clip_low=clip_range, clip_high=clip_range),
        aggregation=F.token_mean,
        critic=Critic("head", value_loss, coef=value_loss_coef),
        epochs=epochs,
    )
    return TrainingConfig(algorithm, _kl("k1", F.k1, kl_coef, "reward_sequence"), **{"learning_rate": 1e-5, "group_size": 1} | numbers)


CONFIGS: Mapping[str, Callable[..., TrainingConfig]] = {
    "grpo": create_grpo_config,
    "dapo": create_dapo_config,
    "pairwise": create_pairwise_config,
    "ppo": create_ppo_config,
}


def create_switch_strategy(first: str = "grpo", second: str = "dapo", at: int = 50) -> Callable[[int], str]:
    """A switch_strategy, (iteration) → algorithm name: the first until step `at`, counted from 0, then the second."""
    return lambda iteration: first if iteration < at else second


def get_algorithm_config(
    iteration: int,
    switch_strategy: Callable[[int], str] | None = None,
    *,
    configs: Mapping[str, Callable[..., TrainingConfig]] = CONFIGS,
    **numbers: Any,
) -> TrainingConfig:
    """The config of an iteration. Numbers of the caller hold before and after a switch.

    Args:
      iteration: RL steps done. switch_strategy: (iteration) → name in `configs`; None: `create_switch_strategy()`.
      numbers: for the functions in `configs`; each gets those that it takes.
    Raises: ValueError for a name that is not in `configs`, TypeError for a number that none of them takes.

    >>> get_algorithm_config(49).algorithm.name, get_algorithm_config(50).algorithm.name
    ('grpo', 'dapo')
    """
    name = (switch_strategy or create_switch_strategy())(iteration)
    if name not in configs:
        raise ValueError(f"switch_strategy gave {name!r} at iteration {iteration}; choose one of {', '.join(configs)}")
    shared = dict.fromkeys({*TrainingConfig._fields} - {"algorithm", "kl"})
    taken = {key: {*_named(make), *_taken(make, shared)} for key, make in configs.items()}
    if odd := sorted({*numbers}.difference(*taken.values())):
        raise TypeError(f"no algorithm takes {', '.join(odd)}")
    return configs[name](**{key: value for key, value in numbers.items() if key in taken[name]})


def _algorithm(name: str, **parts: Any) -> Algorithm:
    """GRPO without clip and scale, but for `parts`."""
    common = {"advantage": F.group_mean, "ratio": F.token_ratio, "aggregation": F.sequence_mean, "group_filter": F.keep_all}
    return Algorithm(name, **common | parts)


def _with(algorithm: Algorithm, **parts: Any) -> Algorithm:
    return algorithm._replace(**parts)


def _kl(name: str, estimator: Any, coef: float, placement: Any = "loss") -> KL:
    return KL(name, estimator, placement, coef)


# -------------------------------------------------------------------------------------------------------- training


class TrainingState(NamedTuple):
    """Where a run stands: plain numbers, for the next iteration and for the checkpoint."""

    step: int = 0  # RL steps done
    total_tokens: int = 0  # of all rollouts, prompts included
    metrics: Mapping[str, float] = {}  # of the last step
    ema_metrics: Mapping[str, float] = {}


def update_ema_metrics(ema_metrics: Mapping[str, float], metrics: Mapping[str, float], decay: float = 0.9) -> dict[str, float]:
    """decay · average + (1 - decay) · value, by name. A new name starts at its value; a value that is not finite changes nothing.

    >>> update_ema_metrics({"loss": 1.0}, {"loss": 0.0, "reward": 2.0, "kl": float("nan")})
    {'loss': 0.9, 'reward': 2.0}
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {**ema_metrics, **{name: decay * ema_metrics.get(name, value) + (1 - decay) * value for name, value in finite.items()}}


def update_policy(
    model: nn.Module,
    rollouts: Sequence[Rollout],
    optimizer: torch.optim.Optimizer,
    config: TrainingConfig,
    *,
    ref_model: nn.Module | None = None,
    critic: nn.Module | None = None,
    advantage_fn: Callable[..., Tensor] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    kl_fn: Callable[..., Tensor] | None = None,
    pair_selector: Callable[..., Any] | None = None,
    normalize: bool = True,
    temperature: float = 1.0,
    micro_batch_tokens: int = 16384,
    seed: int = 0,
) -> dict[str, float]:
    """One RL step's updates on scored rollouts: old, reference and value passes, advantages, then every minibatch of every epoch.

    Args:
      model: in evaluation mode, so that no dropout parts sampler and trainer. rollouts: scored, by the model as it is.
      config: what is optimised. ref_model: needed by its KL. critic: needed by its advantage (`rlkit.models.critic`).
      advantage_fn: (rollouts, normalize) → [B, T] in place of the config's. loss_fn: (rollouts, advantages) → scalar in place of the
        policy loss, on a whole minibatch at once; the rollouts are those of `attach_logprobs`.
      kl_fn: in place of the config's estimator; one that gives [B] is subtracted from the reward: reward - coef · KL.
      pair_selector: of an algorithm of pairs. temperature: > 0, the sampler's. micro_batch_tokens: padded tokens at once, for the memory.
    Returns: loss, policy_loss, value_loss, kl (nats per token, before the update), kl_coef, grad_norm; nan for what there is none of.
    Raises: ValueError where a part of the config has no reference, critic or pairs to work on.
    """
    config = _hooked(config, rollouts, ref_model, critic, kl_fn, pair_selector)
    algorithm, kl = config.algorithm, config.kl
    sampled = assemble([_plain(r) for r in rollouts], pad_token_id=0, device=next(model.parameters()).device)
    batch = choose(sampled, algorithm)
    old = _score(model, batch, temperature, micro_batch_tokens, critic)
    batch = batch._replace(logprobs_old=old.logprobs, entropy_old=old.entropy, values=old.values)
    divergence = NAN
    if ref_model is not None:
        batch = batch._replace(logprobs_ref=_score(ref_model, batch, temperature, micro_batch_tokens).logprobs)
        given = quantities(batch) | {"logprobs": batch.logprobs_old}
        divergence = float(F.masked_mean(call(kl.estimator or F.k3, given), batch.response_mask))
    if advantage_fn is not None:
        positions, mask = _episodes(sampled)
        advantages = _per_token(advantage_fn(rollouts, normalize).to(mask.device), mask)
        batch = batch._replace(advantages=F.from_episodes(advantages, positions, mask, sampled.token_rewards))
        algorithm = _with(algorithm, advantage=_as_given, normalization=F.no_normalization)
    batch = estimate_advantages(scale_tokens(batch, algorithm), algorithm, kl)
    rows: list[dict[str, float]] = []
    for minibatch in minibatches(batch, algorithm, seed=seed):
        if _required(minibatch.advantages).any() or kl.in_loss or algorithm.critic.active or loss_fn is not None:
            optimizer.zero_grad()
            row = _accumulate(model, minibatch, algorithm, kl, rollouts, critic, loss_fn, temperature, micro_batch_tokens)
            rows.append(row | {"grad_norm": _step(optimizer, model, critic, config.max_grad_norm)})
    means = {name: fmean(row[name] for row in rows) if rows else NAN for name in ("loss", "policy_loss", "value_loss", "grad_norm")}
    return means | {"kl": divergence, "kl_coef": float(kl.coef) if kl.active else 0.0}  # type: ignore[arg-type]


def _accumulate(
    model: nn.Module,
    minibatch: Batch,
    algorithm: Algorithm,
    kl: KL,
    rollouts: Sequence[Rollout],
    critic: nn.Module | None,
    loss_fn: Callable[..., Tensor] | None,
    temperature: float,
    micro_batch_tokens: int,
) -> dict[str, float]:
    """The gradient of one update, over portions that only sum, and the losses."""
    totals = {"loss": 0.0, "policy_loss": 0.0, "value_loss": 0.0 if algorithm.critic.active else NAN}
    own = algorithm if loss_fn is None else _with(algorithm, policy_loss=_nothing)
    for rows in micro_batches(minibatch, micro_batch_tokens if loss_fn is None else 1 << 62):
        part = select(minibatch, rows)
        scores = score(
            model, part.ids, part.response_mask, temperature=temperature, critic=critic, entropy_gradient=bool(algorithm.entropy_coef)
        )
        loss, terms = surrogate(part, scores, own, kl)
        policy_loss = (_required(part.weights) * F.fill_masked(terms["policy_loss"], part.response_mask, 0.0)).sum()
        if loss_fn is not None:
            policy_loss = loss_fn(*_hook_inputs(part, scores.logprobs, rollouts))
            loss = loss + policy_loss
        if algorithm.critic.active:
            value_loss, _ = value_surrogate(part, scores, algorithm.critic)
            totals["value_loss"] += float(value_loss.detach()) / algorithm.critic.coef
            loss = loss + value_loss
        loss.backward()
        totals["loss"] += float(loss.detach())
        totals["policy_loss"] += float(policy_loss.detach())
    return totals


def _hook_inputs(part: Batch, logprobs: Tensor, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], Tensor]:
    """What a loss_fn gets: the rollouts that are trained on, with their log-probs, and their advantages [B, T]."""
    positions, mask = _episodes(part)
    trained = mask.any(1)
    chosen = [r if kept else r._replace(steps=()) for r, kept in zip(rollouts, trained.tolist(), strict=True)]
    attached = [r for r in _attach(chosen, part, logprobs, _required(part.logprobs_old)) if r.steps]
    return attached, F.to_episodes(_required(part.advantages), positions, mask)[trained]


def _step(optimizer: torch.optim.Optimizer, model: nn.Module, critic: nn.Module | None, max_grad_norm: float) -> float:
    """One optimiser step with the gradients of policy and critic clipped apart; none where one is not finite. The policy's norm."""
    norms = [nn.utils.clip_grad_norm_(m.parameters(), max_grad_norm) for m in (model, critic) if m is not None]
    if all(map(math.isfinite, norms)):
        optimizer.step()
    return float(norms[0])


@torch.no_grad()
def _score(model: nn.Module, batch: Batch, temperature: float, micro_batch_tokens: int, critic: nn.Module | None = None) -> Scores:
    """Scores [B, T] of a batch, one micro-batch at a time."""
    zeros = torch.zeros_like(batch.logprobs_sampler)
    out = Scores(zeros, zeros.clone(), None if critic is None else zeros.clone())
    for rows in micro_batches(batch, micro_batch_tokens):
        part = select(batch, rows)
        scores = score(model, part.ids, part.response_mask, temperature=temperature, critic=critic)
        for kept, found in zip(out, scores, strict=True):
            if kept is not None and found is not None:
                kept[rows, : part.ids.shape[1]] = found.to(kept.dtype)
    return out


def _hooked(
    config: TrainingConfig,
    rollouts: Sequence[Rollout],
    ref_model: nn.Module | None,
    critic: nn.Module | None,
    kl_fn: Callable[..., Tensor] | None,
    pair_selector: Callable[..., Any] | None,
) -> TrainingConfig:
    """The config with the hooks in it; refuses what would silently do nothing."""
    algorithm, kl = config.algorithm, config.kl
    if algorithm.target_kl is not None or algorithm.max_refills or algorithm.critic.warmup:
        raise ValueError(f"'{algorithm.name}' has target_kl, max_refills or critic.warmup, which only `rlkit train` knows; leave them out")
    if kl_fn is not None:
        if not kl.coef:
            raise ValueError(f"kl_fn is given, and the coefficient of the KL in '{algorithm.name}' is 0; set kl_coef")
        core = _asks_for(kl_fn, "logprobs")
        kl = kl._replace(estimator=kl_fn) if core else kl._replace(estimator=_per_rollout(kl_fn), placement="reward_sequence")
    if kl.active and ref_model is None:
        raise ValueError(f"kl_coef={kl.coef} needs a ref_model: create_reference_model(model), or set kl_coef=0")
    if algorithm.critic.active and critic is None:
        raise ValueError(f"'{algorithm.name}' needs a critic: rlkit.models.critic.make_critic(model, model='head')")
    if pair_selector is not None:
        if not _takes_pairs(config):
            raise ValueError(f"pair_selector is given, and '{algorithm.name}' compares no pairs; use create_pairwise_config()")
        selector = _core_selector(pair_selector, rollouts)
        advantage: Any = algorithm.advantage
        algorithm = _with(algorithm, advantage=partial(advantage, pair_selector=selector))
    return config._replace(algorithm=algorithm, kl=kl)


def _takes_pairs(config: TrainingConfig) -> bool:
    return "pair_selector" in _named(config.algorithm.advantage)


def _per_rollout(kl_fn: KLHook) -> Callable[..., Tensor]:
    """A kl_fn as an estimator of the core: each rollout's number on all of its tokens."""

    def estimator(logprobs: Tensor, logprobs_ref: Tensor, response_mask: Tensor, rollout_ids: Tensor, step_ids: Tensor) -> Tensor:
        positions, mask = F.episode_positions(rollout_ids, step_ids, response_mask)
        policy, ref = (F.to_episodes(x, positions, mask) for x in (logprobs, logprobs_ref))
        return compute_kl(policy, ref, mask, kl_fn)[rollout_ids][:, None].expand(response_mask.shape)

    return estimator


def _as_given(advantages: Tensor) -> Tensor:
    return advantages


def _nothing(ratio: Tensor) -> Tensor:
    return torch.zeros_like(ratio)


def training_iteration(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    optimizer: torch.optim.Optimizer,
    state: TrainingState = TrainingState(),  # noqa: B008  (immutable)
    *,
    reward_fn: Callable[..., Any] | Reward,
    config: TrainingConfig | None = None,
    ref_model: nn.Module | None = None,
    ref_update_fn: UpdateHook | None = None,
    environment: Environment | Callable[[Task], Environment] | None = None,
    generate: Any = sample,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    seed: int = 0,
    **hooks: Any,
) -> tuple[TrainingState, list[Rollout]]:
    """One RL step: rollouts, rewards, updates, then the reference.

    Args:
      model, tokenizer: a causal LM in evaluation mode (also under PEFT), and its fast tokenizer with a chat template.
      prompts: texts, message lists or Tasks, each a group of `config.group_size` rollouts.
      optimizer: over the model's parameters, and over the critic's.
      state: of the iteration before. reward_fn: (rollout) → number or None, also `@batched`, or a Reward of several terms.
      config: None is `create_grpo_config()`. ref_model: needed where its KL is on.
      ref_update_fn: (ref_model, policy_model, step, kl) → None after the updates; two arguments do. step counts from 1.
      environment: None is one reply to each prompt. generate: the engine. temperature: ≥ 0; 0 is greedy.
      hooks: for `update_policy`: advantage_fn, loss_fn, kl_fn, pair_selector, critic, normalize, micro_batch_tokens.
    Returns: the next state and the scored rollouts. Its metrics: reward (raw, mean), kl and kl_coef apart, the losses, tokens.
    """
    if ref_update_fn is not None and ref_model is None:
        raise ValueError("ref_update_fn has no ref_model to move; give one, such as create_reference_model(model)")
    config = config or create_grpo_config()
    rollouts = collect(
        make_policy(model, tokenizer),
        [_as_task(prompt, i) for i, prompt in enumerate(prompts)],
        generate=generate,
        environment=environment or single_turn(),
        group_size=config.group_size,
        seed=seed,
        step=state.step,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
    )
    reward = reward_fn if isinstance(reward_fn, Reward) else Reward("reward_fn", {"reward_fn": Term(1.0, reward_fn)}, weighted_sum)
    rollouts = score_rollouts(rollouts, reward)
    settings: dict[str, Any] = {"ref_model": ref_model, "temperature": temperature or 1.0, "seed": F.mix(seed, state.step)}
    metrics = update_policy(model, rollouts, optimizer, config, **settings | hooks)
    step = state.step + 1
    if ref_update_fn is not None and ref_model is not None:
        update_reference_model(ref_model, model, ref_update_fn, step=step, kl=metrics["kl"])
    scores = [r.reward for r in rollouts if r.reward is not None]
    tokens = sum(len(s.prompt_ids) + len(s.response_ids) for r in rollouts for s in r.steps)
    metrics = {"reward": fmean(scores) if scores else NAN, **metrics, "tokens": float(tokens)}
    return TrainingState(step, state.total_tokens + tokens, metrics, update_ema_metrics(state.ema_metrics, metrics)), rollouts


def train_model(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    reward_fn: Callable[..., Any] | Reward,
    *,
    steps: int = 100,
    batch_size: int = 4,
    max_new_tokens: int = 256,
    save_every: int = 50,
    output_dir: str | Path | None = None,
    config: TrainingConfig | None = None,
    switch_strategy: Callable[[int], str] | None = None,
    numbers: Mapping[str, Any] = {},
    ref_model_fn: Callable[[nn.Module], nn.Module] | None = create_reference_model,
    checkpoint_fn: Callable[[nn.Module, Any, int, str], None] | None = None,
    state: TrainingState = TrainingState(),  # noqa: B008  (immutable)
    progress: Callable[[str], None] | None = print,
    seed: int = 0,
    **hooks: Any,
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Trains a model from a notebook, with AdamW. Runs that log, evaluate and resume bit for bit are those of `rlkit train`.

    Args:
      prompts: all of them; every step draws the next `batch_size` of an order that the seed fixes.
      steps: RL steps until the end, those of `state` included. save_every: steps between checkpoints; the last step is saved too.
      output_dir: where checkpoints go; None writes none.
      config: of every step. Without one: `get_algorithm_config(step, switch_strategy, **numbers)`, GRPO where there is no strategy.
      ref_model_fn: (policy_model) → reference, called once where a KL needs it or a ref_update_fn moves it.
      checkpoint_fn: (model, tokenizer, step, output_dir) → None in place of `save_checkpoint`.
      state: of `load_checkpoint`, to go on.
      progress: gets a line a step: loss and reward as moving averages, and the tokens so far. None is silent.
      hooks: for `training_iteration` and `update_policy`; kl_fn and pair_selector act while the algorithm has a KL, or pairs.
    Returns: the model, and a row of metrics a step: step, algorithm, reward, kl, kl_coef, loss, policy_loss, value_loss, grad_norm, tokens.
    Raises: ValueError where both a config and a strategy or numbers are given.
    """
    if config is not None and (switch_strategy is not None or numbers):
        raise ValueError("give a config, or a switch_strategy and numbers, not both: a config holds for every step")
    tasks = [_as_task(prompt, i) for i, prompt in enumerate(prompts)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": trained}], lr=1e-4, weight_decay=0.0)
    ref_model: nn.Module | None = None
    critic: nn.Module | None = None
    statistics: list[dict[str, Any]] = []
    was_training = model.training
    model.eval()  # no dropout: sampler and trainer are to see one policy
    try:
        for step in range(state.step, steps):
            now = config or get_algorithm_config(step, switch_strategy or create_switch_strategy("grpo", "grpo"), **numbers)
            if ref_model is None and ref_model_fn is not None and (now.kl.active or hooks.get("ref_update_fn")):
                ref_model = ref_model_fn(model)
            if critic is None and now.algorithm.critic.active:
                critic = make_critic(model, model=now.algorithm.critic.model, trunk_gradient=now.algorithm.critic.trunk_gradient)
                optimizer.add_param_group({"params": list(critic.parameters())})
            for group, rate in zip(optimizer.param_groups, (now.learning_rate, now.value_learning_rate), strict=False):
                group["lr"] = rate
            idle = {"kl_fn": not now.kl.coef, "pair_selector": not _takes_pairs(now)} if switch_strategy else {}
            settings: dict[str, Any] = {"config": now, "ref_model": ref_model, "max_new_tokens": max_new_tokens, "seed": seed}
            settings |= {"critic": critic if now.algorithm.critic.active else None}
            settings |= {name: hook for name, hook in hooks.items() if not idle.get(name)}
            drawn, _ = take(tasks, StreamState(*divmod(step * batch_size, max(1, len(tasks)))), batch_size, seed=seed)
            state, _ = training_iteration(model, tokenizer, drawn, optimizer, state, reward_fn=reward_fn, **settings)
            statistics.append({"step": state.step, "algorithm": now.algorithm.name, **state.metrics})
            if progress is not None:
                progress(_progress_line(state, steps))
            if output_dir is not None and (state.step % save_every == 0 or state.step == steps):
                save = checkpoint_fn or partial(save_checkpoint, state=state)
                save(model, tokenizer, state.step, str(output_dir))
    finally:
        model.train(was_training)
    return model, statistics


def _progress_line(state: TrainingState, steps: int) -> str:
    ema = state.ema_metrics
    return f"step {state.step}/{steps}  loss {ema.get('loss', NAN):.4f}  reward {ema.get('reward', NAN):.3f}  tokens {state.total_tokens:,}"


def _as_task(prompt: Prompt, index: int) -> Task:
    if isinstance(prompt, Task):
        return prompt
    messages: tuple[Message, ...] = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    return Task(id=f"prompt_{index}", messages=messages)


# ------------------------------------------------------------------------------------------ checkpoints and curves


class Checkpoint(NamedTuple):
    """What `load_checkpoint` gives: all of it goes into `train_model`."""

    model: nn.Module
    tokenizer: Any
    state: TrainingState


def save_checkpoint(model: Any, tokenizer: Any, step: int, output_dir: str | Path, *, state: TrainingState | None = None) -> None:
    """Writes output_dir/step_NNNNNN: model and tokenizer in the format of Hugging Face, and the state. Whole, or not there.

    Under PEFT the adapters alone are written. Optimiser moments, critic and reference are not in it.
    """
    folder = Path(output_dir) / f"step_{step:06d}"
    part = folder.with_name(folder.name + ".tmp")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    write_json(part / "training_state.json", (state or TrainingState(step))._asdict())
    os.replace(part, folder)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Model, tokenizer and state of a folder of `save_checkpoint`, or of the newest one in an output_dir. Raises DataError."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(path)
    folder = path if (path / "training_state.json").exists() else max(path.glob("step_??????"), default=None)
    if folder is None:
        raise DataError(f"{path}: no checkpoint of save_checkpoint is there")
    if (folder / "adapter_config.json").exists():
        from peft import AutoPeftModelForCausalLM

        model = AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    saved = json.loads((folder / "training_state.json").read_text())
    saved["metrics"] = {name: NAN if value is None else value for name, value in saved["metrics"].items()}  # JSON knows no nan
    return Checkpoint(model, AutoTokenizer.from_pretrained(folder), TrainingState(**saved))


def plot_training(statistics: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Reward, policy loss and value loss over the steps, side by side, as a picture; its format is that of the path's ending."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3), ("reward", "policy_loss", "value_loss"), strict=True):
        axes.plot([row["step"] for row in statistics], [row[name] for row in statistics])
        axes.set(xlabel="RL step", title=name.replace("_", " "))
    figure.savefig(path)


# --------------------------------------------------------------------------------------------------------- rewards


def compute_scalar_reward(rollout: Rollout, reward_fn: Callable[..., Any]) -> float | None:
    """What a reward function gives a rollout; None: it cannot be scored, which is not 0. Raises RewardError where it fails."""
    return compute_vector_reward(rollout, {"reward": reward_fn})["reward"]


def compute_vector_reward(rollout: Rollout, reward_fns: Mapping[str, Callable[..., Any]]) -> dict[str, float | None]:
    """One number a component, in order: to be logged as it is, and aggregated before anything is trained on it.

    Args:
      reward_fns: name → (rollout) → number or None, also async or `@batched`.
    Raises: RewardError naming the component that raises or returns no reward.
    """
    terms = {name: Term(1.0, fn) for name, fn in reward_fns.items()}
    return dict(score_rollouts([rollout], Reward("vector", terms))[0].rewards)


def aggregate_vector_rewards(
    rewards: Mapping[str, float | None],
    weights: Mapping[str, float] | None = None,
    aggregator: Callable[[Mapping[str, float], Mapping[str, float]], float] = weighted_sum,
) -> float | None:
    """The components as one number: the only one that reaches a token.

    Args:
      weights: name → factor; None: 1 each. One that is missing is 0, so the component is only logged.
      aggregator: weighted_sum, smallest, largest, mean, product, or (scores, weights) → float.
    Returns: None where a component of non-zero weight is None.

    >>> aggregate_vector_rewards({"correctness": 1.0, "safety": 0.5}, {"correctness": 0.5, "safety": 0.5})
    0.75
    """
    factors = {name: weight for name in rewards if (weight := 1.0 if weights is None else weights.get(name, 0.0))}
    scores = {name: value for name in factors if (value := rewards[name]) is not None}
    return aggregator(scores, factors) if len(scores) == len(factors) > 0 else None


def length_penalty(rollout: Rollout, min_words: int = 50, max_words: int = 500) -> float:
    """-0.5 for a final reply of fewer words, -0.3 for one of more, else 0; thinking is not counted. `length` has the other numbers."""
    return length(rollout, low=min_words, high=max_words)


def format_reward(pattern: str) -> Callable[[Rollout], float | None]:
    """A reward: 1 where the final reply holds the regular expression, else 0. Raises ConfigError, on use, for one that is none."""
    return partial(format_match, pattern=pattern)


def exact_match_reward(
    ground_truth_fn: Callable[[Rollout], str], parse_fn: Callable[[str], Any] = str.strip
) -> Callable[[Rollout], float | None]:
    """A reward: 1 where the final reply equals the truth after a parse, else 0; None for an empty truth. Equality, not a part of it.

    Args:
      ground_truth_fn: (rollout) → truth. parse_fn: of both texts; None from it: there is nothing to compare.
    """

    def reward(rollout: Rollout) -> float | None:
        return exact_match(rollout._replace(task=rollout.task._replace(answer=ground_truth_fn(rollout))), parse=parse_fn)

    return reward


def tool_usage_reward(min_tools: int = 1) -> Callable[[Rollout], float]:
    """A reward: 1 where at least `min_tools` tool calls worked, else 0. Failed calls are no use."""
    return partial(tool_usage, low=min_tools, high=None)


def tool_band_reward(low: int = 1, high: int = 3) -> Callable[[Rollout], float]:
    """A reward: 0 for fewer tool calls that worked, 1 for low … high, 0.5 for more."""
    return partial(tool_usage, low=low, high=high)


# --------------------------------------------------------------------------------------------------------- helpers


def _asks_for(function: Callable[..., Any], quantity: str) -> bool:
    """Whether a function is one of the core: all that it asks for are quantities, this one among them."""
    asked = inputs(function)
    return quantity in asked and set(asked) <= set(QUANTITIES)


def _named(function: Callable[..., Any]) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds}


def _taken(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keywords that a function takes."""
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        return dict(keywords)
    return {name: value for name, value in keywords.items() if name in _named(function)}


def _same_shape(**tensors: Tensor) -> None:
    if len({t.shape for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"shapes differ: {shapes}; nothing is broadcast")


def _mask_like(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    _same_shape(values=values, mask=mask)
    return mask.to(values.device).bool()


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return F.rollout_mean(values, mask, torch.arange(len(mask), device=mask.device))[:, 0]


def _per_token(advantages: Tensor, like: Tensor) -> Tensor:
    """[B] or [B, T] → [B, T] on the device of `like`, a constant."""
    advantages = advantages.detach().to(like.device)
    if advantages.shape == like.shape[:1]:
        advantages = advantages[:, None].expand(like.shape)
    _same_shape(advantages=advantages, tokens=like)
    return advantages


def _reduce(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens that count; 0 with a gradient where there is none."""
    return (F.token_mean(mask) * F.fill_masked(per_token, mask, 0.0)).sum()


def _required(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
