"""Rewards of a reply's length. The truth is not looked at, so every rollout can be scored."""

from __future__ import annotations

from typing import Literal

from rlkit.errors import ConfigError
from rlkit.types import Rollout, assumes, gives

Unit = Literal["words", "tokens"]


@gives("raw")
def length(
    rollout: Rollout, *, unit: Unit = "words", low: int = 50, high: int = 500, below: float = -0.5, above: float = -0.3, inside: float = 0.0
) -> float:
    """A band: `inside` for low ≤ length ≤ high, else `below` or `above`.

    Args:
      unit: words of the final reply, thinking excluded (text between white space), or sampled tokens of the whole episode,
        thinking included.
      low, high: bounds in that unit, both within the band; 0 ≤ low ≤ high.
      below, above, inside: the three scores.
    Returns: one of them. A reply cut off by the length limit counts as long as it got.
    Raises: ConfigError for bounds that leave no band.

    >>> from rlkit.types import Step, Task
    >>> length(Rollout(Task("t", ()), (Step((), (), (), (), "stop", content="too short"),)))
    -0.5
    """
    return band(measure(rollout, unit), low=low, high=high, below=below, above=above, inside=inside)


@assumes("episode_budget")
@gives("raw")
def soft_length(rollout: Rollout, *, unit: Unit = "tokens", limit: int = 512, buffer: int = 128, penalty: float = 1.0) -> float:
    """A ramp instead of a step: 0 up to limit - buffer, falling evenly to -penalty at `limit`, and -penalty beyond.

    penalty * min(0, max(-1, ((limit - buffer) - length) / buffer))

    Args:
      unit: as in `length`.
      limit: length of the full penalty; buffer: length over which it sets in, 0 < buffer ≤ limit.
      penalty: of an overlong reply, > 0.
    Returns: a score in [-penalty, 0].
    Raises: ConfigError for a buffer that is not within the limit.
    Source: DAPO, Yu et al. 2025, eq. 13, arXiv:2503.14476, there on tokens and beside the reward (algorithm/overlong=penalty).
    """
    if not 0 < buffer <= limit:
        raise ConfigError(f"soft_length: buffer must be > 0 and at most limit={limit}, not {buffer}")
    over = (limit - buffer - measure(rollout, unit)) / buffer
    return penalty * min(0.0, max(-1.0, over))


def measure(rollout: Rollout, unit: Unit) -> int:
    """The length of a rollout in words of its final reply or in sampled tokens. Raises ConfigError for another unit."""
    if unit == "words":
        return len(rollout.final_content.split())
    if unit == "tokens":
        return rollout.response_length
    raise ConfigError(f"length: unit must be words or tokens, not {unit!r}")


def band(value: int, *, low: int, high: int | None, below: float, above: float, inside: float) -> float:
    """Which of three scores a count earns; both bounds are inside, and a `high` of None has no end. Raises ConfigError."""
    if low < 0 or (high is not None and high < low):
        raise ConfigError(f"a band needs 0 <= low <= high, not low={low}, high={high}")
    if value < low:
        return below
    return above if high is not None and value > high else inside
