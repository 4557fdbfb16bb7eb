"""Sampling in the trainer's process: asynchrony=none and asynchrony=lag."""

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
    """asynchrony=none: samples a step's groups when they are received.

    Args:
      x: the whole run. tasks: its prompts.
    """

    policy: Policy  # from the first `publish` on

    def __init__(self, x: Experiment, tasks: Sequence[Task]):
        self.x = x
        self.tasks = tasks

    def publish(self, policy: Policy, version: int) -> None:
        """Keep the policy; the engine uses its weights in place."""
        self.policy = policy

    def request(self, request: Request, clock: Clock) -> InFlight:
        """Nothing is sampled yet."""
        return request

    def receive(self, groups: InFlight, clock: Clock) -> Received:
        """Sample the groups."""
        return (self.sample(groups, clock) if isinstance(groups, Request) else groups), {}

    def sample(self, request: Request, clock: Clock) -> StepGroups:
        """The groups of a request, sampled by the present policy."""
        return sample_groups(self.x, self.policy, self.tasks, request, request.before, clock)

    def state(self, flight: Flight) -> dict[str, Any]:
        """The groups in flight."""
        return pack_flight(flight)

    def restore(self, saved: Mapping[str, Any], policy: Policy, progress: Progress) -> Flight:
        """The groups in flight. Requests are dropped, because their weights are gone."""
        return unpack_flight(saved, self.tasks, self.x, progress, StepGroups)


class Lagged(Here):
    """asynchrony=lag: samples groups when they are requested. The groups wait in flight for their
    step."""

    def request(self, request: Request, clock: Clock) -> StepGroups:
        """Sample the groups."""
        return self.sample(request, clock)
