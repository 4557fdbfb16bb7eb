"""Limits of plain Python that rlkit calls for the user: its wall-clock time, and that it does not end the process."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread, Timer
from typing import TypeVar

from rlkit.errors import Interrupted, raised_at

T = TypeVar("T")
end_process = os._exit  # the system's own, whatever stands in its place while user code runs
GRACE = 5.0  # seconds until a process that cannot even say that it hangs is ended


class DeadlinePassed(TimeoutError):
    """The call gave nothing in time. It is no TimeoutError that the call itself raised."""


class ProcessEndAsked(RuntimeError):
    """Code that rlkit called tried to end the process. The message says how and where: "os._exit(3) at tools.py:12"."""


class _Exit(BaseException):
    """What os._exit raises while user code runs: nothing that a tool catches by habit."""


_Exit.__name__ = "os._exit"  # as a message names it


CALLED = threading.local()  # .by: the process in which this thread runs user code; a fork of it may exit as it likes


def contained(call: Callable[[], T]) -> T:
    """A call's result, or the exception that it raises. It ends neither the process nor the run.

    SystemExit, KeyboardInterrupt, any other BaseException that the call raises, and os._exit in its thread, become ProcessEndAsked.
    An interruption from outside passes: a signal that rlkit handles, and Ctrl-C where Python's own handler is in place. An exit from C,
    or a crash, cannot be stopped here; what may do that belongs into a child process.
    """
    outer = getattr(CALLED, "by", None)
    CALLED.by, os._exit = os.getpid(), _asked  # type: ignore[assignment]
    try:
        return call()
    except (Exception, Interrupted):
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and _may_be_typed():
            raise
        raise ProcessEndAsked(raised_at(error, back=2 if isinstance(error, _Exit) else 1)) from error
    finally:
        CALLED.by = outer


def _asked(status: int) -> None:
    """os._exit while user code runs: in a thread that runs it, an exception; anywhere else, and in a fork, the real one."""
    if getattr(CALLED, "by", None) == os.getpid():
        raise _Exit(status)
    end_process(status)


def _may_be_typed() -> bool:
    """Whether a KeyboardInterrupt in this thread may come from Ctrl-C: only in the main thread, and only from Python's own handler."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def in_thread(call: Callable[[], T], seconds: float | None) -> T:
    """A call's result, or what it raises, from a thread that does not keep the process alive.

    A thread cannot be killed: a call that is given up goes on in the background, and one that never lets go of the
    interpreter (a single huge power, a C function that holds the lock) is not even noticed in time. What may truly hang
    belongs into a child process, as the python tool and math_verify do it.

    Args:
      seconds: that are waited; None waits for ever.
    Raises: DeadlinePassed after that time, and whatever the call raises; ProcessEndAsked where it tries to end the process.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(contained(call))
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
    end_process(1)
