"""Record the groups in flight: groups that have been requested, but not yet trained on.

    weights after step v ── sample ──▶ groups of step v + staleness ── in flight ──▶ learner.step

A group is in flight from its request until the RL step that learns from it. Each group is numbered
by its RL step and by its position in this step. Groups are requested and consumed in this order,
and no group is dropped. At most staleness + 1 steps have groups in flight. With a
staleness of 0, a run samples and trains in turn.
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
    """Hold the groups of one RL step, sampled and scored."""

    step: int  # how many RL steps are done before the step that learns from the groups
    version: int  # how many RL steps had trained the sampling weights
    sampled: list[Rollout]  # all scored episodes of the step
    trained: list[Rollout]  # the rollouts to train on
    before: StreamState  # the prompt stream before the step took its prompts
    after: StreamState  # the prompt stream after the step took its prompts
    settings: str  # digest of all other settings with an effect on the groups (`digest_settings`)


class Request(NamedTuple):
    """Describe the groups of an RL step that are still to be sampled."""

    step: int
    version: int
    progress: Progress  # of the run when it made the request; it determines the experiment
    before: StreamState | None  # None: continue the prompt stream after the previous request
    settings: str
    weights: str = ""  # fingerprint of the sampling weights; empty unless a journal needs it

    @property
    def after(self) -> None:
        """Return None. Refills may take more prompts, so the state of the prompt stream is known
        only after sampling."""


InFlight = StepGroups | Request


class Flight(NamedTuple):
    """List the groups in flight, in the order of their RL steps. The list holds the groups that are
    already sampled, and the requests for all other groups."""

    consumed: StreamState = StreamState()  # the prompt stream after the last finished RL step
    ahead: tuple[InFlight, ...] = ()

    @property
    def after(self) -> StreamState | None:
        """Return the state of the prompt stream after all groups in flight. Return None as long as
        this state is unknown."""
        return self.ahead[-1].after if self.ahead else self.consumed


def compute_version(step: int, staleness: int) -> int:
    """Return the version of the weights that samples the groups of an RL step. A version is the
    number of RL steps that have trained the weights.

    A resumed run may no longer have this version, because asynchrony.staleness was lowered or
    trainer.steps was raised. The run then samples with the current weights, which are newer.

    >>> [compute_version(step, 2) for step in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - staleness)


def list_due_steps(x: Experiment, flight: Flight, now: int) -> list[int]:
    """List the RL steps for which groups can be requested now. These steps come after the last step
    with groups in flight, and weights of version `now` may sample their groups."""
    first = flight.ahead[-1].step + 1 if flight.ahead else now
    steps = range(first, max(x.trainer.steps, now + 1))
    return [*takewhile(lambda step: compute_version(step, x.asynchrony.staleness) <= now, steps)]


def digest_settings(x: Experiment) -> str:
    """Return a digest of all settings with an effect on a step's groups: sampling, environment,
    reward, batch and refills. For a function, the digest contains its name.

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
    """Convert the groups in flight to plain values and tensors, for a checkpoint. The result holds
    no tasks, because the prompt stream can produce the same tasks again.

    Args:
      weights: version → the weights as bytes, for every version needed by a request in flight.
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
    """Restore the groups in flight from the value of `pack_flight`. Drop the groups that the
    present config would sample differently.

    Entries are checked in the order of their RL steps. The first entry that does not fit is
    dropped, together with all later entries. An entry also does not fit if its type (groups or
    request) is not in `kinds`. A printed line names the dropped steps.

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
    """Encode rollouts as bytes in a tensor, so that the size of a checkpoint is known before the
    checkpoint is written. Of each task, only its id and its part of the mixture are kept."""
    plain = [r._replace(task=Task(r.task.id, (), part=r.task.part)) for r in rollouts]
    return torch.frombuffer(bytearray(encode_rollouts(plain)), dtype=torch.uint8)


def unpack_rollouts(data: Tensor) -> list[Rollout]:
    """Decode rollouts from the tensor made by `pack_rollouts`."""
    return decode_rollouts(data.numpy().tobytes())
