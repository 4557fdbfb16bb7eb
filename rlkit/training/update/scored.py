"""Compute the models' log-probs, entropies and values before the updates. The passes over the batch
run without gradient, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlkit.algorithm import Algorithm, asks_for
from rlkit.models.log_probs import forward_logprobs
from rlkit.models.packing import pack
from rlkit.training.experiment import Experiment
from rlkit.training.update.record import Update
from rlkit.training.update.split import Rows, select, split_into_minibatches
from rlkit.types import Batch, Scored, TokenLogprobs

Known = TypeVar("Known", bound=Scored)


def score(u: Update, batch: Batch) -> Scored:
    """Add quantities computed without gradient to the batch. They are the old policy's log-probs,
    entropies and values, and the reference's log-probs. Each quantity is computed only if a later
    computation needs it.

    All passes use the minibatches of the first epoch, in the same micro-batches. Therefore policy
    and reference give the same bits if their weights are equal. With other minibatches their KL
    would be rounding noise, and an optimizer enlarges noise to full steps.

    With one epoch of one minibatch the old policy is the current policy. Its log-probs are then the
    detached log-probs of the update and cost nothing. If algorithm.old does not take the old policy
    from the trainer's pass, this pass runs only if another computation needs its results.
    """
    splits = split_into_minibatches(batch, u.x.algorithm, u.seed)[0]
    share = compute_old_share(batch, u.x.algorithm, step=u.step)
    if not needs_old(u.x, critic=u.critic is not None):
        scored = Scored(**vars(batch), logprobs_old=None, old_share=share)
    else:
        old = compute_batch_logprobs(u, u.model, read_batch(u, batch), splits, critic=u.critic)
        scored = Scored(
            **vars(batch),
            logprobs_old=old.logprobs,
            old_share=share,
            entropy_old=old.entropy,
            values=old.values,
        )
    return with_reference(u, scored, splits) if u.x.kl.active else scored


def compute_old_share(batch: Batch, algorithm: Algorithm, *, step: int) -> Tensor | None:
    """Return the position of the ratio's old policy between the sampling policy (0) and the current
    policy (1), [B, T]. Return None if the trainer has to compute the old policy's log-probs in a
    pass before the update. The value of algorithm.old decides:

    trainer      None: a pass of the trainer gives the policy before the update
    sampler      share 0: the old policy is the sampling policy, with the sampler's log-probs. The
                 ratio is π / μ, so the effect of a clip depends on the age of a sample
    loglinear    share (d - 1) / d: a policy between both (`rlkit.functional.interpolated_old`). The
                 token was sampled d versions before the version in training, step + 1

    Args:
      step: RL steps done before this one.
    """
    if algorithm.old == "trainer":
        return None
    share = torch.zeros_like(batch.logprobs_sampler)
    if algorithm.old == "loglinear":
        behind = (step - batch.versions).clamp_min(0)
        share = (behind / (behind + 1)).to(share.dtype)
    return share


def needs_old(x: Experiment, *, critic: bool) -> bool:
    """Return whether any function of the algorithm needs the policy's log-probs, entropies or
    values from before the update."""
    a = x.algorithm
    # the other parts are called in the update, which has its own log-probs of the old policy
    before = [a.advantage, a.normalization, a.token_filter, a.aggregation]
    before += [a.correction] if a.old == "trainer" else []
    every = [*before, a.correction, a.ratio, a.policy_loss, x.kl.estimator]
    several = a.epochs * a.minibatches > 1 and a.old == "trainer"
    return (
        several
        or any(asks_for(part, "logprobs_old") for part in before)
        or any(asks_for(part, "entropy_old") for part in every)
        or asks_for(a.policy_loss, "covariance_rank")
        or x.kl.in_reward
        or critic
    )


def with_reference(u: Update, batch: Known, splits: Sequence[Tensor]) -> Known:
    """Add the reference's log-probs to the batch, computed in the minibatches `splits`."""
    with u.kept.reference(u.x.reference) as model:
        found = compute_batch_logprobs(u, model, read_batch(u, batch), splits)
    return replace(batch, logprobs_ref=found.logprobs)


def read_batch(u: Update, batch: Rows) -> Rows:
    """Return the batch with a response mask that marks every token whose log-probs are needed. A KL
    in the baseline and a teacher also need the log-probs of untrained rollouts."""
    every = u.x.kl.in_baseline or "teacher" in u.x.algorithm.active_streams
    return batch.whole() if every else batch


@torch.no_grad()
def compute_batch_logprobs(
    u: Update,
    model: nn.Module,
    batch: Batch,
    splits: Sequence[Tensor] | None = None,
    *,
    critic: nn.Module | None = None,
) -> TokenLogprobs:
    """Compute log-probs, entropies and values [B, T] of a batch, one micro-batch at a time.

    Args:
      splits: row numbers of each minibatch. Each minibatch is split into micro-batches separately.
        None: one minibatch with all rows.
      critic: the model that predicts the values. None: no values are computed.
    """
    out: dict[str, Tensor] = {}
    for split in (
        [torch.arange(len(batch.ids), device=batch.ids.device)] if splits is None else splits
    ):
        for own, counts in u.micro.of(select(batch, split)):
            rows = split[own]
            part = select(batch, rows)
            packed = pack(part.ids, part.response_mask)
            with u.clock.part("model"):
                found = u.host.forward(
                    model, forward_logprobs, packed, temperature=u.temperature, critic=critic
                )
            for name, value in found._asdict().items():
                if value is not None:
                    total = out.setdefault(name, torch.zeros_like(batch.logprobs_sampler))
                    if counts:
                        total[rows, : part.ids.shape[1]] = value.to(total.dtype)
    u.host.all_reduce(out.values())
    if out:
        return TokenLogprobs(**out)
    nothing = torch.zeros_like(batch.logprobs_sampler)  # no row has a trained token
    return TokenLogprobs(nothing, nothing, None if critic is None else nothing)
