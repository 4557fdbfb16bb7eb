"""How far the policy moves, measured on few rollouts after a step's last update, without a copy of
any weights.

A KL from an earlier policy to the present one needs only the earlier policy's log-probs of its own
tokens. So the log-probs of a few rollouts are kept (a sixteenth of a step's rollouts, but at least
four), and a forward pass for each figure scores these rollouts again after the last update. The
earlier log-probs come from the trainer's pass before its updates, or from the update itself if a
step has only one. If neither exists (see `algorithm.old`), an additional pass reads the same
rollouts.

    figure     mean of k3, in nats per token     on
    kl/step    KL(before the step‖now)           rollouts of the step with a trained token
    kl/start   KL(the start of the run‖now)      the same rollouts of the first step, in every step

kl/start is nan if kl/ref already measures the distance from the start: with an active KL and a
reference frozen at the start. Neither figure exists if the episodes were not sampled by the policy
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

# one of EVERY rollouts is measured, and at least LEAST
EVERY = 16
LEAST = 4
# the tensors of every batch
TENSORS = [f.name for f in fields(Batch) if f.default is f.default_factory is MISSING]


class Few(NamedTuple):
    """A few rollouts, and an earlier policy's log-probs of their tokens [B, T]; None while these
    are unknown."""

    batch: Batch
    logprobs: Tensor | None


def select_few(batch: Batch, logprobs: Tensor | None = None) -> Few | None:
    """All rows of every 16th rollout with a trained token, or of four rollouts in a small batch.
    Only the tensors are kept. None if no rollout has a trained token."""
    owners = batch.rollout_ids[batch.response_mask.any(1)].unique()
    if not len(owners):
        return None
    every = max(1, min(EVERY, len(owners) // LEAST))
    rows = torch.isin(batch.rollout_ids, owners[::every]).nonzero()[:, 0]
    chosen = select(Batch(**{name: getattr(batch, name) for name in TENSORS}), rows)
    return Few(chosen, None if logprobs is None else logprobs[rows][:, : chosen.ids.shape[1]])


def add_pass(u: Update, own: Few | None) -> Few | None:
    """Add the present policy's log-probs, if there are none yet."""
    if own is None or own.logprobs is not None:
        return own
    return own._replace(logprobs=compute_batch_logprobs(u, u.model, own.batch).logprobs)


def add_terms(own: Few | None, terms: Mapping[str, Sequence[Tensor]]) -> Few | None:
    """Add the log-probs from the only update of a step. `terms`: name → per-token terms; the tokens
    of each rollout are in order."""
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
    """The rollouts to measure a step's drift on: rollouts of the step, and of the first step.

    Args:
      start: rollouts of the first step; None in the first step, or if no figure needs them.
      rollouts: all rollouts of the step.
    Returns: both with the log-probs from before the updates. If the step has a single update,
      that update gives the log-probs of the step's rollouts later (`add_terms`).
    """
    if u.x.algorithm.episodes is not None:  # the policy has not sampled them
        return None, start
    own = select_few(batch, batch.logprobs_old)
    if not updates_once(u, batch):
        own = add_pass(u, own)
    if u.step == 0 and not all(u.kept.measures_drift(*phase) for phase in u.kept.phases.items()):
        start = add_pass(u, select_few(u.assemble_batch(rollouts)))
    return own, start


def measure_drift(u: Update, own: Few | None, start: Few | None) -> dict[str, float]:
    """kl/step and kl/start; nan without any rollout."""
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
    """The rollouts and log-probs for a checkpoint, as plain types and tensors."""
    if own is None or own.logprobs is None:
        return None
    batch = {name: getattr(own.batch, name).cpu() for name in TENSORS}
    return {"batch": batch, "logprobs": own.logprobs.cpu()}


def unpack_few(saved: Mapping[str, Any] | None) -> Few | None:
    """The inverse of `pack_few`."""
    return None if saved is None else Few(Batch(**saved["batch"]), saved["logprobs"])
