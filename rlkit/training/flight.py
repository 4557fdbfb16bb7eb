"""Groups in flight: which weights sample the groups of a step, and what is kept of them until their
step learns from them.

    weights after step v ── sample ──▶ groups of step v + staleness ── in flight ──▶ learner.step

Groups are numbered by their RL step and their position in it. They are dispatched and consumed in
that order, and none is dropped: at most (staleness + 1) × batch.prompts are sampled and not yet
learned from. With a staleness of 0 this is the synchronous run.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rlkit.algorithm import asks
from rlkit.episodes.record import from_bytes, to_bytes
from rlkit.episodes.stream import StreamState, take_again
from rlkit.errors import DataError, written
from rlkit.training.experiment import Experiment
from rlkit.training.groups import experience
from rlkit.training.metrics import Clock
from rlkit.training.schedules.progress import Progress, foreseen
from rlkit.types import Policy, Rollout, Task

if TYPE_CHECKING:
    from rlkit.training.learner import Learner
    from rlkit.training.overlap import SamplingProcess


class Dispatched(NamedTuple):
    """The groups of an RL step, sampled and scored."""

    step: int  # RL steps done before the one that learns from them
    version: int  # RL steps that the weights had done which sampled them
    sampled: list[Rollout]  # all scored episodes
    trained: list[Rollout]  # those of them to train on
    before: StreamState  # the prompts that they were dispatched from
    after: StreamState  # and behind them
    settings: str  # what else decided them


class Asked(NamedTuple):
    """Groups that another process has been asked for, and are not there yet
    (asynchrony=overlap)."""

    step: int
    version: int
    # of the trainer when it asked: what is known of the step's experiment follows from it
    progress: Progress
    before: StreamState | None  # None: behind the request before it
    settings: str
    kernel: str | None = None  # generation.kernel, as the trainer goes on with it
    weights: str = ""  # a digest of those that are due to sample them, where a journal needs it

    @property
    def after(self) -> None:
        """Known once they are there: refills decide it."""


class Flight(NamedTuple):
    """The prompts behind the last step that is done, and the groups in flight, in their order;
    first those that are there already."""

    consumed: StreamState = StreamState()
    ahead: tuple[Dispatched | Asked, ...] = ()
    weights: Mapping[
        int, Tensor
    ] = {}  # after a resume: version → bytes, of requests that have to be made again


def version_of(step: int, staleness: int) -> int:
    """Which weights sample the groups of an RL step, as the steps that they have done: the only
    place that decides it.

    Where those are no longer there (a resumed run with a lower staleness, or with more steps) it is
    the weights of then, which are newer.

    >>> [version_of(step, 2) for step in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - staleness)


def next_groups(
    learner: Learner, tasks: Sequence[Task], flight: Flight, process: SamplingProcess | None = None
) -> tuple[Dispatched, Flight]:
    """The groups that the step to come learns from, and what is in flight behind them.

    First all groups are sampled that the weights as they are now are due to sample, each with the
    settings of its own step; by `process`, where there is one, which goes on with them while the
    trainer updates.
    """
    learner.begin()
    now = learner.rl_step
    x = learner.experiment
    after = flight.ahead[-1].step + 1 if flight.ahead else now
    due = [
        *takewhile(
            lambda s: version_of(s, x.asynchrony.staleness) <= now,
            range(after, max(x.trainer.steps, now + 1)),
        )
    ]
    published = (
        process.publish(learner.policy.model, now, x.asynchrony.staleness)
        if process and due
        else 0.0
    )
    for step in due:
        before = flight.ahead[-1].after if flight.ahead else flight.consumed
        own = settings_of(foreseen(x, learner.progress, step))
        kernel = getattr(learner.x.generation.engine, "kernel", None)
        request = Asked(step, now, learner.progress, before, own, kernel)
        if process is None:
            groups = dispatched(x, learner.policy, tasks, request, clock=learner.clock)
        flight = flight._replace(ahead=(*flight.ahead, process.ask(request) if process else groups))
    first = flight.ahead[0]
    rest = flight.ahead[1:]
    begun = time.perf_counter()
    if isinstance(first, Asked):
        assert process is not None
        with learner.clock.part("generate"):
            first = process.receive(first)
        learner.clock.sessions += process.sessions
        if process.kernel and hasattr(learner.x.generation.engine, "elsewhere"):
            learner.x.generation.engine.elsewhere = process.kernel
    learner.in_flight = {
        "in_flight_groups": sum(
            x.batch.prompts if isinstance(g, Asked) else _count(g) for g in rest
        )
    }
    if process is not None:
        handed = process.figures.get("handover_s", 0.0) + published
        learner.in_flight |= process.figures | {
            "wait_s": time.perf_counter() - begun,
            "handover_s": handed,
        }
    return first, Flight(first.after, rest)


def _count(groups: Dispatched) -> int:
    return len({r.group for r in groups.sampled})


def dispatched(
    x: Experiment,
    policy: Policy,
    tasks: Sequence[Task],
    request: Asked,
    last: StreamState | None = None,
    *,
    clock: Clock,
) -> Dispatched:
    """Groups of a step, sampled and scored with its own settings by the weights as they are now;
    `last`: behind the request before it."""
    before = last if request.before is None else request.before
    assert before is not None
    x = foreseen(x, request.progress, request.step)
    sampled, trained, after = experience(
        x, policy, tasks, before, step=request.step, version=request.version, clock=clock
    )
    return Dispatched(
        request.step, request.version, sampled, trained, before, after, request.settings
    )


