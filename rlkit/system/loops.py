"""Run coroutines from plain code, and handle their failures."""

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
    """Run a coroutine and return its result. If a loop is already running, for example in a
    notebook, this outer loop waits meanwhile.

    At its end, `asyncio.run` waits without a limit for every remaining task and thread. This
    function abandons a task or thread that does not end.
    """
    with allow_another_loop():
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        loop = runner.get_loop()
        threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
        loop.set_default_executor(threads)
        try:
            # in a task of its own, which can be left behind
            return runner.run(run_together([main]))[0]
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


def _end_tasks(runner: asyncio.Runner) -> None:
    """Cancel every task of a loop once, and wait for the tasks as long as `wind_up` does.

    If a task raises an exception that ends the loop at once, for example KeyboardInterrupt, the
    wait for the other tasks continues.
    """
    ends: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit)
    running = asyncio.all_tasks(runner.get_loop())
    for task in running:
        task.cancel()  # before the loop runs again, so a waking task sees this first
    left = running
    while True:
        try:
            runner.run(_ended(running))
            return
        except ends:
            before = left
            left = {task for task in before if not task.done()}
            if left == before:  # the exception came from outside
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
            task.exception()  # otherwise asyncio warns of an unread exception
    if any(not task.done() for task in tasks):
        return  # a task left behind still uses its generators
    with suppress(TimeoutError):
        async with asyncio.timeout(waiting.GRACE):
            await asyncio.get_running_loop().shutdown_asyncgens()


def make_blocking(function: Callable[P, Coroutine[Any, Any, T]], *, name: str) -> Callable[P, T]:
    """Wrap a coroutine function as a plain function with the same signature. A call runs the
    coroutine to its end."""

    @functools.wraps(function)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(function(*args, **kwargs))

    plain.__name__ = plain.__qualname__ = name
    return plain


@contextmanager
def allow_another_loop() -> Iterator[None]:
    """Allow another event loop inside this block, even if a loop is already running.

    The other loop runs in the same thread, because grad mode, autocast and signal handlers belong
    to the thread.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


async def run_together(
    coroutines: Iterable[Coroutine[Any, Any, T]], *, announced: bool = False
) -> list[T]:
    """Run coroutines at the same time and return their results.

    At the first error, or if this task is cancelled, the remaining coroutines are cancelled and
    awaited. A task inside `closing` is not cancelled, but ends by itself. A task left behind
    (`leave_behind`) counts as an error, unless it has a substitute result (`set_substitute`).

    Args:
      announced: if True, the first error is printed before the remaining coroutines are awaited,
        because it ends a step.
    Raises: the first error, as it was raised.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    ended: list[asyncio.Task[T]] = []
    try:
        await wait_for_tasks(tasks, until=has_failed)
        ended = [task for task in tasks if is_over(task)]
    finally:
        others = [task for task in tasks if not is_over(task)]
        first = next((error for task in ended if (error := get_error(task)) is not None), None)
        if others:
            if announced and first is not None:
                announce(first)
            for task in others:
                if task not in CLOSING:
                    task.cancel()
            await wind_up(others)
        for task in tasks:
            get_error(task)  # otherwise asyncio warns of an unread exception
    if first is not None:
        raise first
    return [get_result(task) for task in tasks]


# -------------------------------------------------------------------------------- tasks left behind

# task left behind → its substitute result, or the error for its waiter
LEFT: WeakKeyDictionary[asyncio.Future[Any], Any] = WeakKeyDictionary()
# unfinished tasks of closed loops; if freed, they would run their `finally` blocks
KEPT: list[asyncio.Task[Any]] = []
INSTEAD: WeakKeyDictionary[asyncio.Future[Any], Callable[[BaseException], Any]] = (
    WeakKeyDictionary()
)
LISTENERS: WeakKeyDictionary[asyncio.Future[Any], Callable[[asyncio.Future[Any]], None]] = (
    WeakKeyDictionary()
)


def set_substitute(make: Callable[[BaseException], Any]) -> None:
    """Set a substitute for the current task's result: if the task is left behind, its result is
    `make(error)`."""
    task = asyncio.current_task()
    assert task is not None
    INSTEAD[task] = make


def leave_behind(task: asyncio.Task[Any], error: BaseException) -> None:
    """Stop waiting for a task that swallows its cancellation. The task may go on, but its result is
    ignored."""
    if is_over(task):
        return
    make = INSTEAD.pop(task, None)
    LEFT[task] = error if make is None else make(error)
    waiting.forget(task=task)
    tell = LISTENERS.get(task)
    if tell is not None:
        tell(task)


def is_left() -> bool:
    """Return whether the current task has been left behind."""
    return asyncio.current_task() in LEFT


def is_over(task: asyncio.Future[Any]) -> bool:
    """Return whether a task has ended or was left behind."""
    return task in LEFT or task.done()


def get_error(task: asyncio.Future[Any]) -> BaseException | None:
    """Return the error with which a task ended or was left behind; None without an error, or after
    a cancellation."""
    if task in LEFT:
        found = LEFT[task]
        return found if isinstance(found, BaseException) else None
    return None if not task.done() or task.cancelled() else task.exception()


def get_result(task: asyncio.Future[T]) -> T:
    """Return the result of a task that is over, or raise its error."""
    if task not in LEFT:
        if task.cancelled():  # by user code: rlkit never asks for the result after its cancel
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
    """Return whether a task is over with an error."""
    return get_error(task) is not None


async def wait_for_tasks(
    tasks: Collection[asyncio.Future[Any]],
    *,
    until: Callable[[asyncio.Future[Any]], bool] = lambda task: False,
    seconds: float | None = None,
) -> None:
    """Wait until all of these tasks are over, or until `until(task)` is true for one of them, or
    until `seconds` have passed.

    This is like `asyncio.wait`, but a task left behind counts as over.
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
    """Wait for cancelled tasks. A task not over within GRACE seconds is left behind. A task inside
    `closing` may take longer, because its close has a time limit of its own."""
    told = {task for task in tasks if task not in CLOSING}
    while any(not is_over(task) for task in tasks):
        await wait_for_tasks(tasks, seconds=waiting.GRACE)
        for task in tasks:
            if is_over(task) or task in CLOSING:
                continue
            if task in told:
                leave_behind(
                    task,
                    Hung(
                        f"{waiting.describe_wait(task)} did not end within {waiting.GRACE:g} s"
                        " after it was cancelled"
                    ),
                )
            else:
                task.cancel()
                told.add(task)


CLOSING: WeakSet[asyncio.Task[Any]] = WeakSet()


@contextmanager
def closing() -> Iterator[None]:
    """Protect a block that frees the current task's resources: an error in another task of
    `run_together` does not cancel it."""
    task = asyncio.current_task()
    assert task is not None
    CLOSING.add(task)
    try:
        yield
    finally:
        CLOSING.discard(task)


async def await_value(value: Any) -> Any:
    """Return a plain value, or await it if it is awaitable."""
    return await value if inspect.isawaitable(value) else value
