"""Score rollouts: call the terms, check their values, aggregate them to one reward, and return
rollouts with rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlkit.errors import ConfigError, name_function
from rlkit.rewards.calls import call, call_on_copy, call_term, spread
from rlkit.rewards.checks import LARGEST, Checked, RewardError, check_value, reward_error
from rlkit.rewards.terms import Reward, Term, require_terms
from rlkit.system.shared_state import get_current_watch, guard_state
from rlkit.system.waiting import waiting
from rlkit.types import Measured, Rollout, unpacked

UNSCORED = Checked(None, "error")


def score(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """Return the rollouts with `reward`, `rewards`, `statuses` and `metrics` filled in. If a term
    scores steps, the rewards of their steps are filled in too.

    Args:
      rollouts: the rollouts to score, in order. Their earlier scores are replaced.
      reward: the reward. Its terms of non-zero weight are aggregated. Terms of weight 0 only appear
        in `rewards`.
    Returns: new rollouts. `rewards` has the score of every term by name. `statuses` has its status:
      ok (> 0), wrong (≤ 0), unparseable (None, or a Verdict with this status), timeout, error.
      `reward` is None, "cannot be scored", if any term of non-zero weight is None. If the
      environment failed (a truncation "error"), no term is called, and all are None. A rollout
      without a reward does not enter any baseline. If all terms are per step, `reward` is 0.
    Raises: RewardError with the term, the task and the cause if a term fails on more than
      `max_error_rate` of the rollouts, or if the aggregator fails. A term fails if it raises,
      hangs, or returns a value other than a finite number, a bool or None. A batched term must
      return a list of these values, one for each rollout; a term per step, one for each step.
      ConfigError if every weight is 0, or a limit is out of range. A Refusal raised by a function
      is raised unchanged, because its message tells the user the remedy.
    """
    if not isinstance(reward, Reward):
        raise ConfigError(
            f"{reward!r:.100} is not a Reward; make one from your function with"
            ' rlkit.Reward("mine", {"mine": rlkit.Term(1.0, my_function)})'
        )
    require_terms(reward)
    with guard_state(reward.aggregator, *(term.fn for term in reward.terms.values())):
        played = [_drop_term_rewards(rollout) for rollout in rollouts]
        # nothing is asked about an episode whose environment failed
        ended = [rollout for rollout in played if rollout.truncation != "error"]
        columns = {name: iter(_score_column(name, ended, reward)) for name in reward.terms}
        rows = [
            {
                name: UNSCORED if rollout.truncation == "error" else next(column)
                for name, column in columns.items()
            }
            for rollout in played
        ]
        scored = [
            _with_scores(rollout, row, reward) for rollout, row in zip(played, rows, strict=True)
        ]
        with waiting("the reward's aggregator", reward.aggregator, count=len(scored)):
            rewarded = _aggregate_rewards(scored, reward)
        _require_bounded(rewarded)
        return [
            rollout._replace(rewards={name: cell.component for name, cell in row.items()})
            for rollout, row in zip(rewarded, rows, strict=True)
        ]


def _drop_term_rewards(rollout: Rollout) -> Rollout:
    """Return the rollout with only the environment's rewards at its steps. Rewards added by an
    earlier scoring with per-step terms are removed."""
    if not rollout.environment_rewards:
        return rollout
    steps = tuple(
        step._replace(reward=paid)
        for step, paid in zip(rollout.steps, rollout.environment_rewards, strict=True)
    )
    return rollout._replace(steps=steps, environment_rewards=())


def _score_column(name: str, rollouts: Sequence[Rollout], reward: Reward) -> list[Checked]:
    """Return the checked values of one term for all rollouts, in their order. Raises: RewardError
    if the term fails on too many rollouts."""
    term = reward.terms[name]
    count = len(rollouts)
    limit = reward.max_error_rate
    allowed = int(round(limit * count, 6))  # 0.29 · 100 is 28.999…
    # after too many failures, the list of values is shorter than the list of rollouts
    known = zip(rollouts, call_term(term, rollouts, allowed), strict=False)
    cells = [check_value(value, rollout, term, f"reward/{name}") for rollout, value in known]
    failed = [i for i, cell in enumerate(cells) if cell.failure]
    if len(failed) > allowed:
        first = failed[allowed]  # the first failure beyond the allowed number
        rate = f" ({len(failed)} of {count} rollouts failed, more than max_error_rate={limit:g})"
        raise reward_error(f"term {name!r}", rollouts[first], cells[first], rate if limit else "")
    return cells


def _with_scores(rollout: Rollout, row: Mapping[str, Checked], reward: Reward) -> Rollout:
    """Return the rollout with the values of its terms and the rewards of its steps. The `reward` of
    the returned rollout is still None."""
    scored = rollout._replace(
        reward=None,
        rewards={name: cell.score for name, cell in row.items()},
        statuses={name: cell.status for name, cell in row.items()},
        metrics={name: value for cell in row.values() for name, value in cell.metrics.items()},
    )
    weighted = [(reward.terms[name].weight, cell.steps) for name, cell in row.items()]
    weighted = [(weight, numbers) for weight, numbers in weighted if weight and numbers]
    if not weighted:
        return scored
    steps = tuple(
        step._replace(
            reward=(step.reward or 0.0) + sum(weight * numbers[i] for weight, numbers in weighted)
        )
        for i, step in enumerate(rollout.steps)
    )
    return scored._replace(
        steps=steps, environment_rewards=tuple(step.reward for step in rollout.steps)
    )


def _aggregate_rewards(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """Return the rollouts with `reward` filled in. The `reward` stays None if a term of non-zero
    weight is None."""
    counted = [name for name, term in reward.terms.items() if term.weight]
    places = [
        i
        for i, rollout in enumerate(rollouts)
        if all(rollout.rewards[name] is not None for name in counted)
    ]
    chosen = [rollouts[i] for i in places]
    term = Term(1.0, reward.aggregator)
    out = list(rollouts)
    for i, value in zip(places, _aggregates(term, chosen, reward), strict=True):
        rollout = rollouts[i]
        cell = check_value(value, rollout, term, "aggregator")
        if cell.failure:
            raise reward_error(f"aggregator ({name_function(term.fn)})", rollout, cell)
        out[i] = rollout._replace(reward=cell.score, metrics={**rollout.metrics, **cell.metrics})
    return out


def _require_bounded(rollouts: Sequence[Rollout]) -> None:
    """Raise RewardError if the total reward of an episode is too large for training in float32. The
    total includes the environment's payments at the steps."""
    for rollout in rollouts:
        total = rollout.total_reward
        if total is not None and not abs(total) <= LARGEST:
            raise RewardError(
                f"the rewards of an episode of task {rollout.task.id!r} add up to {total}, the"
                f" steps' rewards included; training allows at most {LARGEST:g} in magnitude",
                rollout,
            )


def _aggregates(term: Term, rollouts: Sequence[Rollout], reward: Reward) -> Sequence[Any]:
    """Return the aggregator's value for each rollout: a number, a number with metrics, or an
    exception."""
    weights = {
        name: own.weight for name, own in reward.terms.items() if own.weight and not own.per_step
    }
    count = len(rollouts)
    if not weights or not rollouts:
        return [0.0] * count
    watch = get_current_watch()
    if not term.takes_all:
        own = [{name: rollout.rewards[name] for name in weights} for rollout in rollouts]
        return [call(partial(term.fn, scores, dict(weights)), term, watch) for scores in own]
    whole = call(partial(call_on_copy, term.fn, rollouts, dict(weights)), term, watch)
    values, measured = unpacked(whole)
    columns = {
        name: spread(given, count) if isinstance(given, Sequence) else [given] * count
        for name, given in measured.items()
    }
    return [
        Measured(value, {name: column[i] for name, column in columns.items()}) if columns else value
        for i, value in enumerate(spread(values, count))
    ]
