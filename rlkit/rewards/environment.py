"""Episodes that their environment judges."""

from __future__ import annotations

from rlkit.types import Rollout


def environment(rollout: Rollout) -> float | None:
    """0, added to the rewards that the environment gave to the steps; None, cannot be scored, where it failed.

    >>> from rlkit.types import Task
    >>> environment(Rollout(Task("t", ()), (), status="truncated", truncation="error")) is None
    True
    """
    return None if rollout.truncation == "error" else 0.0
