"""Check whether a returned value is a score, and find its status."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from rlkit.errors import RLKitError, describe_error
from rlkit.rewards.calls import Misshapen, Unawaited, shape_problem
from rlkit.rewards.terms import Term
from rlkit.rewards.verdicts import Paid, ScoreStatus, Verdict
from rlkit.types import Rollout, unpacked

TAKEN = ("mean", "std", "variance_share")  # NAMEs of rlkit's own metrics reward/TERM/NAME
LARGEST = 1e15  # largest reward; the sum of squares of larger rewards may overflow float32


class RewardError(RLKitError, RuntimeError):
    """Say that a reward function raised, hung, or returned no reward for `rollout`. A failure never
    counts as a score of 0."""

    def __init__(self, message: str, rollout: Rollout | None = None) -> None:
        super().__init__(message)
        self.rollout = rollout


class Checked(NamedTuple):
    """Hold the checked value of a term, or of the aggregator, for one rollout.

    score      a finite number; None: the rollout cannot be scored
    component  the logged value: the score, or the sum paid at the steps if the value is `Paid`
    steps      rewards of the steps, if the term is per step
    metrics    metrics returned by the function, by their names in metrics.jsonl
    failure    what went wrong, if the score is missing because the function failed
    cause      the exception behind the failure
    """

    score: float | None
    status: ScoreStatus
    component: float | None = None
    steps: tuple[float, ...] = ()
    metrics: Mapping[str, float] = {}
    failure: str = ""
    cause: Exception | None = None


def check_value(value: Any, rollout: Rollout, term: Term, part: str) -> Checked:
    """Turn a returned value or a raised exception into a score with its status.

    `part` is the beginning of the metrics' names, either "reward/TERM" or "aggregator".
    """
    where = f"on task {rollout.task.id!r}:"
    try:
        return _check_value(value, rollout, term, part)
    except Unawaited:
        return Checked(None, "error")
    except Misshapen as error:
        return Checked(None, "error", failure=f"returned no reward {where} {error}")
    except TimeoutError as error:
        limit = "it timed out" if term.timeout is None else f"nothing within {term.timeout:g} s"
        return Checked(None, "timeout", failure=f"gave no score {where} {limit}", cause=error)
    except Exception as error:
        said = f"raised {where} {describe_error(error)}"
        return Checked(None, "error", failure=said, cause=error)


def reward_error(who: str, rollout: Rollout, failed: Checked, rate: str = "") -> RewardError:
    """Make the error that ends a run after too many failures of a reward. `rate` is a text with the
    number of failures."""
    said = (
        f"the last reply was {rollout.final_content[:200]!r}"
        if rollout.steps
        else "there is no reply"
    )
    error = RewardError(f"reward {who} {failed.failure}{rate}; {said}", rollout)
    error.__cause__ = failed.cause
    return error


def _check_value(value: Any, rollout: Rollout, term: Term, part: str) -> Checked:
    value, measured = unpacked(value)
    for given in (value, *measured.values()):
        if isinstance(given, Exception):
            raise given
    metrics = {
        f"{part}/{name}": number
        for name, given in measured.items()
        if (number := _metric(name, given, part)) is not None
    }
    if not term.per_step or value is None:
        score = _number(value)
        component = value.amount if isinstance(value, Paid) else score
        return Checked(score, _status(value, score), component, metrics=metrics)
    what = "steps; a term per step returns a list with one number or None for each step"
    wrong = shape_problem(value, len(rollout.steps), what)
    if wrong:
        raise wrong
    steps = tuple(_number(entry) or 0.0 for entry in value)
    total = sum(steps)
    return Checked(total, _status(None, total), total, steps, metrics)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, Real) and abs(float(value)) <= LARGEST:
        return float(value)
    raise Misshapen(
        f"{value!r:.200}; return a finite number of magnitude at most {LARGEST:g}, or None if the"
        " rollout cannot be scored"
    )


def _metric(name: str, value: Any, part: str) -> float | None:
    """Return the value of a metric that a function returned with its score: a number or None.
    Raises: Misshapen for any other value, or if one of rlkit's own metrics has this name."""
    if part != "aggregator" and (name in TAKEN or name.endswith("_frac")):
        raise Misshapen(f"a metric {name!r}, and rlkit uses this name itself; rename the metric")
    return _number(value)


def _status(value: Any, number: float | None) -> ScoreStatus:
    if isinstance(value, Verdict):
        return value.status
    if number is None:
        return "unparseable"
    return "ok" if number > 0 else "wrong"
