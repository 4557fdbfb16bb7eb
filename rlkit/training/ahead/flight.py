"""Records of sampling ahead: a request for the groups of a step, the groups, and everything in
flight.

    weights after step v ── sample ──▶ groups of step v + staleness ── in flight ──▶ learner.step

"In flight" are the groups between their request and their learning step. Each group is numbered by
its RL step and by its position in this step. Groups are requested and consumed in this order, and
none is dropped. At most (staleness + 1) × batch.prompts groups wait for their learning step. With a
staleness of 0 this is the synchronous run.
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
    """The groups of one RL step, sampled and scored."""

    step: int  # how many RL steps are done before the step that learns from the groups
    version: int  # how many RL steps had trained the sampling weights
    sampled: list[Rollout]  # all scored episodes of the step
    trained: list[Rollout]  # the rollouts to train on
    before: StreamState  # the prompt stream before the step's prompts were drawn
    after: StreamState  # the prompt stream after they were drawn
    settings: str  # digest of all other settings with an effect on the groups (`digest_settings`)


class Request(NamedTuple):
    """A request to sample the groups of an RL step."""

    step: int
    version: int
    progress: Progress  # of the run when it made the request; it determines the experiment
    before: StreamState | None  # None: continue the prompt stream after the previous request
    settings: str
    weights: str = ""  # fingerprint of the sampling weights; empty unless a journal needs it

    @property
    def after(self) -> None:
        """Return None: refills may draw more prompts, so the state of the prompt stream is known
        only after sampling."""


InFlight = StepGroups | Request


class Flight(NamedTuple):
    """All sampled groups and requests in flight, in the order of their RL steps."""

    consumed: StreamState = StreamState()  # the prompt stream after the last finished RL step
    ahead: tuple[InFlight, ...] = ()

    @property
    def after(self) -> StreamState | None:
        """Return the state of the prompt stream for the next groups, or None as long as it is
        unknown."""
        return self.ahead[-1].after if self.ahead else self.consumed


def compute_version(step: int, staleness: int) -> int:
    """Return the version of the weights that samples the groups of an RL step. A version is a
    number of RL steps. Only this function decides it.

    A resumed run may no longer have this version, because asynchrony.staleness was lowered or
    trainer.steps was raised. It then samples with the current weights, which are newer.

    >>> [compute_version(step, 2) for step in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - staleness)


def list_due_steps(x: Experiment, flight: Flight, now: int) -> list[int]:
    """List the steps to request now. They come after the last step in flight, and their groups may
    be sampled by the weights of version `now`."""
    first = flight.ahead[-1].step + 1 if flight.ahead else now
    steps = range(first, max(x.trainer.steps, now + 1))
    return [*takewhile(lambda step: compute_version(step, x.asynchrony.staleness) <= now, steps)]


def digest_settings(x: Experiment) -> str:
    """Digest the settings with an effect on a step's groups: sampling, environment, reward, batch
    and refills. A function enters the digest by its name.

    Args:
      x: the experiment of the step.
    """
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
    """Convert a flight to plain values and tensors. The result holds no tasks, because the prompt
    stream can draw them again.

    Args:
      weights: version → bytes of the weights. It holds every version needed by a request in the
        flight.
    """
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
    """Restore a flight from the value of `pack_flight`, and drop the groups that no longer fit.

    The first groups or request that do not fit are dropped, together with everything after them. A
    printed line names the dropped steps. An entry does not fit if the present config would sample
    it differently, or if its type is not in `kinds`.

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
    """Convert groups to plain values and tensors, without their tasks."""
    kept = {id(r) for r in groups.trained}
    return groups._asdict() | {
        "sampled": pack_rollouts(groups.sampled),
        "trained": [i for i, r in enumerate(groups.sampled) if id(r) in kept],
        "before": list(groups.before),
        "after": list(groups.after),
    }


def unpack_groups(saved: Mapping[str, Any], tasks: Sequence[Task], *, seed: int) -> StepGroups:
    """Restore groups from the value of `pack_groups`. Raise DataError if the tasks have changed."""
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
    """Encode rollouts as bytes in a tensor, so that a checkpoint's size is known before it is
    written. Each task keeps only its id and its part of the mixture."""
    plain = [r._replace(task=Task(r.task.id, (), part=r.task.part)) for r in rollouts]
    return torch.frombuffer(bytearray(encode_rollouts(plain)), dtype=torch.uint8)


def unpack_rollouts(data: Tensor) -> list[Rollout]:
    """Decode rollouts from the tensor made by `pack_rollouts`."""
    return decode_rollouts(data.numpy().tobytes())
