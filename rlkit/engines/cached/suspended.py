"""A scheduler in the middle of completions as plain values and tensors, and back: a run killed then draws the same bits.

Keys and values are part of it, since no set of weights would give them again where the weights have changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from rlkit.engines.cached.cache import Slots
from rlkit.engines.cached.sampler import STATE
from rlkit.engines.cached.scheduler import Row, Scheduler
from rlkit.types import SamplingParams

BUDGET = ("inside", "used", "written")  # of a thinking budget, beside its tails


def suspended(scheduler: Scheduler) -> dict[str, Any]:
    """A copy of all that decides what is drawn next, apart from the weights: for caches in which each slot has its own positions.

    Keys of episodes are those of this process; a row is known again by the seed of its completion.
    """
    plain: dict[str, Any] = {"rounds": scheduler.rounds, "version": scheduler.version, "drawn": scheduler.drawn}
    cache, n = scheduler.cache, len(scheduler.rows)
    if cache is None or scheduler.params is None:
        return {"plain": plain, "tensors": {}}
    sampler = scheduler.sampler
    length = min(int(sampler.position[:n].max()) + 1, cache.capacity) if n else 0
    plain |= {
        "params": scheduler.params._asdict(), "slots": cache.slots, "positions": cache.capacity, "capacity": scheduler.capacity,
        "rows": [asdict(row) for row in scheduler.rows], "queue": [asdict(row) for row in scheduler.queue],
        "resumed": [i for i, row in enumerate(scheduler.rows) if any(row is other for other in scheduler.resumed)],
        "reading": scheduler.reading, "parts": scheduler.parts, "changed": scheduler.changed,
        "tails": sampler.budget.tails[:n] if sampler.budget else [],
    }  # fmt: skip
    tensors = {name: getattr(sampler, name)[:n].clone() for name in STATE}
    if sampler.budget is not None:
        tensors |= {name: getattr(sampler.budget, name)[:n].clone() for name in BUDGET}
    for name in ("keys", "values"):
        tensors |= {f"{name}.{i}": store[:n, :, :length].clone() for i, store in enumerate(getattr(cache, name))}
    return {"plain": plain, "tensors": tensors}


@torch.inference_mode()
def go_on(scheduler: Scheduler, plain: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[int, Row]:
    """Puts that into a scheduler that is new; seed of the completion → row, whose key has to be set."""
    scheduler.rounds, scheduler.version, scheduler.drawn = plain["rounds"], plain["version"], list(plain["drawn"])
    if "params" not in plain:
        return {}
    scheduler.params = SamplingParams(**plain["params"])
    scheduler.cache = cache = Slots(plain["slots"], plain["positions"], scheduler.device)
    scheduler.rows, scheduler.queue = ([_row(own) for own in plain[name]] for name in ("rows", "queue"))
    scheduler.resumed = [scheduler.rows[i] for i in plain["resumed"]]
    scheduler.reading, scheduler.parts = list(plain["reading"]), [tuple(part) for part in plain["parts"]]
    scheduler.changed, scheduler.capacity = plain["changed"], plain["capacity"]
    scheduler.sampler = sampler = scheduler.sampler_of(scheduler.params)
    n = len(scheduler.rows)
    for name in STATE:
        getattr(sampler, name)[:n] = tensors[name]
    if sampler.budget is not None:
        sampler.budget.tails[:n] = plain["tails"]
        for name in BUDGET:
            getattr(sampler.budget, name)[:n] = tensors[name]
    for name in ("keys", "values"):
        for i in range(sum(key.startswith(f"{name}.") for key in tensors)):
            kept = tensors[f"{name}.{i}"].to(scheduler.device)
            store = kept.new_zeros(cache.slots, kept.shape[1], cache.capacity, kept.shape[3])
            store[:n, :, : kept.shape[2]] = kept
            getattr(cache, name).append(store)
    return {row.seed: row for row in (*scheduler.rows, *scheduler.queue)}


def _row(own: Mapping[str, Any]) -> Row:
    """A row from its fields, lists made tuples again. Its key means nothing in this process."""
    held = None if own["held"] is None else tuple(own["held"])
    spans = [(first, version) for first, version in own["spans"]]
    return Row(**dict(own) | {"key": -1, "prompt": tuple(own["prompt"]), "held": held, "spans": spans})
