"""Whether tools were used, and in moderation."""

from __future__ import annotations

from rlkit.rewards.length import band
from rlkit.types import Rollout, gives


@gives("raw")
def tool_usage(
    rollout: Rollout, *, low: int = 1, high: int | None = 3, below: float = 0.0, above: float = 0.5, inside: float = 1.0
) -> float:
    """A band over the tool calls that worked, all replies together.

    Args:
      low, high: bounds, both within the band; null: no upper one.
      below, above, inside: the three scores.
    Returns: one of them. A call that could not be read, that names no tool, that raised or that was never answered is no use of a
      tool: it earns nothing, and it does not count as one too many either.
    Raises: ConfigError for bounds that leave no band.
    """
    used = sum(result.ok for step in rollout.steps for result in step.tool_results)
    return band(used, low=low, high=high, below=below, above=above, inside=inside)
