"""Filling in the rewards of rollouts: every term by name, how each score came about, and their
aggregate. And whether a reward can read the truths of rows, which is asked of every row before
anything is trained or evaluated."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Literal, NamedTuple, Self, TypeVar

from rlkit.distributed import ranks
from rlkit.errors import ConfigError, Refusal, RLKitError, place, written
from rlkit.rewards.aggregators import weighted_sum
from rlkit.system.copies import copied
from rlkit.system.deadline import DeadlinePassed, contained, in_thread, in_worker, within
from rlkit.system.loops import (
    LEFT,
    error_of,
    has_failed,
    is_over,
    leave_behind,
    result_of,
    run,
    settled,
)
from rlkit.system.shared_state import Watch, current, guard_state, is_own
from rlkit.system.waiting import note_movement, waiting
from rlkit.types import AggregatorFn, Metrics, Rollout, Task, safe, unpacked

F = TypeVar("F", bound=Callable[..., Any])
NOTES = "reward_metrics"  # key of a rollout's metadata: term → metric → value
# key of a rollout's metadata: what its steps earned before terms of steps were added
PLAYED = "environment_rewards"
TAKEN = ("mean", "std", "variance_share")  # reward/TERM/… that rlkit measures
# seconds beyond a term's timeout after which async calls that block their event loop are given up
GRACE = 15.0
ScoreStatus = Literal["ok", "wrong", "unparseable", "timeout", "error"]


class RewardError(RLKitError, RuntimeError):
    """A reward function raised, hung, or returned what is no reward. Never counted as a score of 0.
    `rollout` is where it happened."""

    def __init__(self, message: str, rollout: Rollout | None = None) -> None:
        super().__init__(message)
        self.rollout = rollout


class Verdict(float):
    """A score that says how it came about, where the number alone does not: Verdict(0.0,
    "unparseable"), Verdict(0.0, "timeout")."""

    status: ScoreStatus

    def __new__(cls, score: float, status: ScoreStatus) -> Self:
        verdict = super().__new__(cls, score)
        verdict.status = status
        return verdict


class Paid(Verdict):
    """0 for an episode that has been rewarded at its steps already. What was paid there is the
    component that is logged and that an algorithm reads, and does not count a second time."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __new__(cls, amount: float) -> Self:
        return super().__new__(cls, 0.0, "ok" if amount > 0 else "wrong")


def final_answer(rollout: Rollout) -> str | None:
    """Content of the last reply, thinking excluded, or None where the episode ended without a final
    answer.

    There is none in an episode without a reply, in one that was truncated, in a reply cut off by
    the length limit (what it would have said next is unknown), and in a reply that still calls
    tools.
    """
    if not rollout.steps or rollout.status == "truncated":
        return None
    last = rollout.steps[-1]
    return None if last.finish_reason == "length" or last.tool_calls else rollout.final_content


@safe("fn")
class Term(NamedTuple):
    """A component of a reward: a function of one rollout, plain or async.

    fn        gives the score, or a pair (score, metrics): numbers by name, of which the step's row
              has the mean as reward/TERM/NAME weight    factor in the aggregate; 0 makes it a
              shadow metric: scored and logged, not part of the reward
    batched   fn takes the list of all rollouts and returns a list of scores
    per_step  fn returns a list, one number or None a step. weight * number is added to
              `Step.reward`, to what the environment paid there; the aggregate of the other terms
              stands at the end. The component that is logged is the sum of the numbers
    timeout   seconds that a call may take (of a batched term: the call for all rollouts); None: no
              limit. An async function is cancelled. A plain one runs in a thread, which cannot be
              killed: it is given up and goes on in the background, so what may truly hang belongs
              into a child process, as math_verify does it
    threads   rollouts that a plain function scores at the same time, each in a thread, > 0: more
              than 1 for one that waits, such as for an answer over the network. What it draws at
              random then depends on the clock
    """

    weight: float
    fn: Callable[..., Any]
    batched: bool = False
    per_step: bool = False
    timeout: float | None = None
    threads: int = 1


