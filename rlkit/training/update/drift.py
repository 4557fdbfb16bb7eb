"""Measure how far the policy moves, on a few rollouts after a step's last update. No weights are
copied.

A KL from an earlier policy to the present policy needs only the earlier policy's log-probs of its
own tokens. Therefore the log-probs of a few rollouts are kept: a sixteenth of a step's rollouts,
but at least four. After the last update, one forward pass for each KL computes the present
log-probs of these rollouts. The earlier log-probs usually come from the trainer's pass before its
updates. A step with a single update has no pass of this kind, and the update itself gives the
earlier log-probs. If neither exists (see `algorithm.old`), an additional pass reads the same
rollouts.

    metric     mean of k3, in nats per token     on
    kl/step    KL(before the step‖now)           rollouts of the step with a trained token
    kl/start   KL(the start of the run‖now)      the same rollouts of the first step, in every step

kl/start is nan if kl/ref already measures the distance from the start. This is so with an active KL
and a reference frozen at the start. Both metrics are nan if the policy did not sample the episodes
(algorithm=sft).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.functional import approximate_kl
from rlkit.training.metrics import NAN
from rlkit.training.update.record import Update
from rlkit.training.update.scored import compute_batch_logprobs
from rlkit.training.update.signal import updates_once
from rlkit.training.update.split import move_to_device, select
from rlkit.types import Batch, Rollout, Weighted

# one of EVERY rollouts is measured, but at least LEAST rollouts
EVERY = 16
LEAST = 4
# the required fields of a Batch: its tensors
TENSORS = [f.name for f in fields(Batch) if f.default is f.default_factory is MISSING]


class Few(NamedTuple):
    """Hold a few rollouts, and the log-probs [B, T] of their tokens under an earlier policy. The
    log-probs are None until they are computed."""

    batch: Batch
    logprobs: Tensor | None


def select_few(batch: Batch, logprobs: Tensor | None = None) -> Few | None:
    """Select all rows of every 16th rollout with a trained token, or of about four rollouts in a
    small batch. Only the tensors of the batch are kept. Return None if no rollout has a trained
    token."""
    owners = batch.rollout_ids[batch.response_mask.any(1)].unique()
    if not len(owners):
        return None
    every = max(1, min(EVERY, len(owners) // LEAST))
    rows = torch.isin(batch.rollout_ids, owners[::every]).nonzero()[:, 0]
    chosen = select(Batch(**{name: getattr(batch, name) for name in TENSORS}), rows)
    return Few(chosen, None if logprobs is None else logprobs[rows][:, : chosen.ids.shape[1]])


def add_pass(u: Update, own: Few | None) -> Few | None:
    """Add the present policy's log-probs of the kept rollouts, computed in a forward pass. If `own`
    is None or already holds log-probs, return `own` unchanged."""
    if own is None or own.logprobs is not None:
        return own
    return own._replace(logprobs=compute_batch_logprobs(u, u.model, own.batch).logprobs)


def add_terms(own: Few | None, terms: Mapping[str, Sequence[Tensor]]) -> Few | None:
    """Add the log-probs of the kept rollouts, taken from the update of a step with a single update.
    If `own` is None or already holds log-probs, return `own` unchanged.

    Args:
      terms: name → per-token terms of the update, in the order of each rollout's tokens.
    """
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


def prepare_drift(
    u: Update, batch: Weighted, start: Few | None, rollouts: Sequence[Rollout]
) -> tuple[Few | None, Few | None]:
    """Select the rollouts that measure a step's drift. Do this before the updates of the step.

    Args:
      start: the kept rollouts of the first step. None in the first step, or if kl/start is not
        measured.
      rollouts: all rollouts of the step.
    Returns: a pair, the kept rollouts of this step and the kept rollouts of the first step. Both
      hold log-probs from before the updates. If the step has a single update, the log-probs of its
      own rollouts are added after this update (`add_terms`).
    """
    if u.x.algorithm.episodes is not None:  # the policy has not sampled the episodes
        return None, start
    own = select_few(batch, batch.logprobs_old)
    if not updates_once(u, batch):
        own = add_pass(u, own)
    if u.step == 0 and not all(u.kept.measures_drift(*phase) for phase in u.kept.phases.items()):
        start = add_pass(u, select_few(u.assemble_batch(rollouts)))
    return own, start


def measure_drift(u: Update, own: Few | None, start: Few | None) -> dict[str, float]:
    """Compute kl/step and kl/start. Each is nan if its rollouts are None."""
    says = u.kept.measures_drift(u.kept.phase, u.x)
    device = next(u.model.parameters()).device
    kl = {}
    for name, then in {"kl/step": own, "kl/start": None if says else start}.items():
        kl[name] = NAN
        if then is not None and then.logprobs is not None:
            batch = move_to_device(then.batch, device)
            now = compute_batch_logprobs(u, u.model, batch).logprobs
            before = then.logprobs.to(device)
            kl[name] = float(approximate_kl(now, before, batch.response_mask))
    return kl


def pack_few(own: Few | None) -> dict[str, Any] | None:
    """Convert rollouts and log-probs to plain types and tensors, for a checkpoint."""
    if own is None or own.logprobs is None:
        return None
    batch = {name: getattr(own.batch, name).cpu() for name in TENSORS}
    return {"batch": batch, "logprobs": own.logprobs.cpu()}


def unpack_few(saved: Mapping[str, Any] | None) -> Few | None:
    """Restore the rollouts from the value of `pack_few`."""
    return None if saved is None else Few(Batch(**saved["batch"]), saved["logprobs"])
