"""How far the policy moves, measured on few rollouts after a step's last update, without a copy of any weights.

A KL from an earlier policy to the policy now needs only the log-probs that the earlier one gave to tokens of its own: so those of a few
rollouts are kept, and scored again. Each of the two figures costs one forward pass over a sixteenth of a step's rollouts, at most about
3 % of a step, which samples all rollouts and passes all of them forward and backward. With one update a step there is no trainer pass
before it, and kl/step takes its own, over the same rollouts. Of a step with fewer than 64 rollouts four are measured, which costs more.

    figure     mean of k3, in nats per token     on
    kl/step    KL(before the step‖now)           rollouts of the step that have a trained token
    kl/start   KL(the start of the run‖now)      rollouts of the first step, whatever has been sampled since

kl/start is nan where kl/ref says how far the policy is from its start, with an active KL to a reference that is frozen there, and in a run
that was begun before this was measured. Neither figure exists where the episodes were not sampled by the policy (algorithm=sft).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkit.algorithm import select
from rlkit.types import Batch

EVERY, LEAST = 16, 4  # of so many rollouts one is measured, and at least so many


def few(batch: Batch) -> Batch | None:
    """All rows of every 16th rollout that has a trained token, of small batches of four, as tensors alone; None where there is none."""
    owners = batch.rollout_ids[batch.response_mask.any(1)].unique()
    if not len(owners):
        return None
    every = max(1, min(EVERY, len(owners) // LEAST))
    rows = torch.isin(batch.rollout_ids, owners[::every]).nonzero()[:, 0]
    return select(batch._replace(components=None, metadata=None), rows)._replace(metrics=None)


def on(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device, with what is in its mappings: a checkpoint's comes on the CPU."""

    def to(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else {n: to(v) for n, v in value.items()} if isinstance(value, dict) else value

    return batch._replace(**{name: to(value) for name, value in batch._asdict().items()})
