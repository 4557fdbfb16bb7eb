"""A limit of wall-clock time on a call of plain Python."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


class DeadlinePassed(TimeoutError):
    """The call gave nothing in time. It is no TimeoutError that the call itself raised."""


def in_thread(call: Callable[[], T], seconds: float | None) -> T:
    """A call's result, or what it raises, from a thread that does not keep the process alive.

    A thread cannot be killed: a call that is given up goes on in the background, and one that never lets go of the
    interpreter (a single huge power, a C function that holds the lock) is not even noticed in time. What may truly hang
    belongs into a child process, as the python tool and math_verify do it.

    Args:
      seconds: that are waited; None waits for ever.
    Raises: DeadlinePassed after that time, and whatever the call raises, KeyboardInterrupt and SystemExit too.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised again by the one who waits
            future.set_exception(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        raise DeadlinePassed(f"nothing within {seconds:g} s")
    return future.result()
