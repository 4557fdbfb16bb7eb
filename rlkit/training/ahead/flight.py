"""Records of sampling ahead: a request for the groups of a step, the groups, and what is in flight.

    weights after step v ── sample ──▶ groups of step v + staleness ── in flight ──▶ learner.step

Groups are numbered by their RL step and their position in it. They are requested and consumed in
that order, and none is dropped: at most (staleness + 1) × batch.prompts are sampled and not yet
learned from. With a staleness of 0 this is the synchronous run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.episodes.record import from_bytes, to_bytes
from rlkit.episodes.stream import StreamState, take_again
from rlkit.errors import DataError
from rlkit.training.ahead.settings import settings_of
from rlkit.training.experiment import Experiment
from rlkit.training.schedules.progress import Progress, foreseen
from rlkit.types import Rollout, Task


class StepGroups(NamedTuple):
    """The groups of an RL step, sampled and scored."""

    step: int  # RL steps done before the one that learns from them
    version: int  # RL steps that the weights had done which sampled them
    sampled: list[Rollout]  # all scored episodes
    trained: list[Rollout]  # those of them to train on
    before: StreamState  # the prompts that they were drawn from
    after: StreamState  # the prompts behind them
    settings: str  # what else decided them (`settings_of`)


class Request(NamedTuple):
    """What decides the groups of an RL step that are not sampled yet."""

    step: int
    version: int
    progress: Progress  # at the time of the request: the step's experiment follows from it
    before: StreamState | None  # None: the prompts behind the request before this one
    settings: str
    kernel: str | None = None  # generation.kernel of the trainer, for another process
    weights: str = ""  # a digest of the weights due to sample them, where a journal needs it

    @property
    def after(self) -> None:
        """The prompts behind the groups are unknown until they are sampled: refills decide them."""


class Flight(NamedTuple):
    """The groups in flight, in the order of their steps; those that are there already come
    first."""

    consumed: StreamState = StreamState()  # the prompts behind the last step that is done
    ahead: tuple[StepGroups | Request, ...] = ()

    @property
    def after(self) -> StreamState | None:
        """The prompts that the next groups are drawn from; None while they are unknown."""
        return self.ahead[-1].after if self.ahead else self.consumed

    def followed_by(self, groups: StepGroups | Request) -> Flight:
        """This flight with the groups of one more step."""
        return self._replace(ahead=(*self.ahead, groups))


def version_of(step: int, staleness: int) -> int:
    """Which weights sample the groups of an RL step, as the steps that they have done: the only
    place that decides it.

    If a resumed run no longer has those weights (its staleness is lower, or it has more steps), the
    current weights sample; they are newer.

    >>> [version_of(step, 2) for step in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - staleness)


def due_steps(x: Experiment, flight: Flight, now: int) -> list[int]:
    """The steps behind the flight whose groups the weights of version `now` have to sample."""
    first = flight.ahead[-1].step + 1 if flight.ahead else now
    steps = range(first, max(x.trainer.steps, now + 1))
    return [*takewhile(lambda step: version_of(step, x.asynchrony.staleness) <= now, steps)]


def count_groups(x: Experiment, ahead: Sequence[StepGroups | Request]) -> int:
    """Groups that are sampled, or will be when a request is answered without refills."""
    return sum(
        len({r.group for r in own.sampled}) if isinstance(own, StepGroups) else x.batch.prompts
        for own in ahead
    )


# ---------------------------------------------------------------------------------- in a checkpoint


def pack_flight(flight: Flight, weights: Mapping[int, Tensor] | None = None) -> dict[str, Any]:
    """The flight as plain values and tensors. Tasks are left out: the prompts that groups were
    drawn from give them again. `weights`: version → bytes of those due to answer the requests."""
    requests = [own for own in flight.ahead if isinstance(own, Request)]
    return {
        "stream": list(flight.consumed),
        "flight": [pack_groups(own) for own in flight.ahead if isinstance(own, StepGroups)],
        "requests": [
            own._asdict() | {"progress": own.progress._asdict(), "before": None} for own in requests
        ],
        "weights": dict(weights or {}),
    }


def unpack_flight(saved: Mapping[str, Any], tasks: Sequence[Task], *, seed: int) -> Flight:
    """The inverse of `pack_flight`. Raises DataError where the tasks have changed."""
    groups = [unpack_groups(own, tasks, seed=seed) for own in saved["flight"]]
    requests = [
        Request(**own | {"progress": Progress(**own["progress"])}) for own in saved["requests"]
    ]
    return Flight(StreamState(*saved["stream"]), (*groups, *requests))


def pack_groups(groups: StepGroups) -> dict[str, Any]:
    """Groups as plain values and tensors, without their tasks."""
    rollouts = [r._replace(task=Task(r.task.id, ())) for r in groups.sampled]
    kept = {id(r) for r in groups.trained}
    # as a tensor, so that a save knows its size
    data = torch.frombuffer(bytearray(to_bytes(rollouts)), dtype=torch.uint8)
    return groups._asdict() | {
        "sampled": data,
        "trained": [i for i, r in enumerate(groups.sampled) if id(r) in kept],
        "before": list(groups.before),
        "after": list(groups.after),
    }


def unpack_groups(saved: Mapping[str, Any], tasks: Sequence[Task], *, seed: int) -> StepGroups:
    """The inverse of `pack_groups`. Raises DataError where the tasks have changed."""
    rollouts = from_bytes(saved["sampled"].numpy().tobytes())
    before = StreamState(*saved["before"])
    after = StreamState(*saved["after"])
    drawn = take_again(tasks, before, after, 1 + max(r.group for r in rollouts), seed=seed)
    if any(r.task.id != drawn[r.group].id for r in rollouts):
        raise DataError(
            "the groups in flight are of problems that the task no longer has; restore task.path"
            " and the data, or start anew"
        )
    rollouts = [r._replace(task=drawn[r.group]) for r in rollouts]
    own = {
        "sampled": rollouts,
        "trained": [rollouts[i] for i in saved["trained"]],
        "before": before,
        "after": after,
    }
    return StepGroups(**{**saved, **own})


def keep_valid(
    x: Experiment, flight: Flight, progress: Progress, kinds: type | tuple[type, ...]
) -> Flight:
    """The flight of a resumed run, cut before the first groups that the config would now sample
    otherwise, and before the first that are not of these kinds. A line names the steps that are
    cut."""

    def holds(own: StepGroups | Request) -> bool:
        return (
            isinstance(own, kinds)
            and own.version >= version_of(own.step, x.asynchrony.staleness)
            and own.settings == settings_of(foreseen(x, progress, own.step))
        )

    kept = tuple(takewhile(holds, flight.ahead))
    cut = flight.ahead[len(kept) :]
    if cut:
        last = f" to {cut[-1].step + 1}" if len(cut) > 1 else ""
        print(
            f"resume: the groups in flight of step {cut[0].step + 1}{last} are sampled again with"
            " the current weights, because the config changed",
            flush=True,
        )
    return flight._replace(ahead=kept)
