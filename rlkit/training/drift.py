"""How far the policy moves, measured on few rollouts after a step's last update, without a copy of
any weights.

A KL from an earlier policy to the policy now needs only the log-probs that the earlier one gave to
tokens of its own: so those of a few rollouts are kept, and scored again: a sixteenth of a step's,
for both figures in one forward pass after the last update. Of a step with fewer than 64 rollouts
four are measured. The log-probs from before the updates are those of the trainer's pass for its
updates or, with one update a step, of that update itself; where neither exists (`algorithm.old` is
another), the same rollouts are passed once more.

    figure     mean of k3, in nats per token     on
    kl/step    KL(before the step‖now)           rollouts of the step that have a trained token
    kl/start   KL(the start of the run‖now)      rollouts of the first step, whatever has been
               sampled since

kl/start is nan where kl/ref says how far the policy is from its start, with an active KL to a
reference that is frozen there. Neither figure exists where the episodes were not sampled by the
policy (algorithm=sft).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.algorithm import select
from rlkit.types import Batch

# of so many rollouts one is measured, and at least so many
EVERY = 16
LEAST = 4


def few(batch: Batch) -> Batch | None:
    """All rows of every 16th rollout that has a trained token, of small batches of four, as tensors
    alone; None where there is none."""
    owners = batch.rollout_ids[batch.response_mask.any(1)].unique()
    if not len(owners):
        return None
    every = max(1, min(EVERY, len(owners) // LEAST))
    rows = torch.isin(batch.rollout_ids, owners[::every]).nonzero()[:, 0]
    return select(batch._replace(components=None, metadata=None), rows)._replace(metrics=None)


def on(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device, with what is in its mappings: a checkpoint's comes on the CPU."""

    def to(value: Any) -> Any:
        return (
            value.to(device)
            if isinstance(value, Tensor)
            else {n: to(v) for n, v in value.items()}
            if isinstance(value, dict)
            else value
        )

    return batch._replace(**{name: to(value) for name, value in batch._asdict().items()})


def before_update(batch: Batch, terms: Mapping[str, Sequence[Tensor]]) -> Batch:
    """The batch with the log-probs that the only update of a step found: per-token terms by name,
    each rollout's tokens in their order."""
    owners, logprobs = (
        torch.cat(list(terms[name])).to(batch.ids.device) for name in ("owners", "logprobs")
    )
    own = torch.isin(owners, batch.rollout_ids)
    old = torch.zeros_like(batch.logprobs_sampler)
    old[batch.response_mask] = logprobs[own][owners[own].argsort(stable=True)].to(old)
    return batch._replace(logprobs_old=old)


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches as one, for a pass over all of them; what a batch need not have is left out."""
    width = max(b.ids.shape[1] for b in batches)
    first = 0
    parts = list[dict[str, Tensor]]()
    for b in batches:
        given = {
            name: getattr(b, name) for name in Batch._fields if name not in Batch._field_defaults
        }
        wide = {
            name: pad(v, (0, width - v.shape[1])) if v.dim() == 2 else v
            for name, v in given.items()
        }
        parts.append(wide | {"rollout_ids": b.rollout_ids + first})
        first += len(b.rewards)
    whole: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Batch(**whole)
