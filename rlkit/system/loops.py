"""Running coroutines from plain code, and what comes out of them when they fail."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from rlkit.errors import EnvironmentFailed, Hung, announce
from rlkit.system import waiting

T = TypeVar("T")
P = ParamSpec("P")


def run(main: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns. Works where a loop is running already, as in a notebook: that one
    waits meanwhile.

    `asyncio.run` waits without a limit for every task and thread that is left. Here those that do
    not end are abandoned.
    """
    with outside_loops():
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        loop = runner.get_loop()
        threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
        loop.set_default_executor(threads)
        try:
            return runner.run(_alone(main))
        except RuntimeError as error:
            if str(error).startswith("Event loop stopped"):
                raise EnvironmentFailed(
                    "code of a tool, an environment or a reward stopped the event loop, which all"
                    " episodes share; take its loop.stop() out"
                ) from None
            raise
        finally:
            _end_tasks(runner)
            threads.shutdown(wait=False, cancel_futures=True)
            loop.close()


async def _alone(main: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns in a task of its own, which can be left behind."""
    return (await together([main]))[0]


def _end_tasks(runner: asyncio.Runner) -> None:
    """Cancels all that still runs in a loop, once, and waits for it as long as `wind_up` does.

    It waits on where a task raises what ends the loop at once, such as KeyboardInterrupt.
    """
    ends: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
    running = asyncio.all_tasks(runner.get_loop())
    for task in running:
        task.cancel()  # before the loop runs on: what wakes up sees this first
    left = running
    while True:
        try:
            runner.run(_ended(running))
            return
        except ends:
            before = left
            left = {task for task in before if not task.done()}
            if left == before:  # it came from outside
                raise


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    if any(task not in LEFT for task in tasks):
        await wind_up([task for task in tasks if task not in LEFT])
    elif tasks:
        await asyncio.sleep(0)
    for task in tasks:
        if not task.done():
            KEPT.append(task)
        elif not task.cancelled():
            task.exception()  # looked at, or asyncio complains
    if any(not task.done() for task in tasks):
        return  # generators of a task that was left behind are in use
    with suppress(TimeoutError):
        async with asyncio.timeout(waiting.GRACE):
            await asyncio.get_running_loop().shutdown_asyncgens()


def blocking(function: Callable[P, Coroutine[Any, Any, T]], *, name: str) -> Callable[P, T]:
    """A coroutine function as a plain function of the same signature, which runs it to its end."""

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(function(*args, **kwargs))

    plain.__name__ = plain.__qualname__ = name
    return plain


@contextmanager
def outside_loops() -> Iterator[None]:
    """A block in which another event loop may run, even where one is running already.

    It runs in this same thread, because grad mode, autocast and signal handlers belong to the
    thread.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


async def together(
    coroutines: Iterable[Coroutine[Any, Any, T]], *, announced: bool = False
) -> list[T]:
    """What coroutines return that run at the same time.

    At the first error, or where this one is cancelled, the others are cancelled and awaited; those
    that are closing end by themselves. A task that is left behind (`leave_behind`) counts as an
    error, unless it has named what takes its place.

    Args:
      announced: the first error ends a step, and is printed before the others are awaited.
    Raises: the first error, as it was raised.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    ended: list[asyncio.Task[T]] = []
    try:
        await settled(tasks, until=has_failed)
        ended = [task for task in tasks if is_over(task)]
    finally:
        others = [task for task in tasks if not is_over(task)]
        first = next((error for task in ended if (error := error_of(task)) is not None), None)
        if others:
            if announced and first is not None:
                announce(first)
            for task in others:
                if task not in CLOSING:
                    task.cancel()
            await wind_up(others)
        for task in tasks:
            error_of(task)  # each is looked at, or asyncio complains
    if first is not None:
        raise first
    return [result_of(task) for task in tasks]


# -------------------------------------------------------------------------------- tasks left behind

# task → its result, or the error, in its place
LEFT: WeakKeyDictionary[asyncio.Future[Any], Any] = WeakKeyDictionary()
# of loops that are closed: the garbage collector would run their `finally` blocks
KEPT: list[asyncio.Task[Any]] = []
INSTEAD: WeakKeyDictionary[asyncio.Future[Any], Callable[[BaseException], Any]] = (
    WeakKeyDictionary()
)
LISTENERS: WeakKeyDictionary[asyncio.Future[Any], Callable[[asyncio.Future[Any]], None]] = (
    WeakKeyDictionary()
)


def instead(make: Callable[[BaseException], Any]) -> None:
    """If this task is left behind, `make(error)` gives the result in its place."""
    task = asyncio.current_task()
    assert task is not None
    INSTEAD[task] = make


def leave_behind(task: asyncio.Task[Any], error: BaseException) -> None:
    """No one waits for this task any longer, which swallows its cancellation. It may go on; nothing
    is made of what it gives."""
    if is_over(task):
        return
    make = INSTEAD.pop(task, None)
    LEFT[task] = error if make is None else make(error)
    waiting.forget(task=task)
    tell = LISTENERS.get(task)
    if tell is not None:
        tell(task)


def was_left() -> bool:
    """Whether the task that asks has been left behind."""
    return asyncio.current_task() in LEFT


def is_over(task: asyncio.Future[Any]) -> bool:
    """Whether a task has ended or was left behind."""
    return task in LEFT or task.done()


def error_of(task: asyncio.Future[Any]) -> BaseException | None:
    """The error with which a task ended or was left behind; None where there is none, or it was
    cancelled."""
    if task in LEFT:
        found = LEFT[task]
        return found if isinstance(found, BaseException) else None
    return None if not task.done() or task.cancelled() else task.exception()


def result_of(task: asyncio.Future[T]) -> T:
    """What a task that is over gives. Raises: its error."""
    if task not in LEFT:
        if task.cancelled():  # by none of those who wait for it: they do not ask
            raise EnvironmentFailed(
                "code of a tool, an environment or a reward cancelled the task of its episode; take"
                " its cancel() out"
            )
        return task.result()
    found = LEFT[task]
    if isinstance(found, BaseException):
        raise found
    return found


def has_failed(task: asyncio.Future[Any]) -> bool:
    """Whether a task is over with an error."""
    return error_of(task) is not None


async def settled(
    tasks: Collection[asyncio.Future[Any]],
    *,
    until: Callable[[asyncio.Future[Any]], bool] = lambda task: False,
    seconds: float | None = None,
) -> None:
    """Waits until all of these tasks are over, or one is for which `until` holds, or for so many
    seconds.

    As `asyncio.wait`, which knows of no task that is left behind.
    """
    missing = {task for task in tasks if not is_over(task)}
    if not missing or any(until(task) for task in tasks if task not in missing):
        return
    loop = asyncio.get_running_loop()
    enough = loop.create_future()

    def look(task: asyncio.Future[Any]) -> None:
        missing.discard(task)
        if not enough.done() and (not missing or until(task)):
            enough.set_result(None)

    def stop() -> None:
        if not enough.done():
            enough.set_result(None)

    late = None if seconds is None else loop.call_later(seconds, stop)
    asked = list(missing)
    for task in asked:
        task.add_done_callback(look)
        LISTENERS[task] = look
    try:
        await enough
    finally:
        if late is not None:
            late.cancel()
        for task in asked:
            task.remove_done_callback(look)
            LISTENERS.pop(task, None)


async def wind_up(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Waits for tasks that have been cancelled. One that is not over within GRACE is left behind;
    one that is closing has longer, because its close has a limit of its own."""
    told = {task for task in tasks if task not in CLOSING}
    while any(not is_over(task) for task in tasks):
        await settled(tasks, seconds=waiting.GRACE)
        for task in tasks:
            if is_over(task) or task in CLOSING:
                continue
            if task in told:
                leave_behind(
                    task,
                    Hung(
                        f"{waiting.waits_of(task)} did not end within {waiting.GRACE:g} s after it"
                        " was cancelled"
                    ),
                )
            else:
                task.cancel()
                told.add(task)


CLOSING: WeakSet[asyncio.Task[Any]] = WeakSet()


@contextmanager
def closing() -> Iterator[None]:
    """A block that frees what a task holds: an error in one of the others of `together` does not
    cut it short."""
    task = asyncio.current_task()
    assert task is not None
    CLOSING.add(task)
    try:
        yield
    finally:
        CLOSING.discard(task)


async def awaited(value: Any) -> Any:
    """The value, or what it gives where it has to be awaited: for what may be plain or async."""
    return await value if inspect.isawaitable(value) else value
