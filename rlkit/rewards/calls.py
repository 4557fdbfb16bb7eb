"""Call the functions of terms: plain, async or batched functions, with time limits and in threads.

If a function raises, its call returns the exception instead of a value. The file checks.py then
decides whether a value is a score.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from rlkit.errors import Refusal
from rlkit.rewards.terms import Term
from rlkit.system.copies import copy_value
from rlkit.system.deadline import (
    DeadlinePassed,
    cancel_after,
    contain_call,
    run_in_thread,
    run_in_worker,
)
from rlkit.system.loops import (
    get_error,
    get_result,
    has_failed,
    is_over,
    leave_behind,
    run,
    wait_for_tasks,
)
from rlkit.system.shared_state import Watch, get_current_watch
from rlkit.system.waiting import note_movement, waiting
from rlkit.types import Rollout

# seconds after the term's timeout until async calls that block their event loop are given up
GRACE = 15.0


class Misshapen(Exception):
    """Say that a returned value is not a reward."""


class Unawaited(Exception):
    """Say that a call was not awaited to its end, because scoring had already failed."""


def call_term(term: Term, rollouts: Sequence[Rollout], allowed: int) -> list[Any]:
    """Return the result of the term's function for each rollout: a value or an exception.

    Async calls are awaited together, after the plain calls. When more than `allowed` calls have
    timed out, the list ends early. The RL step has then failed, and each further call could take
    just as long.
    """
    values: list[Any] = []
    timeouts = 0
    for value in call_each(term, rollouts) if rollouts else ():
        values.append(value)
        timeouts += isinstance(value, DeadlinePassed)
        if timeouts > allowed:
            return list(map(_close_awaitable, values))
    pending = [i for i, value in enumerate(values) if inspect.isawaitable(value)]
    results = _await_all([values[i] for i in pending], term, allowed)
    for i, value in zip(pending, results, strict=True):
        values[i] = value
    return values


def call_each(term: Term, rollouts: Sequence[Rollout]) -> Iterable[Any]:
    """Yield the result of the function for each rollout: a value, an exception, or an awaitable.

    Each call gets its own copies of the rollouts. If a call changes shared state, the state is
    restored before the next call. rlkit.system.waiting measures the time of all calls together.
    """
    with waiting("the reward", term.fn, count=len(rollouts)):
        if term.takes_all:
            values = call(partial(call_on_copy, term.fn, list(rollouts)), term, get_current_watch())
            values = _await_all([values], term)[0] if inspect.isawaitable(values) else values
            yield from spread(values, len(rollouts))
            return
        here = term.threads == 1
        calls = [
            partial(
                call, partial(call_on_copy, term.fn, rollout), term, get_current_watch(), here=here
            )
            for rollout in rollouts
        ]
        if not here:
            yield from _run_in_threads(calls, term.threads)
            return
        for one in calls:
            yield one()
            note_movement()


def call(function: Callable[[], Any], term: Term, watch: Watch, *, here: bool = True) -> Any:
    """Return the value returned by the term's function, or the exception raised by it. `here` says
    whether this call runs in the same thread as `watch`."""

    def work() -> Any:
        with (
            watch.watch_call(term.fn)
            if here and term.timeout is None
            else watch.watch_worker(term.fn)
        ):
            return function()

    try:
        return contain_call(work) if term.timeout is None else run_in_thread(work, term.timeout)
    except Refusal:
        raise
    except Exception as error:
        return error


def call_on_copy(function: Callable[..., Any], given: Any, *more: Any) -> Any:
    """Call a function with a copy of its first argument."""
    return function(copy_value(given), *more)


def spread(values: Any, count: int) -> Sequence[Any]:
    """Return one result per rollout from the value of a batched function. If the function failed,
    every rollout gets the same failure."""
    failure = (
        values
        if isinstance(values, Exception)
        else shape_problem(values, count, "rollouts; a batched term returns one value for each")
    )
    return [failure] * count if failure else values


def shape_problem(values: Any, count: int, what: str) -> Misshapen | None:
    """Check that a value is a list of `count` entries. Return an error that describes the mistake,
    or None."""
    if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == count:
        return None
    size = f"a list of {len(values)}" if isinstance(values, list) else type(values).__name__
    return Misshapen(f"{size} for {count} {what}")


# ----------------------------------------------------------------------------- threads and awaiting


def _run_in_threads(calls: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """Return the values of the calls, in order; `threads` calls run at the same time. Raises the
    first Refusal."""

    async def together() -> list[Any]:
        places = asyncio.Semaphore(threads)

        async def one(function: Callable[[], Any]) -> Any:
            async with places:
                value = await run_in_worker(function, None, "a reward function")
                note_movement()
                return value

        return await asyncio.gather(*map(one, calls))

    return run_in_thread(lambda: run(together()), None)


def _close_awaitable(value: Any) -> Any:
    """Return a plain value unchanged. Close an awaitable and return Unawaited in its place."""
    if inspect.iscoroutine(value):
        value.close()
    return Unawaited() if inspect.isawaitable(value) else value


def _await_all(awaitables: Sequence[Awaitable[Any]], term: Term, allowed: int = 0) -> list[Any]:
    """Await all calls together and return their results or exceptions. The awaitables run in a
    separate thread, because a notebook has its own running event loop.

    After more exceptions than `allowed`, or after a Refusal, no further call is awaited. The result
    of each call without a result is then an Unawaited.
    """
    if not awaitables:
        return []
    timeout = term.timeout
    watch = get_current_watch()

    def work() -> list[Any]:
        with watch.watch_worker(term.fn):
            return run(together())

    async def one(awaitable: Awaitable[Any]) -> Any:
        with waiting("the reward", awaitable):
            async with cancel_after(timeout):
                return await awaitable

    async def together() -> list[Any]:
        tasks = [asyncio.create_task(one(awaitable)) for awaitable in awaitables]
        await wait_for_tasks(
            tasks, until=lambda task: has_failed(task) and _has_too_many_failures(tasks, allowed)
        )
        for task in tasks:
            if not is_over(task):
                task.cancel()
                leave_behind(task, Unawaited())
        return [_outcome(task) for task in tasks]

    try:
        results = run_in_thread(work, None if timeout is None else timeout + GRACE)
    except TimeoutError as error:
        return [error] * len(awaitables)
    for result in results:
        if isinstance(result, BaseException) and (
            isinstance(result, Refusal) or not isinstance(result, Exception)
        ):
            raise result
    return results


def _outcome(task: asyncio.Task[Any]) -> Any:
    try:
        return get_result(task)
    except BaseException as error:  # returned, because the caller decides which error to raise
        return error


def _has_too_many_failures(tasks: Sequence[asyncio.Task[Any]], allowed: int) -> bool:
    """Return whether scoring has already failed, so the results of the remaining tasks no longer
    matter."""
    errors = [error for task in tasks if is_over(task) and (error := get_error(task)) is not None]
    return len(errors) > allowed or any(isinstance(error, Refusal) for error in errors)
