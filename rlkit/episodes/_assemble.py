"""Turn scored rollouts into padded tensors. The sampled token ids are copied; text is never encoded
again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.system.copies import copy_value
from rlkit.types import Batch, Rollout


class TokenRow(NamedTuple):
    """Hold one training sequence: consecutive steps of one rollout. The context of each step begins
    with the context and the reply of the step before."""

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    steps: list[int]
    rewards: list[float]
    versions: list[int]


def split_into_rows(rollout: Rollout) -> list[TokenRow]:
    """Split a rollout into its training sequences.

    A step extends the current row if its context begins with the previous step's context and reply.
    Otherwise the step starts a new row. This happens if the template has dropped earlier thinking,
    or if turns were dropped to make room. The same rule serves every setting of `history`. Text
    inserted by a thinking budget is part of the row, because the policy has read this text. The
    policy is not trained on it.
    """
    out: list[TokenRow] = []
    # the row and position of the last sampled token so far; rewards are added at this token
    spot: tuple[TokenRow, int] | None = None
    for index, step in enumerate(rollout.steps):
        held = out[-1].ids if out else []
        prompt = held[: step.kept] + list(step.prompt_ids)
        if not out or prompt[: len(held)] != held:
            out.append(TokenRow([], [], [], [], [], []))
        row = out[-1]
        new = prompt[len(row.ids) :] + list(step.response_ids)
        observed = len(new) - len(step.response_ids)
        row.ids.extend(new)
        begin = len(row.ids) - len(step.response_ids)
        row.sampled.extend([False] * observed + [True] * len(step.response_ids))
        for i in step.forced:
            row.sampled[begin + i] = False
        row.logprobs.extend(
            p if s else 0.0
            for p, s in zip(
                [0.0] * observed + list(step.logprobs), row.sampled[-len(new) :], strict=True
            )
        )
        row.steps.extend([index] * len(new))
        row.rewards.extend([0.0] * len(new))
        row.versions.extend([0] * len(new))
        for first, version in step.versions:
            row.versions[begin + first :] = [version] * (len(step.response_ids) - first)
        own = step.sampled
        if own:
            spot = row, begin + own[-1]
        if spot is not None and rollout.reward is not None:
            spot[0].rewards[spot[1]] += (step.reward or 0.0) + (
                rollout.reward if index == len(rollout.steps) - 1 else 0.0
            )
    return out


def assemble(
    rollouts: Sequence[Rollout], *, pad_token_id: int, device: torch.device | str = "cpu"
) -> Batch:
    """Return a batch of scored rollouts, as padded tensors.

    Args:
      rollouts: rollouts with their rewards. A reward of None becomes nan ("cannot be scored"). An
        episode's reward is the verifier's reward plus the rewards of its steps. In `token_rewards`,
        each reward is at the last token sampled before the reward was given.
      pad_token_id: id to fill the right side of short rows. This id may equal an end-of-sequence
        id, because only `attention_mask` marks padding.
      device: the device of the tensors.
    Raises: ValueError if no rollout has a step.
    """
    numbered = [(i, row) for i, rollout in enumerate(rollouts) for row in split_into_rows(rollout)]
    if not numbered:
        raise ValueError(
            "assemble: no rollout has a step; every episode ended before its first reply"
        )
    lists = [row for _, row in numbered]

    def scores(values: Iterable[float | None]) -> Tensor:
        return torch.tensor(
            [float("nan") if v is None else v for v in values], dtype=torch.float32, device=device
        )

    sizes = torch.tensor([len(row.ids) for row in lists])
    there = torch.arange(int(sizes.max())) < sizes[:, None]  # [B, T]

    def tensor(values: Iterable[list], dtype: torch.dtype, fill: int = 0) -> Tensor:
        out = torch.full(there.shape, fill, dtype=dtype)
        out[there] = torch.tensor(list(chain.from_iterable(values)), dtype=dtype)
        return out.to(device)

    sampled = tensor((r.sampled for r in lists), torch.bool)
    played_greedily = any(r.greedy_played for r in rollouts)
    return Batch(
        ids=tensor((r.ids for r in lists), torch.int64, pad_token_id),
        attention_mask=there.to(device),
        response_mask=sampled,
        sampled_mask=sampled,
        rollout_ids=torch.tensor([i for i, _ in numbered], device=device),
        step_ids=tensor((r.steps for r in lists), torch.int64),
        rewards=scores(r.total_reward for r in rollouts),
        group_ids=torch.tensor([r.group for r in rollouts], device=device),
        truncated=torch.tensor([r.status == "truncated" for r in rollouts], device=device),
        lengths=torch.tensor([r.response_length for r in rollouts], device=device),
        reply_lengths=torch.tensor(
            [max((len(s.sampled) for s in r.steps), default=0) for r in rollouts], device=device
        ),
        greedy_rewards=(scores(r.greedy_reward for r in rollouts) if played_greedily else None),
        token_rewards=tensor((r.rewards for r in lists), torch.float32),
        logprobs_sampler=tensor((r.logprobs for r in lists), torch.float32),
        versions=tensor((r.versions for r in lists), torch.int64) * sampled,
        components={
            name: scores(r.rewards.get(name) for r in rollouts)
            for name in dict.fromkeys(n for r in rollouts for n in r.rewards)
        },
        metadata=tuple(
            copy_value({"player": r.player, "state": r.state, **r.task.metadata, **r.metadata})
            for r in rollouts
        ),
    )
