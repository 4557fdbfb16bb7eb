"""Rollouts as the batch of a step: the trained rollouts, and the observed tokens."""

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
from rlkit.training.update.record import Update
from rlkit.training.update.split import Rows
from rlkit.types import Batch, Rollout


def make_sampled_batch(u: Update) -> Batch:
    """The trained rollouts of a step."""
    a = u.x.algorithm
    batch = filter_rollouts(u.assemble_batch(u.trained), a)
    batch = select_reward_rows(batch, u.trained, a.streams.get("reward"))
    if any(stream.mask == "observations" for stream in a.active_streams.values()):
        batch = mark_observed(batch, u.trained, u.policy.renderer)
    return batch


def filter_rollouts(batch: Rows, algorithm: Algorithm) -> Rows:
    """The batch with the rollouts to train on, and the rewards for the advantage.

    The group filter reads the raw rewards. Then the overlong rule may change rewards (and the token
    reward at the last sampled token) and leave rollouts out. A rollout left out is no longer in
    `response_mask` but stays in `sampled_mask`; its reward still counts in baselines.
    """
    with torch.no_grad():
        given = batch.quantities
        kept, filtered = call_part("group_filter", algorithm.group_filter, given)
        (rewards, trained), shortened = call_part("overlong", algorithm.overlong, given)
        shaped = (rewards - batch.rewards).nan_to_num(0.0)[batch.rollout_ids][:, None]
        return replace(
            batch,
            rewards=rewards,
            token_rewards=batch.token_rewards + shaped * mark_last_tokens(batch),
            response_mask=batch.response_mask & (kept & trained)[batch.rollout_ids][:, None],
            metrics=filtered | shortened,
        )


def mark_last_tokens(batch: Batch) -> Tensor:
    """[B, T] True at the last sampled token of each rollout."""
    positions, mask = F.episode_positions(batch.rollout_ids, batch.step_ids, batch.response_mask)
    last = mask & (torch.arange(mask.shape[1], device=mask.device) == mask.sum(1, keepdim=True) - 1)
    return F.from_episodes(last, positions, mask, batch.response_mask)


def select_reward_rows(batch: Batch, rollouts: Sequence[Rollout], stream: Stream | None) -> Batch:
    """The batch with only the rollouts from the parts of the reward's stream."""
    return batch if stream is None else select_parts(batch, rollouts, stream)


def select_parts(batch: Rows, rollouts: Sequence[Rollout], stream: Stream) -> Rows:
    """The batch with only the rollouts from the stream's parts of the mixture."""
    if stream.parts is None:
        return batch
    parts = [rollouts[i].task.part for i in batch.rollout_ids.tolist()]
    return select_rows(batch, [stream.of(part) for part in parts])


def select_rows(batch: Rows, rows: Sequence[bool]) -> Rows:
    """The batch with only the tokens of these rows in its response_mask."""
    chosen = torch.tensor(rows, device=batch.ids.device)
    return replace(batch, response_mask=batch.response_mask & chosen[:, None])


def mark_observed(batch: Batch, rollouts: Sequence[Rollout], renderer: Renderer) -> Batch:
    """The batch with `observed_mask`: the tokens of tools' answers, without the template around
    them. Each is marked only in the first row with it."""
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
    """Where the contents of a step's new tool messages are in its prompt_ids. The search runs from
    the end and takes the last occurrence of each."""
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
