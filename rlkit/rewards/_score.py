"""Scoring rollouts: terms called → values checked → one reward → rollouts with rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rlkit.distributed import ranks
from rlkit.errors import ConfigError, name_function
from rlkit.rewards.calls import call, call_on_copy, call_term, spread
from rlkit.rewards.checks import LARGEST, Checked, RewardError, check_value, reward_error
from rlkit.rewards.declarations import read_declarations
from rlkit.rewards.terms import Reward, Term, require_terms
from rlkit.system.shared_state import get_current_watch, guard_state
from rlkit.system.waiting import waiting
from rlkit.types import Measured, Rollout, unpacked


def score(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """Fill in `reward`, `rewards`, `statuses` and `metrics` of rollouts, and the rewards of their
    steps if terms return any.

    Args:
      rollouts: scored in order; earlier scores on them are replaced.
      reward: its terms of non-zero weight are aggregated; the others only appear in `rewards`.
    Returns: new rollouts. `rewards` has the score of every term by name, `statuses` its status: ok
      (> 0), wrong (≤ 0), unparseable (None, or a Verdict saying so), timeout, error. `reward` is
      None, "cannot be scored", if any term of non-zero weight is None, or if the environment failed
      (a truncation "error"). Such a rollout is in no baseline. If all terms are per step, `reward`
      is 0.
    Raises: RewardError with the term, the task and the cause if a term fails on more than
      `max_error_rate` of the rollouts: it raises, hangs, or returns anything but a finite number, a
      bool or None (a batched term: a list with one for each rollout; a term per step: one for each
      step). Also if the aggregator fails. ConfigError if every weight is 0, or a limit is out of
      range. A Refusal raised by a function is raised unchanged, because its message tells the user
      the remedy.
    """
    if not isinstance(reward, Reward):
        raise ConfigError(
            f"{reward!r:.100} is not a Reward; make one from your function with"
            ' rlkit.Reward("mine", {"mine": rlkit.Term(1.0, my_function)})'
        )
    require_terms(reward)
    with guard_state(*reward.functions):
        played = [_drop_term_rewards(rollout) for rollout in rollouts]
        columns = {name: _score_column(name, played, reward) for name in reward.terms}
        rows = [{name: column[i] for name, column in columns.items()} for i in range(len(played))]
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


def score_spread(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """`score` with the work shared between all ranks; each rank gets all rollouts back.

    If a function or `max_error_rate` looks at the whole batch, the first rank scores it.
    """
    if (
        reward.max_error_rate > 0
        or read_declarations(reward.aggregator).batched
        or any(term.takes_all for term in reward.terms.values())
    ):
        return ranks.broadcast(lambda: score(rollouts, reward))
    return ranks.split_work(rollouts, lambda own, _: score(own, reward))


def _drop_term_rewards(rollout: Rollout) -> Rollout:
    """The rollout with only its environment's payments, without the rewards of per-step terms."""
    if not rollout.environment_rewards:
        return rollout
    steps = tuple(
        step._replace(reward=paid)
        for step, paid in zip(rollout.steps, rollout.environment_rewards, strict=True)
    )
    return rollout._replace(steps=steps, environment_rewards=())


def _score_column(name: str, rollouts: Sequence[Rollout], reward: Reward) -> list[Checked]:
    """The checked values of one term for all rollouts, in their order. Raises: RewardError if the
    term fails on too many."""
    term = reward.terms[name]
    count = len(rollouts)
    limit = reward.max_error_rate
    allowed = int(limit * count)
    # the list is shorter only if there were too many failures
    known = zip(rollouts, call_term(term, rollouts, allowed), strict=False)
    cells = [check_value(value, rollout, term, f"reward/{name}") for rollout, value in known]
    failed = [i for i, cell in enumerate(cells) if cell.failure]
    if len(failed) > limit * count:
        first = failed[allowed]  # the first failure beyond the allowed number
        rate = f" ({len(failed)} of {count} rollouts failed, more than max_error_rate={limit:g})"
        raise reward_error(f"term {name!r}", rollouts[first], cells[first], rate if limit else "")
    return cells


def _with_scores(rollout: Rollout, row: Mapping[str, Checked], reward: Reward) -> Rollout:
    """The rollout with the values of its terms and the rewards of its steps, but without its
    reward."""
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
    """The rollouts with `reward`, if no term of non-zero weight is None."""
    counted = [name for name, term in reward.terms.items() if term.weight]
    places = [
        i
        for i, rollout in enumerate(rollouts)
        if rollout.truncation != "error"
        and all(rollout.rewards[name] is not None for name in counted)
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
    """Raise RewardError if an episode's rewards, the environment's payments at the steps included,
    add up to more than float32 can train on."""
    for rollout in rollouts:
        total = rollout.total_reward
        if total is not None and not abs(total) <= LARGEST:
            raise RewardError(
                f"the rewards of an episode of task {rollout.task.id!r} add up to {total}, the"
                f" steps' rewards included; training allows at most {LARGEST:g} in magnitude",
                rollout,
            )


def _aggregates(term: Term, rollouts: Sequence[Rollout], reward: Reward) -> Sequence[Any]:
    """The aggregator's value for each rollout: a number, alone or with metrics, or an
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
