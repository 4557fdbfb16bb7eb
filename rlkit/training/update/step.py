"""Take one RL step of the policy and the critic: sampled → scored → weighted → updated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from rlkit.distributed import ranks
from rlkit.episodes import summarize
from rlkit.training.metrics import (
    UpdateTerms,
    performance,
    refill_metrics,
    staleness_metrics,
    update_metrics,
)
from rlkit.training.update import drift
from rlkit.training.update.minibatch import make_one_update, step_minibatches
from rlkit.training.update.optimizers import Optimizers
from rlkit.training.update.record import Update
from rlkit.training.update.sampled import make_sampled_batch
from rlkit.training.update.scored import score
from rlkit.training.update.weighted import set_known_old, weigh
from rlkit.types import Rollout, Weighted


class Updated(NamedTuple):
    """Hold the batch of a step's updates, and the effects of these updates."""

    batch: Weighted
    terms: UpdateTerms
    drift: dict[str, float]
    start: drift.Few | None  # a few rollouts of the first step, to measure the drift from the start


def update_models(
    u: Update, optimizers: Optimizers, rollouts: Sequence[Rollout], start: drift.Few | None
) -> Updated:
    """Train policy and critic on the rollouts in `u.trained`.

    Args:
      rollouts: all rollouts of the step.
      start: `Updated.start` of the previous step, or None in the first step.
    """
    batch = weigh_batch(u)
    own, start = drift.prepare_drift(u, batch, start, rollouts)
    terms = UpdateTerms()
    for minibatch in step_minibatches(u, batch, terms):
        update = partial(make_one_update, u, optimizers, minibatch, terms)
        if not u.micro.retry_update(minibatch, update, terms):
            break
    terms.gather()
    moved = drift.measure_drift(u, drift.add_terms(own, terms.tokens), start)
    ranks.reshard(u.model)
    return Updated(batch, terms, moved, start)


def weigh_batch(u: Update) -> Weighted:
    """Return the batch of the step with all inputs of the loss. Later code does not change this
    batch."""
    batch = make_sampled_batch(u)
    scored = u.micro.retry_halved(batch, partial(score, u, batch))
    return set_known_old(u, weigh(scored, u.x.algorithm, u.x.kl))


def step_metrics(
    u: Update,
    done: Updated,
    rollouts: Sequence[Rollout],
    updates: dict[int, int],
    tokens: int,
) -> dict[str, Any]:
    """Return the metrics of a step.

    Args:
      rollouts: all rollouts of the step.
      updates: version of the weights → steps of the policy's optimizer up to this version.
      tokens: number of tokens in all batches of the run so far, prompts included.
    """
    batch, terms, x = done.batch, done.terms, u.x
    metrics: dict[str, Any] = {**summarize(rollouts), **update_metrics(batch, terms, x)}
    metrics |= performance(batch, terms, u.clock, tokens=tokens, device=batch.ids.device)
    metrics |= refill_metrics(rollouts, batch)
    if x.asynchrony.mode != "none" or x.reuse.active:
        metrics |= staleness_metrics(batch, terms, step=u.step, updates=updates)
    return metrics | done.drift
