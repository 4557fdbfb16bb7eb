"""Limits for the user's plain Python: limit its wall-clock time, and keep it from ending the
process."""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock, Thread
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from rlkit.errors import Hung, Interrupted, describe_raise, warn
from rlkit.system import waiting
from rlkit.system.leaving import raise_exits
from rlkit.system.loops import is_left, leave_behind
from rlkit.types import plain

T = TypeVar("T")
MOST_THREADS = 256  # calls of one event loop at the same time; further calls wait


class DeadlinePassed(TimeoutError):
    """A call gave no result in time. A TimeoutError raised by the call itself is passed on as it
    is."""


class ProcessEndAsked(RuntimeError):
    """User code tried to end the process. The message says how and where: "os._exit(3) at
    tools.py:12"."""


@contextmanager
def contain_block(*passing: type[BaseException]) -> Iterator[None]:
    """Keep a block of user code from ending the process or the run; it may await.

    SystemExit, KeyboardInterrupt, any other BaseException from the block, and os._exit in its
    thread become ProcessEndAsked. Interruptions from outside are passed on: signals handled by
    rlkit, and Ctrl-C with Python's own handler in place. So are exceptions of the types in
    `passing`. An exit from C, or a crash, cannot be stopped here; run such code in a child process.
    """
    try:
        with raise_exits():
            yield
    except BaseException as error:
        typed = (  # Ctrl-C: in the main thread, and by Python's own handler
            isinstance(error, KeyboardInterrupt)
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if typed or isinstance(error, (Exception, Interrupted, *passing)):
            raise
        raise ProcessEndAsked(describe_raise(error)) from error


def contain_call(call: Callable[[], T]) -> T:
    """Return a call's result or raise its exception. The call cannot end the process or the run
    (`contain_block`)."""
    with contain_block():
        return call()


class _Work(Generic[T]):
    """A call in a thread of its own. The thread does not keep the process alive."""

    def __init__(self, call: Callable[[], T]):
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # so no waiter can cancel it
        self.lock = Lock()
        self.given_up = False
        self.ends = list[Callable[[], None]]()
        self.waits = waiting.CURRENT.get()  # waits begun in the thread count as inside this wait
        self.thread = Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        WORK.set(self)
        waiting.CURRENT.set(self.waits)
        try:
            result = contain_call(call)
        except BaseException as error:  # raised again in the waiting thread
            # an asyncio future refuses StopIteration, and its waiter would wait for ever
            stop = isinstance(error, StopIteration)
            self.future.set_exception(RuntimeError(f"StopIteration {error}") if stop else error)
        else:
            self.future.set_result(result)

    def give_up(self, what: str = "") -> None:
        """Stop waiting for the call. If the call has given a function to end it (`end_when_left`),
        this function is called. Otherwise the call goes on, and one warning names `what`."""
        with self.lock:  # so `end` is never called after the call is over
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
                " cannot be killed; its result is dropped. Make it async, or have it wait"
                " inside `with rlkit.system.deadline.end_when_left(end)`, and it ends in time"
            )


WORK: ContextVar[_Work[Any] | None] = ContextVar("WORK", default=None)  # the work of this thread


warn_once = lru_cache(maxsize=64)(warn)


@contextmanager
def end_when_left(end: Callable[[], None]) -> Iterator[None]:
    """Say how to end a tool or a reward running in a thread. When nobody waits for the thread any
    longer, `end()` is called. It must end the call for which the block waits.

    `end` is called from another thread, and may kill a child process. The block does not end
    before `end` has returned.
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


def run_in_thread(call: Callable[[], T], seconds: float | None) -> T:
    """Run a call in a thread of its own, and return its result or raise its exception. The thread
    does not keep the process alive.

    A thread cannot be killed. A call given up without `end_when_left` goes on in the background. If
    a call never releases the interpreter's lock (a single huge power, a C function holding the
    lock), even the end of the time is not noticed. Code that may truly hang belongs in a child
    process, as in the python tool and math_verify.

    Args:
      seconds: the time to wait; None waits for ever.
    Raises: DeadlinePassed after the time is up, and any exception of the call; ProcessEndAsked if
      it tries to end the process.
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


