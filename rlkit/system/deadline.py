"""Limits of plain Python that rlkit calls for the user: its wall-clock time, and that it does not end the process."""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock, Thread, Timer
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from rlkit.errors import Interrupted, raised_at, visible

T = TypeVar("T")
end_process = os._exit  # the system's own; `containing` replaces os._exit
GRACE = 5.0  # seconds until a process that cannot even say that it hangs is ended
MOST_THREADS = 256  # that work for one event loop at the same time; further calls wait for a place


class DeadlinePassed(TimeoutError):
    """The call gave nothing in time. It is no TimeoutError that the call itself raised."""


class ProcessEndAsked(RuntimeError):
    """Code that rlkit called tried to end the process. The message says how and where: "os._exit(3) at tools.py:12"."""


class _Exit(BaseException):
    """What os._exit raises while user code runs: nothing that a tool catches by habit."""


_Exit.__name__ = "os._exit"  # as a message names it


# The process in which this thread, or this coroutine, runs user code; a fork of it may exit as it likes. A context variable, because
# the coroutines of one thread take turns.
CALLED: ContextVar[int] = ContextVar("CALLED", default=0)


@contextmanager
def containing(*passing: type[BaseException]) -> Iterator[None]:
    """A block of user code that ends neither the process nor the run; it may await.

    SystemExit, KeyboardInterrupt, any other BaseException that the block raises, and os._exit in its thread, become ProcessEndAsked.
    An interruption from outside passes: a signal that rlkit handles, and Ctrl-C where Python's own handler is in place. An exit from C,
    or a crash, cannot be stopped here; what may do that belongs into a child process. Exceptions of `passing` pass too.
    """
    outer = CALLED.get()
    CALLED.set(os.getpid())
    os._exit = _asked  # type: ignore[assignment]  # it stays: outside of user code it is the system's own
    try:
        yield
    except BaseException as error:
        if isinstance(error, (Exception, Interrupted, *passing)) or (isinstance(error, KeyboardInterrupt) and _may_be_typed()):
            raise
        raise ProcessEndAsked(raised_at(error, back=2 if isinstance(error, _Exit) else 1)) from error
    finally:
        CALLED.set(outer)


def contained(call: Callable[[], T]) -> T:
    """A call's result, or the exception that it raises. It ends neither the process nor the run (`containing`)."""
    with containing():
        return call()


def _asked(status: int) -> None:
    """os._exit while user code runs: where that code runs, an exception; anywhere else, and in a fork, the real one."""
    if CALLED.get() == os.getpid():
        raise _Exit(status)
    end_process(status)


