"""Compute the factors on each token's loss: advantages, off-policy corrections and token
filters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import KL, Algorithm, asks_for, call, call_part, require_number, require_value
from rlkit.errors import PartError, name_function
from rlkit.training.update.record import Update
from rlkit.training.update.sampled import mark_last_tokens
from rlkit.training.update.signal import has_signal
from rlkit.types import Batch, Estimate, Scored, Weighted


def weigh(batch: Scored, algorithm: Algorithm, kl: KL = KL("none")) -> Weighted:  # noqa: B008  (immutable)
    """Add advantages [B, T] and the factor on each token's policy loss to the batch. If there is a
    critic, also add returns. The factor is zero outside the response mask.

    Advantages are estimated, then normalised. With a KL in the reward, each token's advantage is
    then lowered by the KL of this token and of all later ones. There are two exceptions. If the
    advantage asks for `token_rewards`, the KL is deducted from these rewards instead. With
    `kl.in_baseline`, the KL is deducted from the rewards of all rollouts before any kind of
    advantage is estimated. Untrained rollouts are included, because their rewards count in the
    baseline too.

    The factor is `off-policy correction × token filter`. Both functions may ask for advantages.
    Everything is computed once over the whole batch of the step, without gradient.

    Raises: PartError if the advantage has neither shape [N] nor [B, T], or if there is a critic and
      the advantage returns no returns for it.
    """
    with torch.no_grad():
        penalty = penalize(batch, kl)
        batch = replace(
            batch,
            token_rewards=F.fill_masked(batch.token_rewards - penalty, batch.response_mask, 0.0),
        )
        if kl.in_baseline:
            of_rollouts = F.segment_sum(
                penalize(batch.whole(), kl), batch.rollout_ids, n=len(batch.rewards)
            )
            batch = replace(batch, rewards=batch.rewards - of_rollouts)
        given = batch.quantities
        advantages, returns, measured = _estimate(batch, algorithm, given)
        if (
            kl.in_reward
            and not kl.in_baseline
            and not asks_for(algorithm.advantage, "token_rewards")
        ):
            # a rollout without a reward has no advantage, even if it has a KL
            later = F.fill_masked(_reward_to_go(penalty, batch), _mark_scored(batch), 0.0)
            advantages = advantages - later
        given |= {"advantages": advantages}
        if returns is not None:
            given |= {"returns": returns}
        rank = None
        if asks_for(algorithm.policy_loss, "covariance_rank"):
            rank = given["covariance_rank"] = call(F.covariance_rank, given)
        scale, scaled = _scale(batch, algorithm, given)
        return Weighted(
            **vars(batch) | {"metrics": {**batch.metrics, **measured, **scaled}},
            advantages=advantages,
            returns=returns,
            covariance_rank=rank,
            scale=scale,
        )


def _estimate(
    batch: Scored, algorithm: Algorithm, given: dict[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Return normalised advantages [B, T], returns [B, T] or None, and the metrics of the advantage
    function and of the normalisation."""
    estimate, measured = call_part("advantage", algorithm.advantage, given)
    advantages, returns = estimate if isinstance(estimate, Estimate) else (estimate, None)
    if algorithm.critic.active and returns is None:
        who = f"algorithm.advantage ({name_function(algorithm.advantage)})"
        raise PartError(
            f"{who}: gave no returns, and the critic needs them; return"
            " rlkit.types.Estimate(advantages, returns)"
        )
    if advantages.dim() == 1:
        advantages = advantages[batch.rollout_ids][:, None].expand_as(batch.ids)
    # an unscored rollout gives the policy nothing, and the critic its own value before the updates
    scored = _mark_scored(batch)
    of_advantages = {"advantages": F.fill_masked(advantages, scored, 0.0)}
    advantages, normalized = call_part(
        "normalization", algorithm.normalization, given | of_advantages
    )
    if returns is not None:
        known = torch.where(scored, returns, require_value(batch.values, "values"))
        returns = F.fill_masked(known, batch.response_mask, 0.0)
    return F.fill_masked(advantages, scored, 0.0), returns, measured | normalized


def _mark_scored(batch: Batch) -> Tensor:
    """Return a mask [B, T] with True on the trained tokens of rollouts with a reward."""
    return batch.response_mask & ~batch.rewards.isnan()[batch.rollout_ids][:, None]


def _scale(
    batch: Scored, algorithm: Algorithm, given: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `off-policy correction × token filter`, [B, T], and the metrics of both functions. If
    `batch.old_share` is set, the old policy lies between sampling policy and current policy, and
    moves with every update. In this case `surrogate` computes the correction in each update, and
    here the correction is 1."""
    factor: Any = 1.0
    corrected: dict[str, Tensor] = {}
    if batch.old_share is None:
        factor, corrected = call_part("correction", algorithm.correction, given)
    kept, filtered = call_part("token_filter", algorithm.token_filter, given)
    return F.fill_masked(factor * kept, batch.response_mask, 0.0), corrected | filtered


def penalize(batch: Scored, kl: KL) -> Tensor:
    """Return the KL penalty on the reward of each token [B, T], for the policy before the update.
    The penalty is zero everywhere if the KL is not in the reward."""
    if not kl.in_reward:
        return torch.zeros_like(batch.token_rewards)
    mask = batch.response_mask
    given = batch.quantities
    given["logprobs"] = given["logprobs_old"] = F.fill_masked(
        require_value(batch.logprobs_old, "logprobs_old"), mask, 0.0
    )
    given["logprobs_ref"] = F.fill_masked(
        require_value(batch.logprobs_ref, "logprobs_ref"), mask, 0.0
    )
    divergence = F.fill_masked(
        call_part("kl_estimator", require_value(kl.estimator, "estimator"), given)[0], mask, 0.0
    )
    if kl.placement == "reward_sequence":
        divergence = F.rollout_mean(divergence, mask, batch.rollout_ids) * mark_last_tokens(batch)
    return require_number(kl.coef) * divergence.to(batch.token_rewards.dtype)


def _reward_to_go(values: Tensor, batch: Batch) -> Tensor:
    """For each token, sum its value and the values of all later trained tokens in the same rollout,
    [B, T]. Tokens of tools and users do not count."""
    positions, mask = F.episode_positions(batch.rollout_ids, batch.step_ids, batch.response_mask)
    later = F.to_episodes(values, positions, mask).flip(1).cumsum(1).flip(1)
    return F.from_episodes(later, positions, mask, values)


def set_known_old(u: Update, batch: Weighted) -> Weighted:
    """Fill in the old policy's log-probs if every update of the step will be skipped. In this case
    no update computes these log-probs, and the reference's log-probs take their place.

    Old policy and reference have equal log-probs here: with the KL in the loss, an update is
    skipped only as long as the reference equals the policy. In all other cases the batch is
    returned unchanged.
    """
    open_ = u.x.kl.in_loss and batch.logprobs_old is None and batch.old_share is None
    if not open_ or u.x.algorithm.active_streams or has_signal(u, batch):
        return batch
    return replace(batch, logprobs_old=batch.logprobs_ref)
