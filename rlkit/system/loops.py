"""Running coroutines from plain code, and what comes out of them when they fail."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], runner: asyncio.Runner | None = None) -> T:
    """What a coroutine returns. Works where a loop is running already, as in a notebook: that one waits meanwhile.

    With a `runner` its loop is used, and stays as it is then; without one a new loop, which ends with the coroutine.

    The inner loop runs in this same thread, because grad mode, autocast and signal handlers belong to the thread.
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(main) if runner is None else runner.run(main)
    finally:
        asyncio._set_running_loop(outer)


@contextmanager
def first_error() -> Iterator[None]:
    """Raises the first error of a TaskGroup as it was raised, in place of the group around it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
    else:
        return
    raise error


async def awaited(value: Any) -> Any:
    """The value, or what it gives where it has to be awaited: for what may be plain or async."""
    return await value if inspect.isawaitable(value) else value