def _may_be_typed() -> bool:
    """Whether a KeyboardInterrupt in this thread may come from Ctrl-C: only in the main thread, and only from Python's own handler."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Work(Generic[T]):
    """A call in a thread of its own, which does not keep the process alive."""

    def __init__(self, call: Callable[[], T]):
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # so that no one who waits for it can cancel it
        self.lock, self.given_up, self.ends = Lock(), False, list[Callable[[], None]]()
        self.thread = Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        WORK.set(self)
        try:
            result = contained(call)
        except BaseException as error:  # raised again by the one who waits
            stop = isinstance(error, StopIteration)  # no future of asyncio takes it, and the one who waits would wait for ever
            self.future.set_exception(RuntimeError(f"StopIteration {error}") if stop else error)
        else:
            self.future.set_result(result)

    def give_up(self, what: str = "") -> None:
        """No one waits any longer. Ends the call as it has said (`ended_by`); else it goes on, and `what` is named once."""
        with self.lock:  # so that nothing is ended that is over
            if self.future.done() or self.given_up:
                return
            self.given_up = True
            for end in self.ends:
                with suppress(Exception):
                    end()
        if what and not self.ends:
            warn_once(
                f"{what} was given up and goes on in a thread beside the training, since a thread cannot be killed; what it gives is "
                "dropped. Make it async, or have it wait inside `with rlkit.system.deadline.ended_by(end)`, and it ends in time"
            )


WORK: ContextVar[_Work[Any] | None] = ContextVar("WORK", default=None)  # whose thread this is


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """Prints a warning to standard error, the same one only once."""
    print(visible(f"warning: {text}"), file=sys.stderr, flush=True)


@contextmanager
def ended_by(end: Callable[[], None]) -> Iterator[None]:
    """Inside a tool or a reward in a thread: where no one waits for it any longer, what the block waits for is ended by `end()`.

    That is called from another thread, and may kill a child process; the block is not left meanwhile.
    """
    if (work := WORK.get()) is None:
        yield
        return
    with work.lock:
        work.ends.append(end)
        late = work.given_up
    if late:
        end()
    try:
        yield
    finally:
        with work.lock:
            work.ends.remove(end)


def in_thread(call: Callable[[], T], seconds: float | None) -> T:
    """A call's result, or what it raises, from a thread that does not keep the process alive.

    A thread cannot be killed: a call that is given up and has not said how it is ended (`ended_by`) goes on in the background, and one
    that never lets go of the interpreter (a single huge power, a C function that holds the lock) is not even noticed in time. What may
    truly hang belongs into a child process, as the python tool and math_verify do it.

    Args:
      seconds: that are waited; None waits for ever.
    Raises: DeadlinePassed after that time, and whatever the call raises; ProcessEndAsked where it tries to end the process.
    """
    work = _Work(call)
    try:
        work.thread.join(seconds)
        if not work.future.done():
            raise DeadlinePassed(f"nothing within {seconds:g} s")
        return work.future.result()
    finally:
        work.give_up()


PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def in_worker(call: Callable[[], T], seconds: float | None, what: str) -> T:
    """`in_thread` for a coroutine: the event loop goes on meanwhile, with at most MOST_THREADS calls at the same time.

    A call whose coroutine is cancelled is given up too. `what` names the call, for the warning where it cannot be ended.
    """
    async with PLACES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_THREADS)):
        work = _Work(call)
        try:
            async with within(seconds):
                return await asyncio.wrap_future(work.future)
        finally:
            work.give_up(what)


class Countdown:
    """Seconds that blocks may await, all together; None: no limit. `spent` is their time on the clock.

    The event loop counts them in small ticks. While it is busy with something else, such as decoding, nothing that it awaits can go
    on, so such a stretch counts as one tick, however long it is.
    """

    def __init__(self, seconds: float | None):
        self.left, self.spent = math.inf if seconds is None else seconds, 0.0
        self.tick = min(0.25, self.left / 8)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A block whose awaiting is cancelled when the time is up. Raises: DeadlinePassed then."""
        loop = asyncio.get_running_loop()
        entered = begun = loop.time()
        if self.left == math.inf:
            try:
                yield
            finally:
                self.spent += loop.time() - entered
            return
        limit = asyncio.timeout(None)
        handle: asyncio.TimerHandle | None = None

        def wait() -> asyncio.TimerHandle:
            return loop.call_later(max(0.0, min(self.left, self.tick)), count)

        def count() -> None:
            nonlocal begun, handle
            now = loop.time()
            self.left, begun = self.left - min(now - begun, self.tick), now
            if self.left > 0:
                handle = wait()
            else:
                limit.reschedule(now)

        try:
            async with limit:
                handle = wait()
                yield
        except TimeoutError as error:
            if limit.expired():
                raise DeadlinePassed("no time is left") from error
            raise
        finally:
            self.spent += loop.time() - entered
            self.left -= min(loop.time() - begun, self.tick)
            if handle is not None:
                handle.cancel()


def within(seconds: float | None) -> AbstractAsyncContextManager[None]:
    """A block whose awaiting is cancelled after these seconds (`Countdown`). None: never. Raises: DeadlinePassed then."""
    return Countdown(seconds).running()


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
    faulthandler.dump_traceback_later(60 * minutes + GRACE, exit=True)  # even if nothing lets go of the interpreter
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _end(what: Callable[[], str]) -> None:
    os.write(2, f"\nrlkit: {what()}. Where each thread stands:\n".encode())
    faulthandler.dump_traceback()
    end_process(1)
