"""What samples the groups of every step, and how a step gets its groups from it."""

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
    """Samples the groups of the steps that it is asked for.

    Calls come in this order, and requests in the order of their steps:

        publish, request, request, …, receive   in each step; publish only if requests follow
        state                                   between steps
        restore                                 at most once, before all others

    The flight says what has been consumed, never the source: after a step that was interrupted
    while it sampled, `state` of the flight from before that step is still what to go on from.
    """

    def publish(self, policy: Policy, version: int) -> None:
        """The policy's weights, as they are now, are this version: they sample for the requests
        until the next call."""

    def request(self, request: Request, clock: Clock) -> InFlight:
        """Ask for the groups of a step. Returns the groups if they are there already, else the
        request, completed by what a later process needs to make it again."""

    def receive(self, groups: InFlight, clock: Clock) -> Received:
        """Wait for the groups that `request` answered with this.

        Raises: what sampling them raised.
        """

    def state(self, flight: Flight) -> dict[str, Any]:
        """All that a later process needs to go on, as plain values and tensors."""

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """Go on from a `state`. Groups that the config would now sample otherwise, and those behind
        them, are left out of the flight.

        Raises: DataError where the tasks have changed.
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
    """The groups that the step to come learns from, the flight behind them, and figures for the
    step's row.

    First it requests all groups that the current weights are due to sample, each with the settings
    of its own step. If it is interrupted, the flight that it was given still holds.

    staleness/in_flight_groups     groups sampled, or being sampled, for later steps
    staleness/wait_s               asynchrony=overlap, seconds: that the trainer waited for its
                                   groups; idle_s: that the sampling process waited to be asked for
                                   them; sampling_s: that it worked on them; handover_s: that
                                   weights and groups took between the processes. Left out, like
                                   perf/*, where runs are compared for identity

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
    step. `before`: the prompts that they are drawn from, which must be known by now."""
    assert before is not None
    step = request.step
    version = request.version
    own = foreseen(x, request.progress, step)
    sampled, trained, after = experience(
        own, policy, tasks, before, step=step, version=version, clock=clock
    )
    return StepGroups(step, version, sampled, trained, before, after, request.settings)
