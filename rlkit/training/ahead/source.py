"""Define the contract for sampling the groups of each step, and get a step's groups through this
contract."""

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

Received = tuple[StepGroups, dict[str, float]]  # the groups; name → seconds of the hand-over


class GroupSource(Protocol):
    """Define a source of sampled and scored groups for the RL steps of a run.

    The methods are called in this order. Requests come in the order of their steps:

        publish, request, request, …, receive   in each step; publish only if requests follow
        state                                   between steps
        restore                                 at most once, before all others

    The groups in flight are listed in a `Flight`, and the source itself does not record how many
    groups have been consumed. Therefore a step may be interrupted while it samples. The run then
    continues from the `state` of the `Flight` before this step.
    """

    def publish(self, policy: Policy, version: int) -> None:
        """Give the policy's present weights to the source, under the number of their version. All
        requests until the next call of `publish` are sampled with these weights."""

    def request(self, request: Request, clock: Clock) -> InFlight:
        """Ask for the groups of a step. If the groups exist already, return them. Otherwise return
        the request, with all information that another process needs to repeat the request."""

    def receive(self, groups: InFlight, clock: Clock) -> Received:
        """Wait until the groups are sampled, and return them.

        Args:
          groups: the value that `request` returned.
        Raises: any error that occurred while the groups were sampled.
        """

    def state(self, flight: Flight) -> dict[str, Any]:
        """Return the groups in flight as plain values and tensors, complete enough for another
        process to continue the run."""

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """Continue from the value of `state`, and return the groups in flight. If the present
        config would sample the groups of a step differently, the groups of this step and of all
        later steps are left out.

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
    """Return the groups for the next step, the `Flight` after this step, and metrics for the step's
    row.

    The function first requests all groups that the current weights must sample. Each request has
    the settings of its own step. If the function is interrupted, the argument `flight` is still
    valid.

    staleness/in_flight_groups     groups sampled, or being sampled, for later steps
    staleness/wait_s               asynchrony=overlap only: seconds that the trainer waited for its
                                   groups
    staleness/idle_s               seconds that the sampling process waited for a request
    staleness/sampling_s           seconds that the sampling process worked on the groups
    staleness/handover_s           seconds for the transfer of weights and groups

    Like perf/*, these seconds are not compared when two runs are checked for identity.

    Args:
      x: the experiment of the whole run.
      progress: the progress of the run after `Learner.begin`. The progress determines the
        experiment of each step. `progress.step` is the version of the policy's weights.
      clock: receives the seconds of each part of the work.
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
    """Sample and score the groups of a request, with the policy's current weights and the settings
    of the requested step.

    Args:
      before: the state of the prompt stream before the step's prompts; must not be None.
    """
    assert before is not None
    step = request.step
    version = request.version
    own = foresee_step(x, request.progress, step)
    sampled, trained, after = experience(
        own, policy, tasks, before, step=step, version=version, clock=clock
    )
    return StepGroups(step, version, sampled, trained, before, after, request.settings)