async def run_in_worker(call: Callable[[], T], seconds: float | None, what: str) -> T:
    """Run a call in a thread as `run_in_thread` does, for a coroutine. The event loop goes on
    meanwhile. At most MOST_THREADS calls run at the same time.

    A call is also given up if its coroutine is cancelled. `what` names the call in the warning
    about a call that could not be ended.
    """
    async with PLACES.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_THREADS)):
        work = _Work(call)
        try:
            async with cancel_after(seconds):
                return await asyncio.wrap_future(work.future)
        finally:
            work.give_up(what)


class Countdown:
    """A limit on the seconds of awaiting, shared by several blocks. None means no limit. `spent` is
    the total wall-clock time of the blocks.

    The event loop counts the seconds in small ticks. While the loop is busy with other work, for
    example decoding, nothing that it awaits can go on. So a busy stretch of any length counts as
    only one tick.
    """

    def __init__(self, seconds: float | None):
        self.seconds = seconds
        self.left = math.inf if seconds is None else seconds
        self.spent = 0.0
        self.tick = min(0.25, self.left / 8)
        self.paused = 0  # number of blocks in which no seconds count

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Mark a block, perhaps of another task, during which no seconds count."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Cancel the block's current await when the time is up. If the task has not ended GRACE
        seconds later, it is left behind (`rlkit.system.loops`).

        Raises: DeadlinePassed when the time is up; Hung in a task returning after it was left
        behind.
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
                f"{waiting.describe_wait(task)} did not end within {self.seconds:g} s, nor"
                f" {waiting.GRACE:g} s after it was cancelled"
            )
            leave_behind(task, Hung(words))

        def wait() -> asyncio.TimerHandle:
            return loop.call_later(max(0.0, min(self.left, self.tick)), count)

        def charge() -> None:
            nonlocal begun
            now = loop.time()
            if not self.paused:
                self.left -= min(now - begun, self.tick)
            begun = now

        def count() -> None:
            nonlocal handle
            charge()
            if self.left > 0:
                handle = wait()
            else:
                waiting.look_safely(monotonic())
                limit.reschedule(begun)
                handle = loop.call_later(waiting.GRACE, leave)

        try:
            async with limit:
                handle = wait()
                yield
            if is_left():
                raise Hung("the episode is over")
        except TimeoutError as error:
            if limit.expired():
                raise DeadlinePassed("no time is left") from error
            raise
        finally:
            self.spent += loop.time() - entered
            charge()
            if handle is not None:
                handle.cancel()


def cancel_after(seconds: float | None) -> AbstractAsyncContextManager[None]:
    """Cancel a block's current await after `seconds` (`Countdown`); None means never. Raises:
    DeadlinePassed."""
    return Countdown(seconds).running()


def is_of_rlkit(function: Any) -> bool:
    """Return whether a function, or the class of an object, belongs to rlkit."""
    return str(getattr(plain(function), "__module__", "")).startswith("rlkit.")


async def call_user(
    what: str,
    function: Callable[..., Any],
    *arguments: Any,
    named: Any = None,
    count: int = 1,
    closes: bool = False,
    **keywords: Any,
) -> Any:
    """Call a user's function, plain or async, and return its result. While rlkit waits for the
    function, the watcher names it (`rlkit.system.waiting`).

    A function of rlkit is called without a name or a limit, because it names and limits its own
    calls.

    Args:
      what: kind and role of the call, for example "the environment's answer".
      named: the object named in messages instead of the function.
      count: number of episodes waiting for the call.
      closes: if True, an async function is cancelled after CLOSE_LIMIT seconds, otherwise after
        CALL_LIMIT. A plain function blocks its event loop, and cannot be cancelled.
    Raises: Hung at the limit; any exception of the function.
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
                f"{what} {waiting.find_name(shown)} did not end within {seconds:g} s"
            ) from error
