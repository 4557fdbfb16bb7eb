"""Filling in the rewards of rollouts: every term by name, and their aggregate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from rlkit.errors import ConfigError, Refusal, RLKitError
from rlkit.types import Rollout

F = TypeVar("F", bound=Callable[..., Any])


class RewardError(RLKitError, RuntimeError):
    """A reward function raised, or returned what is no reward. Never counted as a score of 0."""


class Term(NamedTuple):
    """A component of a reward. Weight 0 makes it a shadow metric: scored and logged, not part of the reward."""

    weight: float
    fn: Callable[..., Any]
    batched: bool = False  # fn takes the list of all rollouts and returns a list of scores


class Reward(NamedTuple):
    """Named terms in order, and how they become one number: (scores, weights) → float."""

    name: str
    terms: Mapping[str, Term]
    aggregator: Callable[[Mapping[str, float], Mapping[str, float]], float]


def batched(fn: F) -> F:
    """Mark a reward function as one of the whole batch: (rollouts) → list of scores. The same as `batched: true`."""
    fn.batched = True  # type: ignore[attr-defined]
    return fn


def score(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """The rollouts with `reward` and `rewards` filled in; nothing else changes.

    Args:
      rollouts: scored in order; earlier scores on them are replaced.
      reward: its terms of non-zero weight are aggregated; the others only appear in `rewards`.
    Returns: new rollouts. `rewards` holds every term by name. `reward` is None, "cannot be scored", where any term of
      non-zero weight is None; it is kept out of every baseline.
    Raises: RewardError naming the term, the task and the cause where a function raises, or returns anything but a
      finite number, a bool or None (a batched one: a list with one of these per rollout). ConfigError where every
      weight is 0. A Refusal raised by a function says what the user has to mend and passes unchanged.
    """
    if not any(term.weight for term in reward.terms.values()):
        raise ConfigError(f"reward {reward.name!r} has no term of non-zero weight; set one of reward.terms.NAME.weight")
    columns = {name: column(name, term, rollouts) for name, term in reward.terms.items()}
    scored = []
    for i, rollout in enumerate(rollouts):
        rewards = {name: column[i] for name, column in columns.items()}
        scored.append(rollout._replace(reward=_aggregate(rollout, rewards, reward), rewards=rewards))
    return scored


def column(name: str, term: Term, rollouts: Sequence[Rollout]) -> list[float | None]:
    """Scores of one term for all rollouts, each checked. Raises: see `score`."""
    if not (term.batched or is_batched(term.fn)):
        return [_checked(name, rollout.task.id, partial(term.fn, rollout)) for rollout in rollouts]
    ids = f"{rollouts[0].task.id} … {rollouts[-1].task.id}" if rollouts else "none"
    values = _called(name, ids, partial(term.fn, list(rollouts)))
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(rollouts):
        size = f"{len(values)} scores" if isinstance(values, Sequence) else type(values).__name__
        raise RewardError(f"reward term {name!r} is batched and gave {size} for {len(rollouts)} rollouts; return a list, one for each")
    return [_number(name, rollout.task.id, value) for rollout, value in zip(rollouts, values, strict=True)]


def _aggregate(rollout: Rollout, rewards: Mapping[str, float | None], reward: Reward) -> float | None:
    weights = {name: term.weight for name, term in reward.terms.items() if term.weight}
    scores = {name: value for name in weights if (value := rewards[name]) is not None}
    if len(scores) < len(weights):
        return None
    return _checked("aggregator", rollout.task.id, partial(reward.aggregator, scores, weights))


def _checked(name: str, task: str, call: Callable[[], Any]) -> float | None:
    return _number(name, task, _called(name, task, call))


def _called(name: str, task: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Refusal, RewardError):  # a RewardError of a reward within this one names its place already
        raise
    except Exception as error:
        raise RewardError(f"reward term {name!r} raised on task {task!r}: {type(error).__name__}: {error}") from error


def _number(name: str, task: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(
        f"reward term {name!r} returned {value!r:.200} on task {task!r}; return a finite number, or None where the rollout cannot be scored"
    )


def is_batched(fn: Callable[..., Any]) -> bool:
    """Whether a function, or the one inside a `functools.partial`, is marked `@batched`."""
    while isinstance(fn, partial):
        fn = fn.func
    return bool(getattr(fn, "batched", False))
