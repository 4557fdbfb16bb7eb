"""Sample in the trainer's process, for asynchrony=none and asynchrony=lag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.training.ahead.flight import (
    Flight,
    InFlight,
    Request,
    StepGroups,
    pack_flight,
    unpack_flight,
)
from rlkit.training.ahead.source import Received, sample_groups
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import Clock
from rlkit.training.schedules.progress import Progress
from rlkit.types import Policy, Task


class Here:
    """Sample the groups of an RL step in the trainer's process, at the beginning of this step
    (asynchrony=none).

    Args:
      x: the experiment of the whole run.
      tasks: the training prompts of the run.
    """

    policy: Policy  # set by the first call of `publish`

    def __init__(self, x: Experiment, tasks: Sequence[Task]):
        self.x = x
        self.tasks = tasks

    def publish(self, policy: Policy, version: int) -> None:
        """Keep the policy for sampling. Nothing is copied: the engine reads the policy's own
        weights."""
        self.policy = policy

    def request(self, request: Request, clock: Clock) -> InFlight:
        """Return the request unchanged. The groups are sampled later, in `receive`."""
        return request

    def receive(self, groups: InFlight, clock: Clock) -> Received:
        """Sample the groups of a request, and return them. Groups that are already sampled are
        returned unchanged."""
        return (self.sample(groups, clock) if isinstance(groups, Request) else groups), {}

    def sample(self, request: Request, clock: Clock) -> StepGroups:
        """Sample the groups of a request with the present policy."""
        return sample_groups(self.x, self.policy, self.tasks, request, request.before, clock)

    def state(self, flight: Flight) -> dict[str, Any]:
        """Convert the groups in flight to plain values and tensors."""
        return pack_flight(flight)

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """Restore the groups in flight. Drop requests for groups not yet sampled, because the
        weights to sample these groups are gone."""
        return unpack_flight(saved, self.tasks, self.x, progress, StepGroups)


class Lagged(Here):
    """Sample groups when they are requested (asynchrony=lag). The groups then wait in flight for
    their learning step."""

    def request(self, request: Request, clock: Clock) -> StepGroups:
        """Sample the groups of the request now, and return them."""
        return self.sample(request, clock)
