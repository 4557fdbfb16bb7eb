"""The sampler of every step's groups, and its use by a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlkit.episodes.stream import StreamState
from rlkit.training.ahead.flight import (
    Flight,
    InFlight,
    Request,
    StepGroups,
    due_steps,
    settings_of,
)
from rlkit.training.experiment import Experiment
from rlkit.training.groups import experience
from rlkit.training.metrics import Clock
from rlkit.training.schedules.progress import Progress, foreseen
from rlkit.types import Policy, Task

Received = tuple[StepGroups, dict[str, float]]  # groups, and seconds of the hand-over by name


class GroupSource(Protocol):
    """Samples the groups of the requested steps.

    Calls come in this order, and requests in the order of their steps:

        publish, request, request, …, receive   in each step; publish only if requests follow
        state                                   between steps
        restore                                 at most once, before all others

    The flight says how much has been consumed, never the source: after a step interrupted in
    its sampling, `state` of the flight from before the step is still the one to go on from.
    """

    def publish(self, policy: Policy, version: int) -> None:
        """The policy's weights, as they are now, are this version: they sample for the requests
        until the next call."""

    def request(self, request: Request, clock: Clock) -> InFlight:
        """Ask for the groups of a step. Returns the groups if they are there already, else the
        request, completed by everything a later process needs to make it again."""

    def receive(self, groups: InFlight, clock: Clock) -> Received:
        """Wait for the groups `request` answered with this.

        Raises: the errors of sampling them.
        """

    def state(self, flight: Flight) -> dict[str, Any]:
        """Everything for a later process to go on, as plain values and tensors."""

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """Go on from a `state`. Groups the config would now sample otherwise, and the ones behind
        them, are left out of the flight.

        Raises: DataError if the tasks have changed.
        """


def next_groups(
    source: GroupSource,
    flight: Flight,
    x: Experiment,
    policy: Policy,
    *,
    progress: Progress,
    clock: Clock,
) -> tuple[StepGroups, Flight, dict[str, float]]:
    """The groups for the step to come, the flight behind them, and figures for the
    step's row.

    First it requests all groups due from the current weights, each with the settings
    of its own step. If it is interrupted, the given flight still holds.

    staleness/in_flight_groups     groups sampled, or being sampled, for later steps
    staleness/wait_s               asynchrony=overlap, seconds: the trainer waited for its
                                   groups; idle_s: the sampling process waited to be asked for them;
                                   sampling_s: it worked on them; handover_s: weights and groups
                                     were between the processes. Left out, like perf/*, if runs are
                                     compared for identity

    Args:
      x: the whole run. progress: of the run, after `Learner.begin`. The experiment of each step
        follows from it, and its count of steps is the version of the policy's weights.
      clock: takes the seconds of the parts.
    """
    version = progress.step
    due = due_steps(x, flight, version)
    if due:
        source.publish(policy, version)
    for step in due:
        settings = settings_of(foreseen(x, progress, step))
        request = Request(step, version, progress, flight.after, settings)
        flight = flight._replace(ahead=(*flight.ahead, source.request(request, clock)))
    first, *rest = flight.ahead
    groups, seconds = source.receive(first, clock)
    flight = Flight(groups.after, tuple(rest))
    if x.asynchrony.mode == "none" and not x.reuse.active:
        return groups, flight, {}  # nothing is stale
    counts = [
        len({r.group for r in own.sampled}) if isinstance(own, StepGroups) else x.batch.prompts
        for own in rest
    ]
    figures = {"in_flight_groups": sum(counts)} | seconds
    return groups, flight, {f"staleness/{name}": value for name, value in figures.items()}


def sample_groups(
    x: Experiment,
    policy: Policy,
    tasks: Sequence[Task],
    request: Request,
    before: StreamState | None,
    clock: Clock,
) -> StepGroups:
    """Sample and score the groups of a request with the current weights and the settings of its
    step. `before`: the prompts to draw from, known by now."""
    assert before is not None
    step = request.step
    version = request.version
    own = foreseen(x, request.progress, step)
    sampled, trained, after = experience(
        own, policy, tasks, before, step=step, version=version, clock=clock
    )
    return StepGroups(step, version, sampled, trained, before, after, request.settings)
