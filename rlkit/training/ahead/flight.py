"""Records of sampling ahead: a request for the groups of a step, the groups, and what is in flight.

    weights after step v ── sample ──▶ groups of step v + staleness ── in flight ──▶ learner.step

Groups are numbered by their RL step and their position in it. They are requested and consumed in
this order, and none is dropped. At most (staleness + 1) × batch.prompts groups wait for their
learning step. With a staleness of 0 this is the synchronous run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkit.algorithm import asks_for
from rlkit.episodes.record import decode_rollouts, encode_rollouts
from rlkit.episodes.stream import CHANGED, StreamState, take_again
from rlkit.errors import DataError, name_function
from rlkit.training.experiment import Experiment
from rlkit.training.schedules.progress import Progress, foresee_step
from rlkit.types import Rollout, Task, is_record


class StepGroups(NamedTuple):
    """The groups of an RL step, sampled and scored."""

    step: int  # RL steps done before their learning step
    version: int  # how many RL steps had trained the sampling weights
    sampled: list[Rollout]  # all scored episodes
    trained: list[Rollout]  # the rollouts to train on
    before: StreamState  # the prompt stream before the step's prompts were drawn
    after: StreamState  # the prompt stream after they were drawn
    settings: str  # digest of everything else that affects the groups (`digest_settings`)


class Request(NamedTuple):
    """A request to sample the groups of an RL step."""

    step: int
    version: int
    progress: Progress  # of the run at the time of the request; it determines the experiment
    before: StreamState | None  # None: the prompt stream after the previous request
    settings: str
    weights: str = ""  # fingerprint of the sampling weights, if a journal needs it

    @property
    def after(self) -> None:
        """None: the prompt stream is unknown until the groups are sampled, because of refills."""


InFlight = StepGroups | Request


class Flight(NamedTuple):
    """The groups in flight, in the order of their steps: first sampled groups, then requests."""

    consumed: StreamState = StreamState()  # the prompt stream after the last finished step
    ahead: tuple[InFlight, ...] = ()

    @property
    def after(self) -> StreamState | None:
        """The prompts for the next groups; None while they are unknown."""
        return self.ahead[-1].after if self.ahead else self.consumed


def compute_version(step: int, staleness: int) -> int:
    """The version of the weights for sampling an RL step's groups, as a number of RL steps. Only
    this function decides it.

    If a resumed run no longer has these weights (its staleness is lower, or it has more steps), it
    samples with the current weights; they are newer.

    >>> [compute_version(step, 2) for step in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - staleness)


def list_due_steps(x: Experiment, flight: Flight, now: int) -> list[int]:
    """The steps that come after the last step in flight and have groups that the weights of version
    `now` should sample."""
    first = flight.ahead[-1].step + 1 if flight.ahead else now
    steps = range(first, max(x.trainer.steps, now + 1))
    return [*takewhile(lambda step: compute_version(step, x.asynchrony.staleness) <= now, steps)]


def digest_settings(x: Experiment) -> str:
    """Digest sampling, environment, reward, batch and refills of a step's experiment. Functions
    enter the digest by name."""
    own = x.algorithm
    parts = [
        x.batch,
        x.generation.params,
        x.environment,
        x.reward,
        x.sampler,
        own.max_refills,
        own.group_filter if own.max_refills else None,
        own.episodes,
        asks_for(own.advantage, "greedy_rewards"),
    ]
    return hashlib.sha256(repr(_plain(parts)).encode()).hexdigest()[:16]


def _plain(part: Any) -> Any:
    if isinstance(part, partial):
        return [name_function(part), _plain(part.keywords)]
    if is_record(part):
        part = part._asdict()
    if isinstance(part, Mapping):
        return {str(key): _plain(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    return part if isinstance(part, int | float | str | None) else name_function(part)


# ---------------------------------------------------------------------------------- in a checkpoint


def pack_flight(flight: Flight, weights: Mapping[int, Tensor] = {}) -> dict[str, Any]:
    """The flight as plain values and tensors. Tasks are left out, because the prompt stream can
    draw them again. `weights`: version → bytes of the weights still needed by requests."""
    return {
        "stream": list(flight.consumed),
        "flight": [pack_groups(own) for own in flight.ahead if isinstance(own, StepGroups)],
        "requests": [
            own._asdict() | {"progress": own.progress._asdict(), "before": None}
            for own in flight.ahead
            if isinstance(own, Request)
        ],
        "weights": weights,
    }


def unpack_flight(
    saved: Mapping[str, Any], tasks: Sequence[Task], x: Experiment, progress: Progress, kinds: Any
) -> Flight:
    """The inverse of `pack_flight`. The first groups that the present config would sample
    differently, or with a type that is not in `kinds`, are dropped, and so is everything after
    them. A printed line names the dropped steps.

    Raises: DataError if the tasks have changed.
    """

    def holds(own: InFlight) -> bool:
        return (
            isinstance(own, kinds)
            and own.version >= compute_version(own.step, x.asynchrony.staleness)
            and own.settings == digest_settings(foresee_step(x, progress, own.step))
        )

    ahead: list[InFlight] = [unpack_groups(own, tasks, seed=x.seed) for own in saved["flight"]]
    for own in saved["requests"]:
        ahead.append(Request(**own | {"progress": Progress(**own["progress"])}))
    kept = tuple(takewhile(holds, ahead))
    cut = ahead[len(kept) :]
    if cut:
        last = f" to {cut[-1].step + 1}" if len(cut) > 1 else ""
        print(
            f"resume: the groups in flight of step {cut[0].step + 1}{last} are sampled again with"
            " the current weights, because the config changed",
            flush=True,
        )
    return Flight(StreamState(*saved["stream"]), kept)


def pack_groups(groups: StepGroups) -> dict[str, Any]:
    """Groups as plain values and tensors, without their tasks."""
    kept = {id(r) for r in groups.trained}
    return groups._asdict() | {
        "sampled": pack_rollouts(groups.sampled),
        "trained": [i for i, r in enumerate(groups.sampled) if id(r) in kept],
        "before": list(groups.before),
        "after": list(groups.after),
    }


def unpack_groups(saved: Mapping[str, Any], tasks: Sequence[Task], *, seed: int) -> StepGroups:
    """The inverse of `pack_groups`. Raises DataError if the tasks have changed."""
    rollouts = unpack_rollouts(saved["sampled"])
    before = StreamState(*saved["before"])
    after = StreamState(*saved["after"])
    drawn = take_again(tasks, before, after, 1 + max(r.group for r in rollouts), seed=seed)
    if any(r.task.id != drawn[r.group].id for r in rollouts):
        raise DataError(CHANGED)
    sampled = [r._replace(task=drawn[r.group]) for r in rollouts]
    trained = [sampled[i] for i in saved["trained"]]
    return StepGroups(
        saved["step"], saved["version"], sampled, trained, before, after, saved["settings"]
    )


def pack_rollouts(rollouts: Sequence[Rollout]) -> Tensor:
    """Rollouts as bytes in a tensor, so a checkpoint's size is known before it is written. Of the
    tasks only id and part are kept."""
    plain = [r._replace(task=Task(r.task.id, (), part=r.task.part)) for r in rollouts]
    return torch.frombuffer(bytearray(encode_rollouts(plain)), dtype=torch.uint8)


def unpack_rollouts(data: Tensor) -> list[Rollout]:
    """The inverse of `pack_rollouts`."""
    return decode_rollouts(data.numpy().tobytes())