def settings_of(x: Experiment) -> str:
    """A digest of what decides groups beside weights and prompts: sampling, environment, reward,
    batch, refills. Functions by name."""
    refills = (x.algorithm.max_refills, x.algorithm.group_filter) if x.algorithm.max_refills else ()
    greedy = [True] if asks(x.algorithm.advantage, "greedy_rewards") else []
    chosen = [] if x.sampler.weigh is None else [x.sampler]
    parts = _plain(
        [
            x.batch,
            x.generation.params,
            x.environment,
            x.reward,
            refills,
            x.algorithm.episodes,
            *greedy,
            *chosen,
        ]
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _plain(part: Any) -> Any:
    if isinstance(part, partial):
        return [written(part), _plain(part.keywords)]
    if hasattr(part, "_asdict"):
        part = part._asdict()
    if isinstance(part, Mapping):
        return {str(key): _plain(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    return part if isinstance(part, int | float | str | None) else written(part)


# ---------------------------------------------------------------------------------- in a checkpoint


def packed(flight: Flight, process: SamplingProcess | None = None) -> dict[str, Any]:
    """The flight as plain values and tensors. Tasks are left out: the prompts that groups were
    dispatched from give them again.

    Of groups that `process` has not sampled yet the request is kept, with the weights that they are
    due to be sampled by.
    """
    out: list[dict[str, Any]] = []
    if process is not None:
        flight = flight._replace(ahead=process.arrived(flight.ahead))
    for groups in takewhile(lambda groups: isinstance(groups, Dispatched), flight.ahead):
        assert isinstance(groups, Dispatched)
        out.append(sealed(groups))
    asked = [groups for groups in flight.ahead if isinstance(groups, Asked)]
    weights = {
        r.version: process.slots.saved(r.version)
        for r in asked
        if process and process.slots is not None
    } or dict(flight.weights)
    requests = [r._asdict() | {"progress": r.progress._asdict(), "before": None} for r in asked]
    return {
        "stream": list(flight.consumed),
        "flight": out,
        "requests": requests,
        "weights": weights,
    }


def sealed(groups: Dispatched) -> dict[str, Any]:
    """Groups as plain values and tensors, without their tasks."""
    rollouts = [r._replace(task=Task(r.task.id, ())) for r in groups.sampled]
    kept = {id(r) for r in groups.trained}
    data = torch.frombuffer(
        bytearray(to_bytes(rollouts)), dtype=torch.uint8
    )  # of which a save knows the size
    own = {"sampled": data, "trained": [i for i, r in enumerate(groups.sampled) if id(r) in kept]}
    return groups._asdict() | own | {"before": list(groups.before), "after": list(groups.after)}


def unsealed(own: Mapping[str, Any], tasks: Sequence[Task], *, seed: int) -> Dispatched:
    """The inverse. Raises DataError where the tasks have changed."""
    rollouts = from_bytes(own["sampled"].numpy().tobytes())
    before = StreamState(*own["before"])
    after = StreamState(*own["after"])
    drawn = take_again(tasks, before, after, 1 + max(r.group for r in rollouts), seed=seed)
    if any(r.task.id != drawn[r.group].id for r in rollouts):
        raise DataError(
            "the groups in flight are of problems that the task no longer has; restore task.path"
            " and the data, or start anew"
        )
    rollouts = [r._replace(task=drawn[r.group]) for r in rollouts]
    return Dispatched(
        **{
            **own,
            "sampled": rollouts,
            "trained": [rollouts[i] for i in own["trained"]],
            "before": before,
            "after": after,
        }
    )


def restored(saved: Mapping[str, Any], tasks: Sequence[Task], *, seed: int) -> Flight:
    """The inverse, of a checkpoint's state. Raises DataError where the tasks have changed."""
    ahead = [unsealed(own, tasks, seed=seed) for own in saved["flight"]]
    asked = [Asked(**r | {"progress": Progress(**r["progress"])}) for r in saved["requests"]]
    return Flight(StreamState(*saved["stream"]), (*ahead, *asked), saved["weights"])


def continued(learner: Learner, flight: Flight, process: SamplingProcess | None = None) -> Flight:
    """The flight of a resumed run. Groups that the config of now would have sampled otherwise, and
    those behind them, are sampled again.

    Those that were asked for are asked for again, of the weights that were due to sample them.
    """

    def holds(groups: Dispatched | Asked) -> bool:
        x = foreseen(learner.experiment, learner.progress, groups.step)
        if isinstance(groups, Asked) and process is None:
            return False
        return groups.version >= version_of(
            groups.step, x.asynchrony.staleness
        ) and groups.settings == settings_of(x)

    kept = tuple(takewhile(holds, flight.ahead))
    again = flight.ahead[len(kept) :]
    if again:
        steps = f"step {again[0].step + 1}" + (
            f" to {again[-1].step + 1}" if len(again) > 1 else ""
        )
        print(
            f"resume: the groups in flight of {steps} are sampled again by the weights of now, as"
            " the config asks for others",
            flush=True,
        )
    asked = [groups for groups in kept if isinstance(groups, Asked)]
    if process is None or not asked:
        return flight._replace(ahead=kept, weights={})
    done = kept[: -len(asked)]
    asked[0] = asked[0]._replace(before=done[-1].after if done else flight.consumed)
    slots = process.slots_of(learner.policy.model, learner.experiment.asynchrony.staleness)
    for version in {groups.version for groups in asked}:
        slots.restore(version, flight.weights[version])
    return flight._replace(ahead=(*done, *map(process.ask, asked)), weights={})
