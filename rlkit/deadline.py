"""Limits of wall-clock time: on a call of plain Python, and on what the whole process does."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread, Timer
from typing import TypeVar

T = TypeVar("T")
GRACE = 5.0  # seconds until a process that cannot even say that it hangs is ended


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


@contextmanager
def process_ends_after(minutes: float | None, what: Callable[[], str]) -> Iterator[None]:
    """A block at whose deadline the process says what hangs and where each of its threads stands, and ends with status 1.

    Nothing milder ends an engine or a function of the user's that waits for ever. One such block at a time.

    Args:
      minutes: None waits for ever.
      what: the sentence to say, asked for at the deadline.
    """
    if minutes is None:
        yield
        return
    timer = Timer(60 * minutes, _end, (what,))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(60 * minutes + GRACE, exit=True)  # also where nothing lets go of the interpreter
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end(what: Callable[[], str]) -> None:
    os.write(2, f"\nrlkit: {what()}. Where each thread stands:\n".encode())
    faulthandler.dump_traceback()
    os._exit(1)