@safe("name", "terms")
class Reward(NamedTuple):
    """Named terms in order, and how they become one number.

    aggregator      (scores, weights) → float, or one of the whole batch
                    (rlkit.rewards.aggregators). With metrics, as (float, metrics): numbers,
                    averaged over the scored rollouts as aggregator/NAME; they stand in
                    `Rollout.metadata["aggregator"]` max_error_rate  share of the rollouts, 0 … 1,
                    on which a term may raise, hang or return what is no reward; beyond it scoring
                    stops. Up to it, such a rollout cannot be scored (None) and is counted under
                    `reward/NAME/error_frac` and `timeout_frac` normalize       trains on (reward -
                    mean) / std over all episodes of the run so far (rlkit.rewards.normalise);
                    metrics stay raw
    """

    name: str
    terms: Mapping[str, Term]
    aggregator: AggregatorFn = weighted_sum
    max_error_rate: float = 0.0
    normalize: bool = False


class Cell(NamedTuple):
    """What one term makes of one rollout. `steps` is empty unless the term is one of steps."""

    score: float | None
    status: ScoreStatus
    steps: tuple[float, ...] = ()
    failure: str = ""  # why there is no score, where the term is to blame
    cause: BaseException | None = None
    notes: Mapping[str, float] = {}  # metrics that the function gave beside the score
    paid: float | None = None  # the component, where it is not the score (Paid)


