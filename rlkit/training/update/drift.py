"""How far the policy moves, measured on few rollouts after a step's last update, without a copy of
any weights.

A KL from an earlier policy to the policy now needs only the earlier one's log-probs of its own
tokens: so a few rollouts' are kept, and scored again: a sixteenth of a step's,
for both figures in one forward pass after the last update. Of a step with fewer than 64 rollouts
four are measured. The log-probs from before the updates are from the trainer's pass for its
updates or, with one update a step, from this update itself; where neither exists (`algorithm.old`
is another), the same rollouts are passed once more.

    figure     mean of k3, in nats per token     on
    kl/step    KL(before the step‖now)           rollouts of the step with a trained token
    kl/start   KL(the start of the run‖now)      rollouts of the first step, whatever has been
               sampled since

kl/start is nan if kl/ref says how far the policy is from its start, with an active KL to a
reference frozen there. Neither figure exists if the episodes were not sampled by the
policy (algorithm=sft).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.functional import approximate_kl
from rlkit.training.metrics import NAN
from rlkit.training.update.record import Update
from rlkit.training.update.scored import batch_logprobs
from rlkit.training.update.signal import updates_once
from rlkit.training.update.split import on_device, select
from rlkit.types import Batch, Rollout, Weighted

# of so many rollouts one is measured, and at least so many
EVERY = 16
LEAST = 4
# the tensors of every batch
TENSORS = [f.name for f in fields(Batch) if f.default is f.default_factory is MISSING]


class Few(NamedTuple):
    """A few rollouts, and an earlier policy's log-probs of their tokens [B, T]; None
    until they are found."""

    batch: Batch
    logprobs: Tensor | None


def few(batch: Batch, logprobs: Tensor | None = None) -> Few | None:
    """All rows of every 16th rollout with a trained token, of small batches of four, as tensors
    alone; None if there is none."""
    owners = batch.rollout_ids[batch.response_mask.any(1)].unique()
    if not len(owners):
        return None
    every = max(1, min(EVERY, len(owners) // LEAST))
    rows = torch.isin(batch.rollout_ids, owners[::every]).nonzero()[:, 0]
    chosen = select(Batch(**{name: getattr(batch, name) for name in TENSORS}), rows)
    return Few(chosen, None if logprobs is None else logprobs[rows][:, : chosen.ids.shape[1]])


def passed(u: Update, own: Few | None) -> Few | None:
    """With the log-probs of the policy as it is now, if there are none yet."""
    if own is None or own.logprobs is not None:
        return own
    return own._replace(logprobs=batch_logprobs(u, u.model, own.batch).logprobs)


def found(own: Few | None, terms: Mapping[str, Sequence[Tensor]]) -> Few | None:
    """With the log-probs found by the only update of a step: per-token terms by name, each
    rollout's tokens in their order."""
    if own is None or own.logprobs is not None:
        return own
    batch = own.batch
    owners, logprobs = (
        torch.cat(list(terms[name])).to(batch.ids.device) for name in ("owners", "logprobs")
    )
    mine = torch.isin(owners, batch.rollout_ids)
    old = torch.zeros_like(batch.logprobs_sampler)
    old[batch.response_mask] = logprobs[mine][owners[mine].argsort(stable=True)].to(old)
    return own._replace(logprobs=old)


def before_updates(
    u: Update, batch: Weighted, start: Few | None, rollouts: Sequence[Rollout]
) -> tuple[Few | None, Few | None]:
    """The rollouts to measure a step's drift on: rollouts of the step, and of the first step.

    Args:
      start: of the first step; None in the first step, or if nothing asks for them.
      rollouts: all of the step.
    Returns: each with the log-probs from before the updates; the step's are found later
      (`found`) if its only update finds them.
    """
    if u.x.algorithm.episodes is not None:  # the policy has not sampled them
        return None, start
    own = few(batch, batch.logprobs_old)
    if not updates_once(u, batch):
        own = passed(u, own)
    if u.step == 0 and not all(u.kept.measures_drift(*phase) for phase in u.kept.phases.items()):
        start = passed(u, few(u.assembled(rollouts)))
    return own, start


def measured(u: Update, own: Few | None, start: Few | None) -> dict[str, float]:
    """kl/step and kl/start, all rollouts in one pass; nan without any."""
    says = u.kept.measures_drift(u.kept.phase, u.x)
    then = {"kl/step": own, "kl/start": None if says else start}
    device = next(u.model.parameters()).device
    there = {
        name: (on_device(own.batch, device), own.logprobs.to(device))
        for name, own in then.items()
        if own is not None and own.logprobs is not None
    }
    kl = dict.fromkeys(then, NAN)
    if not there:
        return kl
    batches = [batch for batch, _ in there.values()]
    now = batch_logprobs(u, u.model, joined(batches)).logprobs
    parts = now.split([len(batch.ids) for batch in batches])
    for (name, (batch, old)), new in zip(there.items(), parts, strict=True):
        kl[name] = float(approximate_kl(new[:, : batch.ids.shape[1]], old, batch.response_mask))
    return kl


def joined(batches: Sequence[Batch]) -> Batch:
    """Batches as one, for a pass over all of them; optional parts of a batch are left out."""
    width = max(batch.ids.shape[1] for batch in batches)
    first = 0
    parts = list[dict[str, Tensor]]()
    for batch in batches:
        wide = {}
        for name in TENSORS:
            value = getattr(batch, name)
            short = value.dim() == 2
            wide[name] = pad(value, (0, width - value.shape[1])) if short else value
        parts.append(wide | {"rollout_ids": batch.rollout_ids + first})
        first += len(batch.rewards)
    whole: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in TENSORS}
    return Batch(**whole)


def as_tensors(own: Few | None) -> dict[str, Any] | None:
    """For a checkpoint, as plain types and tensors."""
    if own is None or own.logprobs is None:
        return None
    batch = {name: getattr(own.batch, name).cpu() for name in TENSORS}
    return {"batch": batch, "logprobs": own.logprobs.cpu()}


def from_tensors(saved: Mapping[str, Any] | None) -> Few | None:
    """The inverse."""
    return None if saved is None else Few(Batch(**saved["batch"]), saved["logprobs"])
