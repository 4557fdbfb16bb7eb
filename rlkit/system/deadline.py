"""Limits of plain Python that rlkit calls for the user: its wall-clock time, and that it does not
end the process."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from threading import Lock, Thread
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from rlkit.errors import Hung, Interrupted, raised_at, visible
from rlkit.system import waiting
from rlkit.system.loops import leave_behind, was_left

T = TypeVar("T")
end_process = os._exit  # the system's own; `containing` replaces os._exit
MOST_THREADS = 256  # that work for one event loop at the same time; further calls wait for a place


class DeadlinePassed(TimeoutError):
    """The call gave nothing in time. It is no TimeoutError that the call itself raised."""


class ProcessEndAsked(RuntimeError):
    """Code that rlkit called tried to end the process. The message says how and where: "os._exit(3)
    at tools.py:12"."""


class _Exit(BaseException):
    """What os._exit raises while user code runs: nothing that a tool catches by habit."""


_Exit.__name__ = "os._exit"  # as a message names it


# The process in which this thread, or this coroutine, runs user code; a fork of it may exit as it
# likes. A context variable, because the coroutines of one thread take turns.
CALLED: ContextVar[int] = ContextVar("CALLED", default=0)


@contextmanager
def containing(*passing: type[BaseException]) -> Iterator[None]:
    """A block of user code that ends neither the process nor the run; it may await.

    SystemExit, KeyboardInterrupt, any other BaseException that the block raises, and os._exit in
    its thread, become ProcessEndAsked. An interruption from outside passes: a signal that rlkit
    handles, and Ctrl-C where Python's own handler is in place. An exit from C, or a crash, cannot
    be stopped here; what may do that belongs into a child process. Exceptions of `passing` pass
    too.
    """
    outer = CALLED.get()
    CALLED.set(os.getpid())
    os._exit = _asked  # type: ignore[assignment]  # it stays: outside of user code it is the system's own
    try:
        yield
    except BaseException as error:
        if isinstance(error, (Exception, Interrupted, *passing)) or (
            isinstance(error, KeyboardInterrupt) and _may_be_typed()
        ):
            raise
        raise ProcessEndAsked(
            raised_at(error, back=2 if isinstance(error, _Exit) else 1)
        ) from error
    finally:
        CALLED.set(outer)


def contained(call: Callable[[], T]) -> T:
    """A call's result, or the exception that it raises. It ends neither the process nor the run
    (`containing`)."""
    with containing():
        return call()


def _asked(status: int) -> None:
    """os._exit while user code runs: where that code runs, an exception; anywhere else, and in a
    fork, the real one."""
    if CALLED.get() == os.getpid():
        raise _Exit(status)
    end_process(status)


def _may_be_typed() -> bool:
    """Whether a KeyboardInterrupt in this thread may come from Ctrl-C: only in the main thread, and
    only from Python's own handler."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Work(Generic[T]):
    """A call in a thread of its own, which does not keep the process alive."""

    def __init__(self, call: Callable[[], T]):
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # so that no one who waits for it can cancel it
        self.lock = Lock()
        self.given_up = False
        self.ends = list[Callable[[], None]]()
        self.waits = waiting.CURRENT.get()  # waits in the thread are inside of this one
        self.thread = Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        WORK.set(self)
        waiting.CURRENT.set(self.waits)
        try:
            result = contained(call)
        except BaseException as error:  # raised again by the one who waits
            # no future of asyncio takes it, and the one who waits would wait for ever
            stop = isinstance(error, StopIteration)
            self.future.set_exception(RuntimeError(f"StopIteration {error}") if stop else error)
        else:
            self.future.set_result(result)

    def give_up(self, what: str = "") -> None:
        """No one waits any longer. Ends the call as it has said (`ended_by`); else it goes on, and
        `what` is named once."""
        with self.lock:  # so that nothing is ended that is over
            if self.future.done() or self.given_up:
                return
            self.given_up = True
            for end in self.ends:
                with suppress(Exception):
                    end()
        waiting.forget(thread=self.thread.ident)
        if what and not self.ends:
            warn_once(
                f"{what} was given up and goes on in a thread beside the training, since a thread"
                " cannot be killed; what it gives is dropped. Make it async, or have it wait"
                " inside `with rlkit.system.deadline.ended_by(end)`, and it ends in time"
            )


WORK: ContextVar[_Work[Any] | None] = ContextVar("WORK", default=None)  # whose thread this is


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """Prints a warning to standard error, the same one only once."""
    print(visible(f"warning: {text}"), file=sys.stderr, flush=True)


@contextmanager
def ended_by(end: Callable[[], None]) -> Iterator[None]:
    """Inside a tool or a reward in a thread: where no one waits for it any longer, what the block
    waits for is ended by `end()`.

    That is called from another thread, and may kill a child process; the block is not left
    meanwhile.
    """
    work = WORK.get()
    if work is None:
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

    A thread cannot be killed: a call that is given up and has not said how it is ended (`ended_by`)
    goes on in the background, and one that never lets go of the interpreter (a single huge power, a
    C function that holds the lock) is not even noticed in time. What may truly hang belongs into a
    child process, as the python tool and math_verify do it.

    Args:
      seconds: that are waited; None waits for ever.
    Raises: DeadlinePassed after that time, and whatever the call raises; ProcessEndAsked where it
      tries to end the process.
    """
    work = _Work(call)
    try:
        work.thread.join(seconds)
        if not work.future.done():
            waiting.look_safely(monotonic())
            raise DeadlinePassed(f"nothing within {seconds:g} s")
        return work.future.result()
    finally:
        work.give_up()


