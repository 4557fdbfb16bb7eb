"""Reward how a policy behaves: how soon it is right, how long its replies are, whether they repeat
themselves, and whether it uses tools."""

from __future__ import annotations

from typing import Literal

from rlkit.errors import ConfigError
from rlkit.rewards._numeric import explain_unreadable, numeric
from rlkit.rewards.declarations import no_gold, reads_truth
from rlkit.rewards.verdicts import Paid
from rlkit.types import Rollout, assumes, gives

Unit = Literal["words", "tokens"]


@no_gold
def environment(rollout: Rollout) -> float:
    """Return the sum of the rewards that the environment paid at the steps. The sum is only logged,
    as the value of this component. The sum is not added to the reward, because the rewards of the
    steps already contain it."""
    return Paid(sum(step.reward or 0.0 for step in rollout.steps))


@gives("non_negative", "raw")
@reads_truth(explain_unreadable)
def few_turns(rollout: Rollout, *, max_turns: int = 50) -> float | None:
    """Score a right answer, a number, by how many replies were needed. The score falls linearly
    from 1 for one reply to 1 / max_turns for max_turns replies. The score is 0 if the last reply
    has a wrong number or no number.

    `R = correct · (1 - (n - 1) / max_turns)` for n replies

    Args:
      rollout: the rollout to score. Its last reply is right or wrong as in `numeric`.
      max_turns: the environment's limit of replies, ≥ 1. More replies score like max_turns.
    Returns: a score in 0 … 1; None if `numeric` cannot read `task.answer`.
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
    """Score the length of the replies against a range of lengths. The score is `inside` for low ≤
    length ≤ high, otherwise `below` or `above`.

    Args:
      unit: "words" counts the words of the final reply, without its thinking. A word is text
        between white space. "tokens" counts the sampled tokens of the whole episode, with thinking.
      low, high: bounds of the range in this unit, 0 ≤ low ≤ high. Both bounds count as inside.
      below, above, inside: the three scores.
    Returns: one of the three scores. A reply truncated by the length limit is scored by the length
      of the truncated reply.
    Raises: ConfigError unless 0 ≤ low ≤ high.

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
    """Penalise long replies with a linear ramp. The score is 0 up to the length `limit - buffer`.
    From there it falls linearly to `-penalty` at the length `limit`. For longer replies the score
    stays `-penalty`.

    penalty * min(0, max(-1, ((limit - buffer) - length) / buffer))

    Args:
      unit: as in `length`.
      limit: length from which the penalty is full. buffer: length of the ramp, 0 < buffer ≤ limit.
      penalty: the full penalty, > 0.
    Returns: a score in [-penalty, 0].
    Raises: ConfigError unless 0 < buffer ≤ limit.
    Source: DAPO, Yu et al. 2025, eq. 13, arXiv:2503.14476. In DAPO, the penalty counts tokens and
      is added to the reward (algorithm/overlong=penalty).
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"soft_length: buffer must be > 0 and at most limit={limit}, not {buffer}"
        )
    over = (limit - buffer - measure(rollout, unit)) / buffer
    return penalty * min(0.0, max(-1.0, over))


def measure(rollout: Rollout, unit: Unit) -> int:
    """Measure the length of a rollout, in words of its final reply or in sampled tokens. Raises
    ConfigError for another unit."""
    if unit == "words":
        return len(rollout.final_content.split())
    if unit == "tokens":
        return rollout.response_length
    raise ConfigError(f"length: unit must be words or tokens, not {unit!r}")


def band(
    value: int, *, low: int, high: int | None, below: float, above: float, inside: float
) -> float:
    """Compare a count with a range and return `below`, `inside` or `above`. Both bounds count as
    inside. If `high` is None, there is no upper bound. Raises ConfigError unless 0 ≤ low ≤ high."""
    if low < 0 or (high is not None and high < low):
        raise ConfigError(f"a band needs 0 <= low <= high, not low={low}, high={high}")
    if value < low:
        return below
    return above if high is not None and value > high else inside


@gives("raw")
def repetition(rollout: Rollout, *, n: int = 3, penalty: float = 1.0) -> float:
    """Compute -penalty * (1 - distinct n-grams / n-grams) over all text written by the policy.

    Args:
      n: number of words of an n-gram, > 0; case is ignored. Published values range from 3 words
        (open-r1) to 40 tokens (Yeo et al.).
      penalty: factor, ≥ 0. A reply that repeats the same words without end scores almost -penalty.
    Returns: a score in (-penalty, 0]. Thinking and content both count, but each text is counted
      separately. No n-gram spans two texts. Words of an earlier text that return in a later text
      are no repetition. The score is 0 if every text is shorter than n words.
    Raises: ConfigError for n or penalty out of range.
    Source: Yeo et al. 2025, appendix C.2, arXiv:2502.03373. The paper gives a penalty for each
      token; this is the sum over a reply.

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
    """Count the successful tool calls in all replies together, and score this number against a
    range.

    Args:
      low, high: bounds, both within the band. If `high` is null, there is no upper bound.
      below, above, inside: the three scores.
    Returns: one of the three scores. A call does not count if it is unreadable, names an unknown
      tool, raises, or is never answered.
    Raises: ConfigError for bounds that leave no band.
    """
    used = sum(result.ok for step in rollout.steps for result in step.tool_results)
    return band(used, low=low, high=high, below=below, above=above, inside=inside)
