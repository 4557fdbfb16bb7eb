"""Running coroutines from plain code, and what comes out of them when they fail."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

T = TypeVar("T")
P = ParamSpec("P")


def run(main: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns. Works where a loop is running already, as in a notebook: that one waits meanwhile."""
    with outside_loops():
        return asyncio.run(main)


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

    It runs in this same thread, because grad mode, autocast and signal handlers belong to the thread.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What coroutines return that run at the same time.

    At the first error, or where this one is cancelled, the others are cancelled and awaited; those that are closing end by themselves.
    Raises: the first error, as it was raised.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    ended: set[asyncio.Task[T]] = set()
    try:
        if tasks:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        others = [task for task in tasks if not task.done()]
        for task in others:
            if task not in CLOSING:
                task.cancel()
        if others:
            await asyncio.wait(others)
        errors = {task: task.exception() for task in tasks if not task.cancelled()}  # each is looked at, or asyncio complains
    for task, error in errors.items():
        if error is not None and task in ended:
            raise error
    return [task.result() for task in tasks]


CLOSING: WeakSet[asyncio.Task[Any]] = WeakSet()


@contextmanager
def closing() -> Iterator[None]:
    """A block that frees what a task holds: an error in one of the others of `together` does not cut it short."""
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


class AtMost:
    """At most `n` blocks run at the same time, in whichever event loops and threads. Those that wait are served in their order."""

    def __init__(self, n: int):
        self.free, self.lock, self.queue = n, threading.Lock(), deque[Future[None]]()

    @asynccontextmanager
    async def held(self, late: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """A block that holds a slot. `late` is called where it has to wait for one, before it waits."""
        turn: Future[None] = Future()
        self.queue.append(turn)
        self._give(0)
        if not turn.done():
            late()
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # it was given at the same moment
                self._give(1)
            raise
        try:
            yield
        finally:
            self._give(1)

    def _give(self, back: int) -> None:
        with self.lock:
            self.free += back
            while self.free and self.queue:
                turn = self.queue.popleft()
                if turn.set_running_or_notify_cancel():
                    self.free -= 1
                    turn.set_result(None)