PLACES: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def in_worker(call: Callable[[], T], seconds: float | None, what: str) -> T:
    """`in_thread` for a coroutine: the event loop goes on meanwhile, with at most MOST_THREADS
    calls at the same time.

    A call whose coroutine is cancelled is given up too. `what` names the call, for the warning
    where it cannot be ended.
    """
    async with PLACES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_THREADS)):
        work = _Work(call)
        try:
            async with within(seconds):
                return await asyncio.wrap_future(work.future)
        finally:
            work.give_up(what)


class Countdown:
    """Seconds that blocks may await, all together; None: no limit. `spent` is their time on the
    clock.

    The event loop counts them in small ticks. While it is busy with something else, such as
    decoding, nothing that it awaits can go on, so such a stretch counts as one tick, however long
    it is.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self.left = math.inf if seconds is None else seconds
        self.spent = 0.0
        self.tick = min(0.25, self.left / 8)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """A block whose awaiting is cancelled when the time is up; GRACE later its task is left
        behind (`rlkit.system.loops`).

        Raises: DeadlinePassed then; Hung in a task that comes back after it was left behind.
        """
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
        task = asyncio.current_task()

        def leave() -> None:
            assert task is not None
            words = (
                f"{waiting.waits_of(task)} did not end within {self.seconds:g} s, nor"
                f" {waiting.GRACE:g} s after it was cancelled"
            )
            leave_behind(task, Hung(words))

        def wait() -> asyncio.TimerHandle:
            return loop.call_later(max(0.0, min(self.left, self.tick)), count)

        def count() -> None:
            nonlocal begun, handle
            now = loop.time()
            self.left -= min(now - begun, self.tick)
            begun = now
            if self.left > 0:
                handle = wait()
            else:
                waiting.look_safely(monotonic())
                limit.reschedule(now)
                handle = loop.call_later(waiting.GRACE, leave)

        try:
            async with limit:
                handle = wait()
                yield
            if was_left():
                raise Hung("the episode is over")
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
    """A block whose awaiting is cancelled after these seconds (`Countdown`). None: never. Raises:
    DeadlinePassed then."""
    return Countdown(seconds).running()


def is_of_rlkit(function: Any) -> bool:
    """Whether a function, or the class of an object, belongs to rlkit."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", "")).startswith("rlkit.")


async def call_user(
    what: str,
    function: Callable[..., Any],
    *arguments: Any,
    named: Any = None,
    count: int = 1,
    closes: bool = False,
    **keywords: Any,
) -> Any:
    """What a function of the user's gives, plain or async. The watcher names it while it is waited
    for (`rlkit.system.waiting`).

    rlkit's own functions are only called: they name and limit what they call themselves.

    Args:
      what: kind and role, such as "the environment's answer". named: stands for the function in
        messages. count: episodes that wait.
      closes: an async function is cancelled after CLOSE_LIMIT seconds, else after CALL_LIMIT. A
        plain one blocks its event loop, and cannot be cancelled.
    Raises: Hung at that limit; what the function raises.
    """
    shown = function if named is None else named
    if is_of_rlkit(shown):
        given = function(*arguments, **keywords)
        return await given if inspect.isawaitable(given) else given
    with waiting.waiting(what, shown, count=count):
        given = function(*arguments, **keywords)
        if not inspect.isawaitable(given):
            return given
        seconds = waiting.CLOSE_LIMIT if closes else waiting.CALL_LIMIT
        limit = Countdown(seconds)
        try:
            async with limit.running():
                return await given
        except DeadlinePassed as error:
            if limit.left > 0:
                raise  # another limit, of a block inside
            raise Hung(
                f"{what} {waiting.name_of(shown)} did not end within {seconds:g} s"
            ) from error