def score(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """The rollouts with `reward`, `rewards` and `statuses` filled in, and the rewards of steps
    where terms give some.

    Args:
      rollouts: scored in order; earlier scores on them are replaced.
      reward: its terms of non-zero weight are aggregated; the others only appear in `rewards`.
    Returns: new rollouts. `rewards` holds every term by name, `statuses` how each came about: ok (>
      0), wrong (≤ 0), unparseable (None, or a Verdict that says so), timeout, error. `reward` is
      None, "cannot be scored", where any term of non-zero weight is None, and where the environment
      failed (a truncation "error"); it is kept out of every baseline. With terms of steps alone it
      is 0.
    Raises: RewardError naming the term, the task and the cause where more than `max_error_rate` of
      the rollouts make a term raise, hang, or return anything but a finite number, a bool or None
      (a list of these, one a rollout, where it is batched; one a step, where it is per step), and
      where the aggregator does. ConfigError where every weight is 0, or a limit is out of range. A
      Refusal raised by a function says what the user has to mend and passes unchanged.
    """
    _require(reward)
    with guard_state(reward.aggregator, *(term.fn for term in reward.terms.values())):
        return _scored([_as_played(rollout) for rollout in rollouts], reward)


def _scored(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    columns = {
        name: _column(name, term, rollouts, reward.max_error_rate)
        for name, term in reward.terms.items()
    }
    scored = []
    for i, rollout in enumerate(rollouts):
        cells = {name: column[i] for name, column in columns.items()}
        rewards, statuses = (
            {name: getattr(cell, field) for name, cell in cells.items()}
            for field in ("score", "status")
        )
        fresh = rollout._replace(
            reward=None, rewards=rewards, statuses=statuses, metadata=_noted(rollout, cells)
        )
        scored.append(_with_step_rewards(fresh, cells, reward))
    paid = [
        {name: column[i].paid for name, column in columns.items() if column[i].paid is not None}
        for i in range(len(rollouts))
    ]
    with waiting("the reward's aggregator", reward.aggregator, count=len(scored)):
        out = _aggregated(scored, reward)
    return [
        rollout._replace(rewards={**rollout.rewards, **own}) if own else rollout
        for rollout, own in zip(out, paid, strict=True)
    ]


def _noted(rollout: Rollout, cells: Mapping[str, Cell]) -> Mapping[str, Any]:
    """The rollout's metadata with the metrics that its terms gave; those of an earlier scoring are
    replaced."""
    notes = {name: dict(cell.notes) for name, cell in cells.items() if cell.notes}
    if not notes and NOTES not in rollout.metadata:
        return rollout.metadata
    return {
        **{key: value for key, value in rollout.metadata.items() if key != NOTES},
        **({NOTES: notes} if notes else {}),
    }


def score_spread(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """The same with the rollouts shared out to all ranks, which all get all of them back.

    Where a function or `max_error_rate` looks at the whole batch, the first rank scores it.
    """
    functions = [reward.aggregator, *(term.fn for term in reward.terms.values())]
    whole = (
        reward.max_error_rate > 0
        or any(term.batched for term in reward.terms.values())
        or any(map(is_batched, functions))
    )
    return (
        ranks.broadcast(lambda: score(rollouts, reward))
        if whole
        else ranks.split_work(rollouts, lambda own, _: score(own, reward))
    )


def _require(reward: Reward) -> None:
    if not any(term.weight for term in reward.terms.values()):
        raise ConfigError(
            f"reward {reward.name!r} has no term of non-zero weight; set one of"
            " reward.terms.NAME.weight"
        )
    if not 0 <= reward.max_error_rate <= 1:
        raise ConfigError(
            f"reward {reward.name!r}: max_error_rate is a share of the rollouts, 0 … 1, not"
            f" {reward.max_error_rate}"
        )
    for name, term in reward.terms.items():
        if term.threads < 1:
            raise ConfigError(
                f"reward term {name!r}: threads must be at least 1, not {term.threads}"
            )
        if term.timeout is not None and not term.timeout > 0:
            raise ConfigError(
                f"reward term {name!r}: timeout must be > 0 seconds, or null for no limit, not"
                f" {term.timeout}"
            )
        wrong = _uncallable(term.fn)
        if wrong:
            what = "the list of rollouts" if term.batched or is_batched(term.fn) else "a rollout"
            raise ConfigError(
                f"reward term {name!r}: {written(term.fn)} is called with {what} alone, which it"
                f" does not fit: {wrong}"
            )


def _uncallable(fn: Callable[..., Any]) -> str:
    """Why a function cannot be called with one argument, and where it stands; "" where it can, or
    has no signature."""
    try:
        inspect.signature(fn).bind(None)
    except TypeError as error:
        code = getattr(inspect.unwrap(getattr(fn, "func", fn)), "__code__", None)
        return str(error) + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")
    except ValueError:
        pass
    return ""


# ------------------------------------------------------------------------------------------- a term


def _column(
    name: str, term: Term, rollouts: Sequence[Rollout], max_error_rate: float
) -> list[Cell]:
    """What one term makes of all rollouts, in their order; async calls are awaited together, after
    the plain ones."""
    allowed = int(max_error_rate * len(rollouts))
    values = _to_the_last_timeout(called_on(term, rollouts), allowed) if rollouts else []
    pending = [i for i, value in enumerate(values) if inspect.isawaitable(value)]
    for i, value in zip(
        pending, _awaited([values[i] for i in pending], term, allowed), strict=True
    ):
        values[i] = value
    known = zip(rollouts, values, strict=False)
    cells = [
        Cell(None, "error") if value is UNKNOWN else _cell(term, rollout, value)
        for rollout, value in known
    ]
    failed = [i for i, cell in enumerate(cells) if cell.failure]
    if len(failed) > max_error_rate * len(rollouts):
        first = failed[allowed]  # the one that was too many
        raise _refused(
            f"term {name!r}",
            rollouts[first],
            cells[first],
            len(failed),
            len(rollouts),
            max_error_rate,
        )
    return cells


def _to_the_last_timeout(values: Iterable[Any], allowed: int) -> list[Any]:
    """The values up to the timeout that is one too many: the step has failed then, and each further
    call may take as long."""
    out: list[Any] = []
    for value in values:
        out.append(value)
        allowed -= isinstance(value, DeadlinePassed)
        if allowed < 0:
            for other in out:
                if inspect.iscoroutine(other):
                    other.close()  # never awaited
            return [UNKNOWN if inspect.isawaitable(other) else other for other in out]
    return out


def called_on(term: Term, rollouts: Sequence[Rollout]) -> Iterable[Any]:
    """What the function returned for each rollout, one by one: a value, an exception, or what has
    yet to be awaited.

    Each call has copies of its own, and shared state that it changes is put back before the next
    one. The watcher names the function by the time of all calls together (rlkit.system.waiting).
    """
    with waiting("the reward", term.fn, count=len(rollouts)):
        if term.batched or is_batched(term.fn):
            values = _called(partial(_on_copy, term.fn, list(rollouts)), term, current())
            values = _awaited([values], term)[0] if inspect.isawaitable(values) else values
            yield from _spread(values, len(rollouts))
            return
        here = term.threads == 1
        calls = [
            partial(_called, partial(_on_copy, term.fn, rollout), term, current(), here=here)
            for rollout in rollouts
        ]
        if not here:
            yield from _in_threads(calls, term.threads)
            return
        for call in calls:
            yield call()
            note_movement()


def _on_copy(function: Callable[..., Any], given: Any, *more: Any) -> Any:
    return function(copied(given), *more)


def _in_threads(calls: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """What calls return, in their order, with so many of them under way at the same time. The first
    Refusal among them is raised."""

    async def together() -> list[Any]:
        places = asyncio.Semaphore(threads)

        async def one(call: Callable[[], Any]) -> Any:
            async with places:
                value = await in_worker(call, None, "a reward function")
                note_movement()
                return value

        return await asyncio.gather(*map(one, calls))

    return in_thread(lambda: run(together()), None)


def _called(call: Callable[[], Any], term: Term, watch: Watch, *, here: bool = True) -> Any:
    """What a call of the term's function returns, or the exception that it raises. `here`: in the
    thread of the watch."""

    def run() -> Any:
        with watch.calling(term.fn) if here and term.timeout is None else watch.in_worker(term.fn):
            return call()

    try:
        return contained(run) if term.timeout is None else in_thread(run, term.timeout)
    except Refusal:
        raise
    except Exception as error:
        return error


def _awaited(awaitables: Sequence[Awaitable[Any]], term: Term, allowed: int = 0) -> list[Any]:
    """Results or exceptions, all in flight together. In a thread: a notebook has a running event
    loop of its own.

    Nothing more is awaited once there are more exceptions than `allowed`, or a Refusal; what is not
    there yet is UNKNOWN.
    """
    if not awaitables:
        return []
    timeout = term.timeout
    watch = current()

    def work() -> list[Any]:
        with watch.in_worker(term.fn):
            return run(together())

    async def one(awaitable: Awaitable[Any]) -> Any:
        with waiting("the reward", awaitable):
            async with within(timeout):
                return await awaitable

    async def together() -> list[Any]:
        tasks = [asyncio.create_task(one(awaitable)) for awaitable in awaitables]
        await settled(tasks, until=lambda task: has_failed(task) and _too_many(tasks, allowed))
        for task in tasks:
            if not is_over(task):
                task.cancel()
                leave_behind(task, _Unknown())
        return [_outcome(task) for task in tasks]

    try:
        results = in_thread(work, None if timeout is None else timeout + GRACE)
    except TimeoutError as error:
        return [error] * len(awaitables)
    for result in results:
        if isinstance(result, Refusal) or (
            isinstance(result, BaseException) and not isinstance(result, Exception)
        ):
            raise result
    return [UNKNOWN if isinstance(result, _Unknown) else result for result in results]


class _Unknown(Exception):
    """A call that was not awaited to its end, because the step has failed."""


UNKNOWN = object()  # in the place of its value


def _outcome(task: asyncio.Task[Any]) -> Any:
    if task not in LEFT and task.cancelled():
        return asyncio.CancelledError()
    error = error_of(task)
    return result_of(task) if error is None else error


def _too_many(tasks: Sequence[asyncio.Task[Any]], allowed: int) -> bool:
    """Whether the step has failed already, whatever the other tasks give."""
    errors = [error for task in tasks if is_over(task) and (error := error_of(task)) is not None]
    return len(errors) > allowed or any(isinstance(error, Refusal) for error in errors)


def _spread(values: Any, count: int) -> Sequence[Any]:
    """A batched function's list, or its failure as that of every rollout."""
    what = "rollouts; a batched term returns a list, one for each"
    failure = values if isinstance(values, Exception) else _misshapen(values, count, what)
    return [failure] * count if failure else values


def _misshapen(values: Any, count: int, what: str) -> _Misshapen | None:
    """What is wrong with what should be a list of so many."""
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count:
        return None
    return _Misshapen(
        f"{f'a list of {len(values)}' if isinstance(values, list) else type(values).__name__} for"
        f" {count} {what}"
    )


class _Misshapen(Exception):
    """What a function returned is no reward."""


def _cell(term: Term, rollout: Rollout, value: Any) -> Cell:
    """A returned value, or a raised exception, as a score with its status."""
    where = f"on task {rollout.task.id!r}:"
    try:
        if isinstance(value, Exception):
            raise value
        value, metrics = unpacked(value)
        notes = {
            metric: number
            for metric, given in metrics.items()
            if (number := _metric(metric, given)) is not None
        }
        if not term.per_step or value is None:
            number = _number(value)
            return Cell(
                number,
                _status(value, number),
                notes=notes,
                paid=value.amount if isinstance(value, Paid) else None,
            )
        wrong = _misshapen(
            value,
            len(rollout.steps),
            "steps; a term per step returns a list, one number or None a step",
        )
        if wrong:
            raise wrong
        steps = tuple(_number(entry) or 0.0 for entry in value)
        return Cell(sum(steps), _status(None, sum(steps)), steps, notes=notes)
    except _Misshapen as error:
        return Cell(None, "error", failure=f"returned no reward {where} {error}")
    except TimeoutError as error:
        limit = "it timed out" if term.timeout is None else f"nothing within {term.timeout:g} s"
        return Cell(None, "timeout", failure=f"gave no score {where} {limit}", cause=error)
    except Exception as error:
        return Cell(
            None,
            "error",
            failure=f"raised {where} {type(error).__name__}: {error} at {place(error)}",
            cause=error,
        )


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise _Misshapen(
        f"{value!r:.200}; return a finite number, or None where the rollout cannot be scored"
    )


def _metric(name: str, value: Any) -> float | None:
    """A metric beside a score. Raises: _Misshapen for a name that rlkit uses, and for what is no
    number."""
    if name in TAKEN or name.endswith("_frac"):
        raise _Misshapen(f"a metric {name!r}, which rlkit has already; give it another name")
    return _number(value)


def _status(value: Any, number: float | None) -> ScoreStatus:
    if isinstance(value, Verdict):
        return value.status
    if number is None:
        return "unparseable"
    return "ok" if number > 0 else "wrong"


def _refused(
    who: str, rollout: Rollout, cell: Cell, failed: int, count: int, limit: float
) -> RewardError:
    said = (
        f"the last reply was {rollout.final_content[:200]!r}"
        if rollout.steps
        else "there is no reply"
    )
    rate = (
        f" ({failed} of {count} rollouts failed, more than max_error_rate={limit:g})"
        if limit
        else ""
    )
    error = RewardError(f"reward {who} {cell.failure}{rate}; {said}", rollout)
    error.__cause__ = cell.cause
    return error


# ------------------------------------------------------------------------------------ the aggregate


def _with_step_rewards(rollout: Rollout, cells: Mapping[str, Cell], reward: Reward) -> Rollout:
    """What the environment paid + Σ weight * number of the terms of steps, at each step; unchanged
    where there is no such term."""
    weights = {
        name: term.weight
        for name, term in reward.terms.items()
        if term.per_step and term.weight and cells[name].steps
    }
    if not weights:
        return rollout
    totals = [
        sum(weight * cells[name].steps[i] for name, weight in weights.items())
        for i in range(len(rollout.steps))
    ]
    steps = tuple(
        step._replace(reward=(step.reward or 0.0) + total)
        for step, total in zip(rollout.steps, totals, strict=True)
    )
    return rollout._replace(
        steps=steps, metadata={**rollout.metadata, PLAYED: [step.reward for step in rollout.steps]}
    )


def _as_played(rollout: Rollout) -> Rollout:
    """The rollout before terms of steps were added to what its environment paid."""
    if PLAYED not in rollout.metadata:
        return rollout
    steps = tuple(
        step._replace(reward=paid)
        for step, paid in zip(rollout.steps, rollout.metadata[PLAYED], strict=True)
    )
    return rollout._replace(
        steps=steps,
        metadata={key: value for key, value in rollout.metadata.items() if key != PLAYED},
    )


def _aggregated(rollouts: list[Rollout], reward: Reward) -> list[Rollout]:
    """The rollouts with `reward`, where no term of non-zero weight is None."""
    weighted = [name for name, term in reward.terms.items() if term.weight]
    weights = {
        name: reward.terms[name].weight for name in weighted if not reward.terms[name].per_step
    }
    known = [all(rollout.rewards[name] is not None for name in weighted) for rollout in rollouts]
    places = [i for i, rollout in enumerate(rollouts) if known[i] and rollout.truncation != "error"]
    chosen = [rollouts[i] for i in places]
    term = Term(1.0, reward.aggregator)
    watch = current()
    if not weights or not chosen:
        given: list[tuple[Any, Metrics]] = [(0.0, {})] * len(chosen)
    elif is_batched(reward.aggregator):
        values, metrics = unpacked(
            _called(partial(_on_copy, reward.aggregator, chosen, dict(weights)), term, watch)
        )
        lists = {
            n: _spread(v, len(chosen)) if isinstance(v, Sequence) else [v] * len(chosen)
            for n, v in metrics.items()
        }
        each = [{name: column[i] for name, column in lists.items()} for i in range(len(chosen))]
        given = list(zip(_spread(values, len(chosen)), each, strict=True))
    else:
        own = [{name: r.rewards[name] for name in weights} for r in chosen]
        given = [
            unpacked(_called(partial(reward.aggregator, scores, dict(weights)), term, watch))
            for scores in own
        ]
    out = list(rollouts)
    for i, rollout, (value, metrics) in zip(places, chosen, given, strict=True):
        cell = _cell(term, rollout, value)
        notes = {name: _cell(term, rollout, number) for name, number in metrics.items()}
        failed = next((c for c in (cell, *notes.values()) if c.failure), None)
        if failed:
            raise _refused(
                f"aggregator ({written(reward.aggregator)})", rollout, failed, 1, len(chosen), 0.0
            )
        noted = (
            {"aggregator": {name: c.score for name, c in notes.items() if c.score is not None}}
            if notes
            else {}
        )
        out[i] = rollout._replace(reward=cell.score, metadata={**rollout.metadata, **noted})
    return out


def is_batched(fn: Callable[..., Any]) -> bool:
    """Whether a function, or the one inside a `functools.partial`, is marked `@batched`."""
    while isinstance(fn, partial):
        fn = fn.func
    return bool(getattr(fn, "batched", False))


# ------------------------------------------------------------------------------- truths of the rows


def reads_truth(problem: Callable[..., str]) -> Callable[[F], F]:
    """Mark a reward function as one that has to read `task.answer`.

    Args:
      problem: (task, and the keywords that a config binds to the function) → why the function
        cannot read the task's truth, as the end of a sentence that begins with the truth; "" where
        it can. It is asked once for every row, so it has to be quick.
    """
    return reads_truths(lambda tasks, **keywords: [problem(task, **keywords) for task in tasks])


def no_gold(fn: F) -> F:
    """Mark a reward whose rows have no gold answer to try: the environment, a model or the row's
    own package judges."""
    fn.no_gold = True  # type: ignore[attr-defined]
    return fn


def has_gold(fn: Callable[..., Any]) -> bool:
    """Return whether a reward scores against a row's gold answer: it is not marked `no_gold`."""
    while isinstance(fn, partial):
        fn = fn.func
    return not getattr(fn, "no_gold", False)


def reads_truths(problems: Callable[..., list[str]]) -> Callable[[F], F]:
    """`reads_truth` for a function that asks about all rows at once: (tasks, keywords) → one
    problem for each task."""

    def mark(fn: F) -> F:
        fn.truth_problems = problems  # type: ignore[attr-defined]
        return fn

    return mark


def truth_problems(fn: Callable[..., Any], tasks: Sequence[Task]) -> list[str]:
    """Why a reward function cannot read the truth of each task; "" where it can, and for functions
    that are not marked."""
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial):
        keywords = {**fn.keywords, **keywords}
        fn = fn.func
    problems = getattr(fn, "truth_problems", None)
    tasks = tasks if is_own(problems) else copied(list(tasks))
    return problems(tasks, **keywords) if problems and tasks else [""] * len(tasks)
