"""Turn the hooks of an iteration into parts of the core's algorithm and KL."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import rlkit.functional as F
from rlkit.algorithm import KL, Algorithm
from rlkit.errors import Refusal
from rlkit.extras.notebook.algorithms import selected
from rlkit.extras.notebook.configs import make_core
from rlkit.extras.notebook.data import Hook, Rollout, TrainingConfig
from rlkit.extras.notebook.kl import compute_kl, is_estimator
from rlkit.extras.notebook.views import view
from rlkit.training.learner import Learner


def with_hooks(
    learner: Any,
    config: TrainingConfig,
    advantage_fn: Hook = None,
    loss_fn: Hook = None,
    kl_fn: Hook = None,
    pair_selector: Hook = None,
) -> tuple[Algorithm, KL]:
    """Make the Algorithm and the KL of a config, with the hooks in them. The hooks receive the
    learner's episodes. If a kl_fn returns [B], its result is subtracted from the rewards."""
    algorithm, kl = make_core(config)
    if kl_fn is not None:
        if not kl.coef:
            raise ValueError(
                f"kl_fn is given, and the coefficient of the KL in '{algorithm.name}' is 0; set"
                " kl_coef"
            )
        rewarded = kl._replace(estimator=_per_rollout(kl_fn), placement="reward_sequence")
        kl = kl._replace(estimator=kl_fn) if is_estimator(kl_fn) else rewarded
    if pair_selector is not None:
        if "pair_selector" not in inspect.signature(algorithm.advantage).parameters:
            raise ValueError(
                f"pair_selector is given, and '{algorithm.name}' compares no pairs; use"
                " create_dapo_config()"
            )

        def selector(rewards: Tensor, group_ids: Tensor) -> Tensor:
            return selected(pair_selector, _views(learner))(rewards, group_ids)

        algorithm = algorithm._replace(
            advantage=partial(algorithm.advantage, pair_selector=selector)
        )
    if advantage_fn is not None:
        own = _advantage(learner, advantage_fn, config.normalize_advantages)
        algorithm = algorithm._replace(advantage=own, normalization=F.no_normalization)
    return (
        algorithm
        if loss_fn is None
        else algorithm._replace(policy_loss=_policy_loss(learner, loss_fn))
    ), kl


def _views(learner: Learner) -> list[Rollout]:
    return [view(episode, whole=True) for episode in learner.trained]


def _per_rollout(kl_fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make an estimator from a kl_fn with a result [B]. Each rollout's number is put on all of its
    tokens."""

    def estimator(
        logprobs: Tensor,
        logprobs_ref: Tensor,
        response_mask: Tensor,
        rollout_ids: Tensor,
        step_ids: Tensor,
    ) -> Tensor:
        positions, mask = F.episode_positions(rollout_ids, step_ids, response_mask)
        policy, ref = (F.to_episodes(x, positions, mask) for x in (logprobs, logprobs_ref))
        return compute_kl(policy, ref, mask, kl_fn)[rollout_ids][:, None].expand(
            response_mask.shape
        )

    return estimator


def _advantage(learner: Learner, advantage_fn: Callable[..., Tensor], normalize: bool) -> Any:
    """Make an advantage of the core from an advantage_fn of rollouts."""

    def advantage(
        rewards: Tensor,
        rollout_ids: Tensor,
        step_ids: Tensor,
        sampled_mask: Tensor,
        logprobs_sampler: Tensor,
    ) -> Tensor:
        positions, mask = _episodes(rollout_ids, step_ids, sampled_mask, len(rewards))
        given = advantage_fn(_views(learner), normalize).detach().float().to(mask.device)
        if given.shape != mask.shape:
            raise ValueError(
                f"advantage_fn gave shape {tuple(given.shape)}; it must be [B, T] ="
                f" {tuple(mask.shape)}"
            )
        return F.from_episodes(given, positions, mask, logprobs_sampler)

    return advantage


def _policy_loss(learner: Learner, loss_fn: Callable[..., Tensor]) -> Any:
    """Turn a loss_fn with one number for a whole minibatch into a loss per token. The weighted sum
    over the tokens is this number."""

    def policy_loss(
        logprobs: Tensor,
        logprobs_old: Tensor,
        rollout_ids: Tensor,
        step_ids: Tensor,
        response_mask: Tensor,
        weights: Tensor,
        scale: Tensor,
    ) -> Tensor:
        whole = learner.micro.minibatch
        n = len(learner.trained)
        assert whole is not None
        positions, mask = _episodes(rollout_ids, step_ids, response_mask, n)
        every, full = _episodes(whole.rollout_ids, whole.step_ids, whole.response_mask, n)
        if not torch.equal(mask.any(1), full.any(1)):
            raise Refusal(
                "memory ran out, and a loss_fn needs its whole minibatch at once: give fewer or"
                " shorter rollouts"
            )
        new, old = (F.to_episodes(x, positions, mask) for x in (logprobs, logprobs_old))
        rollouts = []
        for episode, row, before, length in zip(
            learner.trained, new, old, mask.sum(1).tolist(), strict=True
        ):
            if length:  # the rollout is in this minibatch
                rollout = view(episode, logprobs=row[:length], whole=True)
                rollouts.append(
                    rollout._replace(metadata={**rollout.metadata, "old_logprobs": before[:length]})
                )
        loss = loss_fn(rollouts, F.to_episodes(whole.advantages, every, full)[full.any(1)])
        share = F.fill_masked(weights * scale, response_mask, 0.0).sum()
        return (loss / share if share else 0.0 * loss).expand(response_mask.shape)

    return policy_loss


def _episodes(rollout_ids: Tensor, step_ids: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return positions and mask [n, T] of each rollout's sampled tokens, also if the last rollouts
    have no sampled token."""
    positions, own = F.episode_positions(rollout_ids, step_ids, mask)
    padding = (0, 0, 0, n - len(own))
    return nn.functional.pad(positions, padding), nn.functional.pad(own, padding)
