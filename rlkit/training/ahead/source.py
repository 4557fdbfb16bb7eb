"""The contract for sampling the groups of each step, and its use in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rlkit.episodes.stream import StreamState
from rlkit.training.ahead.flight import (
    Flight,
    InFlight,
    Request,
    StepGroups,
    digest_settings,
    list_due_steps,
)
from rlkit.training.experiment import Experiment
from rlkit.training.groups import experience
from rlkit.training.metrics import Clock
from rlkit.training.schedules.progress import Progress, foresee_step
from rlkit.types import Policy, Task

Received = tuple[StepGroups, dict[str, float]]  # groups, and seconds of the hand-over by name


class GroupSource(Protocol):
    """Samples the groups of the requested steps.

    Calls come in this order, and requests in the order of their steps:

        publish, request, request, …, receive   in each step; publish only if requests follow
        state                                   between steps
        restore                                 at most once, before all others

    The flight, not the source, records how much has been consumed. So if a step is interrupted
    while it samples, a run can still continue from `state` of the flight before this step.
    """

    def publish(self, policy: Policy, version: int) -> None:
        """Name the policy's present weights as this version. They sample for all requests until the
        next call."""

    def request(self, request: Request, clock: Clock) -> InFlight:
        """Ask for the groups of a step. Return the groups if they are there already. Otherwise
        return the request, with everything a later process needs to repeat it."""

    def receive(self, groups: InFlight, clock: Clock) -> Received:
        """Wait for groups. `groups`: the answer of `request`.

        Raises: the errors of sampling them.
        """

    def state(self, flight: Flight) -> dict[str, Any]:
        """Everything a later process needs to continue, as plain values and tensors."""

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """Continue from a `state`. The flight ends before the first groups that the present config
        would sample differently.

        Raises: DataError if the tasks have changed.
        """


def get_next_groups(
    source: GroupSource,
    flight: Flight,
    x: Experiment,
    policy: Policy,
    *,
    progress: Progress,
    clock: Clock,
) -> tuple[StepGroups, Flight, dict[str, float]]:
    """The groups for the next step, the flight after it, and figures for the step's row.

    First it requests all groups due for the current weights, each with the settings of its own
    step. If it is interrupted, the given flight is still valid.

    staleness/in_flight_groups     groups sampled, or being sampled, for later steps
    staleness/wait_s               with asynchrony=overlap, seconds in which the trainer waited for
                                   its groups; idle_s: in which the sampling process waited for a
                                   request; sampling_s: in which it worked on the groups;
                                   handover_s: in which weights and groups were in transfer. Like
                                   perf/*, not compared when runs are checked for identity

    Args:
      x: the whole run. progress: of the run, after `Learner.begin`. The experiment of each step
        follows from it, and its count of steps is the version of the policy's weights.
      clock: the seconds of the parts are added to it.
    """
    version = progress.step
    due = list_due_steps(x, flight, version)
    if due:
        source.publish(policy, version)
    for step in due:
        settings = digest_settings(foresee_step(x, progress, step))
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
    step. `before`: the stream to draw the prompts from, known by now."""
    assert before is not None
    step = request.step
    version = request.version
    own = foresee_step(x, request.progress, step)
    sampled, trained, after = experience(
        own, policy, tasks, before, step=step, version=version, clock=clock
    )
    return StepGroups(step, version, sampled, trained, before, after, request.settings)
