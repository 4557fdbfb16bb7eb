"""Rewards for how a policy behaves: how soon it is right, how long its replies are, whether they
repeat themselves, whether it used tools."""

from __future__ import annotations

from typing import Literal

from rlkit.errors import ConfigError
from rlkit.rewards._numeric import explain_unreadable, numeric
from rlkit.rewards.declarations import no_gold, reads_truth
from rlkit.rewards.verdicts import Paid
from rlkit.types import Rollout, assumes, gives

Unit = Literal["words", "tokens"]


@no_gold
def environment(rollout: Rollout) -> float | None:
    """The sum that the environment paid at the steps. The sum is only logged, as this component:
    the payments are already in the rewards of the steps, so they are not added again. None (cannot
    be scored) if the environment failed.

    >>> from rlkit.types import Task
    >>> environment(Rollout(Task("t", ()), (), status="truncated", truncation="error")) is None
    True
    """
    if rollout.truncation == "error":
        return None
    return Paid(sum(step.reward or 0.0 for step in rollout.steps))


@gives("non_negative", "raw")
@reads_truth(explain_unreadable)
def few_turns(rollout: Rollout, *, max_turns: int = 50) -> float | None:
    """1 for the right number in the first reply, falling linearly to 1 / max_turns in the last; 0
    for a wrong number or no number.

    R = correct · (1 - (n - 1) / max_turns), n replies

    Args:
      rollout: scored by its last reply, as `numeric` does.
      max_turns: ≥ 1, the environment's own limit; more replies score like max_turns.
    Returns: 0 … 1; None if `numeric` cannot read `task.answer`.
    """
    correct = numeric(rollout)
    if correct is None:
        return None
    return correct * (1 - (min(len(rollout.steps), max_turns) - 1) / max_turns)


@gives("raw")
def length(
    rollout: Rollout,
    *,
    unit: Unit = "words",
    low: int = 50,
    high: int = 500,
    below: float = -0.5,
    above: float = -0.3,
    inside: float = 0.0,
) -> float:
    """A band: `inside` for low ≤ length ≤ high, else `below` or `above`.

    Args:
      unit: words of the final reply, thinking excluded (text between white space), or sampled
        tokens of the whole episode, thinking included.
      low, high: bounds in this unit, both within the band; 0 ≤ low ≤ high.
      below, above, inside: the three scores.
    Returns: one of them. A reply cut off by the length limit counts with its present length.
    Raises: ConfigError for bounds that leave no band.

    >>> from rlkit.types import Step, Task
    >>> length(Rollout(Task("t", ()), (Step((), (), (), (), "stop", content="too short"),)))
    -0.5
    """
    return band(measure(rollout, unit), low=low, high=high, below=below, above=above, inside=inside)


@assumes("episode_budget")
@gives("raw")
def soft_length(
    rollout: Rollout,
    *,
    unit: Unit = "tokens",
    limit: int = 512,
    buffer: int = 128,
    penalty: float = 1.0,
) -> float:
    """A ramp instead of a step: 0 up to limit - buffer, falling linearly to -penalty at `limit`,
    and -penalty above.

    penalty * min(0, max(-1, ((limit - buffer) - length) / buffer))

    Args:
      unit: as in `length`.
      limit: length of the full penalty; buffer: length of the ramp, 0 < buffer ≤ limit.
      penalty: of an overlong reply, > 0.
    Returns: a score in [-penalty, 0].
    Raises: ConfigError for a buffer outside the limit.
    Source: DAPO, Yu et al. 2025, eq. 13, arXiv:2503.14476; there it counts tokens and is added to
      the reward (algorithm/overlong=penalty).
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"soft_length: buffer must be > 0 and at most limit={limit}, not {buffer}"
        )
    over = (limit - buffer - measure(rollout, unit)) / buffer
    return penalty * min(0.0, max(-1.0, over))


def measure(rollout: Rollout, unit: Unit) -> int:
    """The length of a rollout in words of its final reply or in sampled tokens. Raises ConfigError
    for another unit."""
    if unit == "words":
        return len(rollout.final_content.split())
    if unit == "tokens":
        return rollout.response_length
    raise ConfigError(f"length: unit must be words or tokens, not {unit!r}")


def band(
    value: int, *, low: int, high: int | None, below: float, above: float, inside: float
) -> float:
    """One of three scores for a count. Both bounds count as inside; a `high` of None is no bound.
    Raises ConfigError."""
    if low < 0 or (high is not None and high < low):
        raise ConfigError(f"a band needs 0 <= low <= high, not low={low}, high={high}")
    if value < low:
        return below
    return above if high is not None and value > high else inside


@gives("raw")
def repetition(rollout: Rollout, *, n: int = 3, penalty: float = 1.0) -> float:
    """-penalty * (1 - distinct n-grams / n-grams), over everything written by the policy.

    Args:
      n: words of an n-gram, > 0; case is folded. Published values are 3 words (open-r1) to 40
        tokens (Yeo et al.).
      penalty: ≥ 0. A reply that repeats one thing forever scores almost -penalty.
    Returns: a score in (-penalty, 0]. Thinking counts as well as content, but each text is counted
      separately: no n-gram spans two texts, and words of an earlier text are no repetition in a
      later text. 0 if every text is shorter than n words.
    Raises: ConfigError for n or penalty out of range.
    Source: Yeo et al. 2025, appendix C.2, arXiv:2502.03373, there token by token; this is its sum
      over a reply.

    >>> from rlkit.types import Step, Task
    >>> repetition(
    ...     Rollout(Task("t", ()), (Step((), (), (), (), "stop", content="so so so so so"),)), n=2
    ... )
    -0.75
    """
    if n < 1 or penalty < 0:
        raise ConfigError(
            f"repetition: n must be > 0 and penalty >= 0, not n={n}, penalty={penalty}"
        )
    total = distinct = 0
    for text in (text for step in rollout.steps for text in (step.thinking, step.content)):
        words = text.casefold().split()
        grams = list(zip(*(words[i:] for i in range(n)), strict=False))
        total += len(grams)
        distinct += len(set(grams))
    return -penalty * (total - distinct) / total if total > distinct else 0.0


@gives("raw")
def tool_usage(
    rollout: Rollout,
    *,
    low: int = 1,
    high: int | None = 3,
    below: float = 0.0,
    above: float = 0.5,
    inside: float = 1.0,
) -> float:
    """A band over the successful tool calls, all replies together.

    Args:
      low, high: bounds, both within the band; `high` null: no upper bound.
      below, above, inside: the three scores.
    Returns: one of them. A call without effect (unreadable, of an unknown tool, raising, or never
      answered) does not count at all, neither for `low` nor for `high`.
    Raises: ConfigError for bounds that leave no band.
    """
    used = sum(result.ok for step in rollout.steps for result in step.tool_results)
    return band(used, low=low, high=high, below=below, above=above, inside=inside)
