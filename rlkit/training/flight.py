"""Groups in flight: which weights sample the groups of a step, and what is kept of them until their step learns from them.

    weights after step v ── sample ──▶ groups of step v + staleness ── in flight ──▶ learner.step

Groups are numbered by their RL step and their position in it. They are dispatched and consumed in that order, and none is dropped: at
most (staleness + 1) × batch.prompts are sampled and not yet learned from. With a staleness of 0 this is the synchronous run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rlkit.algorithm import asks
from rlkit.episodes.record import from_bytes, to_bytes
from rlkit.episodes.stream import StreamState, take
from rlkit.errors import DataError, written
from rlkit.training.experiment import Experiment
from rlkit.training.groups import experience
from rlkit.training.schedules.progress import foreseen
from rlkit.types import Rollout, Task

if TYPE_CHECKING:
    from rlkit.training.learner import Learner


class Dispatched(NamedTuple):
    """The groups of an RL step, sampled and scored."""

    step: int  # RL steps done before the one that learns from them
    version: int  # RL steps that the weights had done which sampled them
    sampled: list[Rollout]  # all scored episodes
    trained: list[Rollout]  # those of them to train on
    before: StreamState  # the prompts that they were dispatched from
    after: StreamState  # and behind them
    settings: str  # what else decided them


class Flight(NamedTuple):
    """The prompts behind the last step that is done, and the groups in flight, in their order."""

    consumed: StreamState = StreamState()
    ahead: tuple[Dispatched, ...] = ()


def version_of(step: int, staleness: int) -> int:
    """Which weights sample the groups of an RL step, as the steps that they have done: the only place that decides it.

    Where those are no longer there (a resumed run with a lower staleness, or with more steps) it is the weights of then, which are newer.

    >>> [version_of(step, 2) for step in range(5)]
    [0, 0, 0, 1, 2]
    """
    return max(0, step - staleness)


def next_groups(learner: Learner, tasks: Sequence[Task], flight: Flight) -> tuple[Dispatched, Flight]:
    """The groups that the step to come learns from, and what is in flight behind them.

    First all groups are sampled that the weights as they are now are due to sample, each with the settings of its own step.
    """
    learner.begin()
    now, x = learner.rl_step, learner.experiment
    after = flight.ahead[-1].step + 1 if flight.ahead else now
    for step in takewhile(lambda s: version_of(s, x.asynchrony.staleness) <= now, range(after, max(x.trainer.steps, now + 1))):
        flight = flight._replace(ahead=(*flight.ahead, _dispatched(learner, tasks, flight, step)))
    first, rest = flight.ahead[0], flight.ahead[1:]
    learner.in_flight = sum(len({r.group for r in groups.sampled}) for groups in rest)
    return first, Flight(first.after, rest)


def _dispatched(learner: Learner, tasks: Sequence[Task], flight: Flight, step: int) -> Dispatched:
    x, now = foreseen(learner.experiment, learner.progress, step), learner.rl_step
    before = flight.ahead[-1].after if flight.ahead else flight.consumed
    sampled, trained, after = experience(x, learner.policy, tasks, before, step=step, version=now, clock=learner.clock)
    return Dispatched(step, now, sampled, trained, before, after, settings_of(x))


def settings_of(x: Experiment) -> str:
    """A digest of what decides groups beside weights and prompts: sampling, environment, reward, batch, refills. Functions by name."""
    refills = (x.algorithm.max_refills, x.algorithm.group_filter) if x.algorithm.max_refills else ()
    greedy = [True] if asks(x.algorithm.advantage, "greedy_rewards") else []
    parts = _plain([x.batch, x.generation.params, x.environment, x.reward, refills, x.algorithm.episodes, *greedy])
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


# ---------------------------------------------------------------------------------------------------- in a checkpoint


def packed(flight: Flight) -> dict[str, Any]:
    """The flight as plain values and tensors. Tasks are left out: the prompts that groups were dispatched from give them again."""
    out = []
    for groups in flight.ahead:
        rollouts, kept = [r._replace(task=Task(r.task.id, ())) for r in groups.sampled], {id(r) for r in groups.trained}
        data = torch.frombuffer(bytearray(to_bytes(rollouts)), dtype=torch.uint8)  # of which a save knows the size
        own = {"sampled": data, "trained": [i for i, r in enumerate(groups.sampled) if id(r) in kept]}
        out.append(groups._asdict() | own | {"before": list(groups.before), "after": list(groups.after)})
    return {"stream": list(flight.consumed), "flight": out}


def restored(saved: Mapping[str, Any], tasks: Sequence[Task], *, seed: int) -> Flight:
    """The inverse, of a checkpoint's state. Raises DataError where the tasks have changed."""
    ahead = []
    for own in saved.get("flight", ()):
        rollouts, before = from_bytes(own["sampled"].numpy().tobytes()), StreamState(*own["before"])
        drawn, after = take(tasks, before, 1 + max(r.group for r in rollouts), seed=seed)
        if any(r.task.id != drawn[r.group].id for r in rollouts) or list(after) != own["after"]:
            raise DataError(
                "the groups in flight are of problems that the task no longer has; restore task.path and the data, or start anew"
            )
        rollouts = [r._replace(task=drawn[r.group]) for r in rollouts]
        groups = own | {"sampled": rollouts, "trained": [rollouts[i] for i in own["trained"]], "before": before, "after": after}
        ahead.append(Dispatched(**groups))
    return Flight(StreamState(*saved["stream"]), tuple(ahead))


def continued(learner: Learner, flight: Flight) -> Flight:
    """The flight of a resumed run. Groups that the config of now would have sampled otherwise, and those behind them, are sampled again."""

    def holds(groups: Dispatched) -> bool:
        x = foreseen(learner.experiment, learner.progress, groups.step)
        return groups.version >= version_of(groups.step, x.asynchrony.staleness) and groups.settings == settings_of(x)

    kept = tuple(takewhile(holds, flight.ahead))
    if again := flight.ahead[len(kept) :]:
        steps = f"step {again[0].step + 1}" + (f" to {again[-1].step + 1}" if len(again) > 1 else "")
        print(f"resume: the groups in flight of {steps} are sampled again by the weights of now, as the config asks for others", flush=True)
    return flight._replace(ahead=kept)
