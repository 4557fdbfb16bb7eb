"""Turn rollouts into the batch of a step: choose the trained rollouts, and mark observed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import Algorithm, Stream, call_part
from rlkit.episodes._assemble import split_into_rows as rows_of
from rlkit.models.chat import Renderer, encode_text
from rlkit.rewards import Moments
from rlkit.training.update.record import Update
from rlkit.training.update.split import Rows
from rlkit.types import Batch, Rollout


def make_sampled_batch(u: Update) -> Batch:
    """Return the batch made from the rollouts in `u.trained`. If there are moments, its rewards are
    normalised by them."""
    a = u.x.algorithm
    given = batch = u.assemble_batch(u.trained)
    if u.moments is not None:
        batch = normalise_rewards(given, u.moments)
    batch = filter_rollouts(batch, a, given)
    batch = select_parts(batch, u.trained, a.streams.get("reward", Stream()))
    if any(stream.mask == "observations" for stream in a.active_streams.values()):
        batch = mark_observed(batch, u.trained, u.policy.renderer)
    return batch


def filter_rollouts(batch: Rows, algorithm: Algorithm, raw: Batch | None = None) -> Rows:
    """Choose the rollouts to train on, and compute the rewards for the advantage.

    The group filter reads the rewards before the overlong rule, which may change rewards and leave
    rollouts out. A change of a reward also changes the token reward at the rollout's last sampled
    token. The tokens of a rollout that is left out are removed from `response_mask`. These tokens
    stay in `sampled_mask`, and the rollout's reward still counts in baselines.

    Args:
      raw: the batch without normalised rewards, for the group filter. A refill knows only these
        rewards. None: `batch`.
    """
    with torch.no_grad():
        given = (raw or batch).quantities
        kept, filtered = call_part("group_filter", algorithm.group_filter, given)
        (rewards, trained), shortened = call_part("overlong", algorithm.overlong, batch.quantities)
        shaped = (rewards - batch.rewards).nan_to_num(0.0)[batch.rollout_ids][:, None]
        return replace(
            batch,
            rewards=rewards,
            token_rewards=batch.token_rewards + shaped * mark_last_tokens(batch),
            response_mask=batch.response_mask & (kept & trained)[batch.rollout_ids][:, None],
            metrics=filtered | shortened,
        )


def normalise_rewards(batch: Batch, moments: Moments) -> Batch:
    """Return the batch with total rewards (R − mean) / (std + 1e-8). R is an episode's total
    reward, and mean and std are over all episodes of the run so far. The rewards of steps are only
    divided by (std + 1e-8). The mean is subtracted once per episode, at its last sampled token.
    Where all rewards so far are equal (std below 1e-6) nothing is divided. Unscored rollouts are
    not changed.
    """
    scale = 1.0 / (moments.std + 1e-8) if moments.std > 1e-6 else 1.0
    scored = ~batch.rewards.isnan()[batch.rollout_ids][:, None]
    shifted = batch.token_rewards - moments.mean * mark_last_tokens(batch)
    return replace(
        batch,
        rewards=(batch.rewards - moments.mean) * scale,
        token_rewards=torch.where(scored, shifted * scale, batch.token_rewards),
    )


def mark_last_tokens(batch: Batch) -> Tensor:
    """Return a mask [B, T] with True at the last sampled token of each rollout."""
    positions, mask = F.episode_positions(batch.rollout_ids, batch.step_ids, batch.response_mask)
    last = mask & (torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1)
    return F.from_episodes(last, positions, mask, batch.response_mask)


def select_parts(batch: Rows, rollouts: Sequence[Rollout], stream: Stream) -> Rows:
    """Train only on rollouts from the parts of the mixture that a stream names."""
    if stream.parts is None:
        return batch
    parts = [rollouts[i].task.part for i in batch.rollout_ids.tolist()]
    return select_rows(batch, [stream.of(part) for part in parts])


def select_rows(batch: Rows, rows: Sequence[bool]) -> Rows:
    """Train only on these rows: remove the tokens of all other rows from response_mask.

    Args:
      rows: for each row, whether it is kept.
    """
    chosen = torch.tensor(rows, device=batch.ids.device)
    return replace(batch, response_mask=batch.response_mask & chosen[:, None])


def mark_observed(batch: Batch, rollouts: Sequence[Rollout], renderer: Renderer) -> Batch:
    """Add `observed_mask` to the batch. The mask marks the tokens of tools' answers, without the
    tokens that the template puts around an answer. If several rows hold the same answer, only its
    tokens in the first row are marked."""
    mask = torch.zeros_like(batch.response_mask)
    row = 0
    for rollout in rollouts:
        for own in rows_of(rollout):
            for step in sorted(set(own.steps)):
                kept = rollout.steps[step].kept
                for begin, end in find_tool_bodies(rollout.steps[step], renderer) if step else ():
                    mask[row, kept + begin : kept + end] = True
            row += 1
    return replace(batch, observed_mask=mask & ~batch.sampled_mask)


def find_tool_bodies(step: Any, renderer: Renderer) -> list[tuple[int, int]]:
    """Find the contents of a step's new tool messages in its prompt_ids, as (begin, end). The
    search runs from the end of the prompt and takes the last occurrence of each content."""
    ids = list(step.prompt_ids)
    spans = list[tuple[int, int]]()
    limit = len(step.prompt_ids)
    for message in reversed(step.prompt):
        body = encode_text(renderer, message.get("content") or "")
        begin = (
            next((i for i in range(limit - len(body), 0, -1) if ids[i : i + len(body)] == body), 0)
            if body
            else 0
        )
        if begin:
            limit = begin
            spans += [(begin, begin + len(body))] if message["role"] == "tool" else []
    return spans
