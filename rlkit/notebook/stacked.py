"""Rollouts side by side, one row a rollout: the tokens that each sampled, in the order of time and filled up on the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import rlkit.functional as F
from rlkit.algorithm import quantities
from rlkit.episodes._assemble import assemble
from rlkit.models import forward_logprobs, pack
from rlkit.types import Batch, Rollout, ToolResult


def stack_rollouts(rollouts: Sequence[Rollout]) -> Batch:
    """The sampled tokens of rollouts side by side: a Batch with one row a rollout, [B, T], `response_mask` True on real tokens.

    `logprobs_sampler` carries the gradient where the steps' log-probs do (`attach_logprobs`).
    """
    logprobs = [[torch.as_tensor(step.logprobs)[step.sampled] for step in r.steps] for r in rollouts]
    device = next((part.device for parts in logprobs for part in parts), torch.device("cpu"))
    stacked = pad_sequence([torch.cat([torch.zeros(0, device=device), *parts]) for parts in logprobs], batch_first=True)
    batch = assemble([plain(r) for r in rollouts], pad_token_id=0, device=device)
    positions, mask = episodes_of(batch)
    whole = {name: value for name, value in quantities(batch).items() if isinstance(value, Tensor) and value.dim() == 2}
    moved: dict[str, Any] = {name: F.to_episodes(value, positions, mask) for name, value in whole.items()}
    moved |= {"attention_mask": mask, "response_mask": mask, "rollout_ids": torch.arange(len(mask), device=device)}
    return batch._replace(**moved | {"logprobs_sampler": stacked})


def same_rollouts(a: Any, b: Any) -> bool:
    """Whether two rollouts, or lists of them, are equal but for the seconds of their tools. `==` has no answer once there are tensors in
    them (`attach_logprobs`)."""
    return bool(_values(a) == _values(b))


def _values(data: Any) -> Any:
    """Data without tensors and without the seconds of tools: sequences as lists."""
    if isinstance(data, ToolResult):
        data = data._replace(seconds=0.0)
    if isinstance(data, Tensor):
        return data.tolist()
    if isinstance(data, Mapping):
        return {name: _values(value) for name, value in data.items()}
    return [_values(item) for item in data] if isinstance(data, list | tuple) else data


def plain(rollout: Rollout) -> Rollout:
    """The rollout with log-probs as numbers."""
    return rollout._replace(steps=tuple(s._replace(logprobs=tuple(torch.as_tensor(s.logprobs).tolist())) for s in rollout.steps))


def attach_logprobs(model: nn.Module, rollouts: Sequence[Rollout], *, temperature: float = 1.0) -> list[Rollout]:
    """The rollouts with the model's own log-probs in their steps, as tensors that carry the gradient: what a loss_fn works on.

    The log-probs that the steps had go to `metadata["old_logprobs"]` [T], the "old" of ratios; what is there already stays.
    `temperature` is the sampler's, > 0.
    """
    batch = assemble([plain(r) for r in rollouts], pad_token_id=0, device=next(model.parameters()).device)
    logprobs = forward_logprobs(model, pack(batch.ids, batch.response_mask), temperature=temperature).logprobs
    return attach(rollouts, *episodes_of(batch), logprobs, batch.logprobs_sampler)


def attach(rollouts: Sequence[Rollout], positions: Tensor, mask: Tensor, logprobs: Tensor, old: Tensor) -> list[Rollout]:
    """The rollouts with log-probs [B, T] of a batch in their steps."""
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


def episodes(rollout_ids: Tensor, step_ids: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Positions and mask [n, T] of each rollout's sampled tokens, also for rollouts at the end without any."""
    positions, own = F.episode_positions(rollout_ids, step_ids, mask)
    padding = (0, 0, 0, n - len(own))
    return nn.functional.pad(positions, padding), nn.functional.pad(own, padding)


def episodes_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The same of a batch."""
    return episodes(batch.rollout_ids, batch.step_ids, batch.response_mask, len(batch.rewards))
