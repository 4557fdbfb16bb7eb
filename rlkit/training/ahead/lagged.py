"""asynchrony=lag: groups are sampled when they are requested, and wait in flight for their step."""

from __future__ import annotations

from rlkit.training.ahead.flight import Request, StepGroups
from rlkit.training.ahead.here import Here
from rlkit.training.metrics import Clock


class Lagged(Here):
    """Samples with the weights of the moment in which groups are requested."""

    def request(self, request: Request, clock: Clock) -> StepGroups:
        """Sample the groups."""
        return self.sample(request, clock)
