"""Keep track of waits: waits for calls of the user's code, and for requests to servers.

    with waiting("the tool", tool):      # any thread, any coroutine; two operations on a dict
        …

Each process has one watcher thread. After NAMED_AFTER seconds of waiting for a call, the watcher
prints a line about the call. If nothing has moved for `trainer.max_step_time`, it ends the process
(`limit_waiting`). The thread exists only while there is a wait or a limit.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import count
from time import monotonic
from typing import Any

from rlkit.errors import describe_definition, show_controls, tell_user
from rlkit.system.leaving import end_process
from rlkit.system.redaction import cover

NAMED_AFTER = 20.0  # seconds of waiting until a line names the function
GRACE = 10.0  # seconds from a call's cancellation until it is abandoned
LOOK = 1.0  # seconds between two checks of the watcher, while there is a wait
# most seconds of an async call without a limit option, for example an environment's answer
CALL_LIMIT = 1800.0
CLOSE_LIMIT = 30.0  # most seconds of an async close
THREAD = "rlkit watcher"
MAX_STEP_TIME = "trainer.max_step_time"
# Seconds after the limit at which the process ends even if a call holds the interpreter's lock and
# the watcher cannot run.
LATE = 5.0


class Wait:
    """A call in progress.

    what: kind and role, for example "the tool".
    function: the called function, or its name as a text.
    count: number of episodes waiting for the call.
    inner: number of waits inside this wait. If there are any, they are named instead of this wait.
    """

    __slots__ = ("count", "function", "inner", "since", "task", "thread", "what", "worked")

    def __init__(self, what: str, function: Any, count: int = 1):
        self.what = what
        self.function = function
        self.count = count
        task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
        # a closed loop may be gone, with its tasks
        self.task = None if task is None else weakref.ref(task)
        self.thread = threading.get_ident()
        self.inner = 0
        self._begin()

    def _begin(self) -> None:
        self.since = monotonic()
        self.worked = WORK.seconds(self.since)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Mark a block in which the awaited call itself waits for something else. After the block,
        the time of this wait starts again at 0."""
        self.inner += 1
        try:
            yield
        finally:
            self.inner -= 1
            self._begin()
            WATCHER.moved = self.since

    def age(self, now: float) -> float:
        """Return the seconds waited so far. For a coroutine, seconds during which a decoder blocks
        the event loop do not count."""
        return (
            now - self.since - (WORK.seconds(now) - self.worked if self.task is not None else 0.0)
        )

    def __str__(self) -> str:
        return f"{self.what} {find_name(self.function)}"


class Work:
    """The computation in this process, and waits of this process for computation elsewhere."""

    def __init__(self) -> None:
        # seconds during which a decoder blocked the event loop, up to its last finished block
        self.total = 0.0
        self.decoding: float | None = None  # start of the present decoder block; None: none
        self.begun: float | None = None  # start of the present decoding or learning
        self.outside = 0  # number of blocks waiting for a model, a rank or a process outside

    def seconds(self, now: float) -> float:
        """Return the seconds during which a decoder has blocked the event loop, up to now."""
        begun = self.decoding
        return self.total + (0.0 if begun is None else now - begun)


class Limit:
    """A time limit at which the process ends.

    minutes: length of the limit.
    key: the option with this limit, for the message.
    place: a function that says where the run is, for example "step 3 hangs in generate". It returns
    "" while the run need not move.
    """

    def __init__(self, minutes: float, key: str, place: Callable[[], str]):
        self.minutes = minutes
        self.key = key
        self.place = place
        self.since = monotonic()

    def left(self, now: float) -> float:
        """Return the seconds until the limit is reached if nothing moves."""
        return 60 * self.minutes - (now - max(self.since, WATCHER.moved))

    def is_reached(self, now: float) -> bool:
        """Return whether the limit is reached, so that the process must end."""
        if self.left(now) > 0:
            return False
        begun = WORK.begun
        if WORK.outside:
            return False
        if begun is not None:  # a user's engine is called while the model counts as computing
            return any(wait.since >= begun for wait in list(WAITS.values()))
        return bool(WAITS) or bool(self.place())


WAITS: dict[int, Wait] = {}
NUMBERS = count()
WORK = Work()
# the innermost wait of this thread or coroutine
CURRENT: ContextVar[Wait | None] = ContextVar("CURRENT", default=None)
LOCK = threading.Lock()
# held until a line is printed, so the next check knows about the line
LOOKING = threading.Lock()


class Watcher:
    """The state of the watcher thread."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.limits: list[Limit] = []
        self.moved = monotonic()  # last time a wait began or ended, or the model computed
        # function → seconds of waiting after which it is named again
        self.named: dict[str, float] = {}
        # receives each line too, for a process whose output nobody reads
        self.tell: Callable[[str], None] = lambda line: None


WATCHER = Watcher()


def find_name(function: Any) -> str:
    """Return the name of a function and the place of its definition. A text is returned as it is. A
    function made by rlkit may have another name in its attribute `shown`."""
    shown = function if isinstance(function, str) else getattr(function, "shown", None)
    return str(shown or describe_definition(function))


# ---------------------------------------------------------------------------------------- who waits


@contextmanager
def waiting(what: str | Wait, function: Any = None, *, count: int = 1) -> Iterator[None]:
    """Record this block as a wait for a call of `function`.

    Args:
      what: kind and role, for example "the tool"; or an existing Wait.
      function: the function, or a text as its name.
      count: number of episodes waiting.
    """
    outer = CURRENT.get()
    wait = Wait(what, function, count) if isinstance(what, str) else what
    number = next(NUMBERS)
    WAITS[number] = wait
    WATCHER.moved = monotonic()
    if outer is not None:
        outer.inner += 1
    CURRENT.set(wait)
    if WATCHER.thread is None:
        _start()
    try:
        yield
    finally:
        CURRENT.set(outer)
        if outer is not None:
            outer.inner -= 1
        WAITS.pop(number, None)
        WATCHER.moved = monotonic()


def note_movement() -> None:
    """Report progress: the time towards a limit starts again at 0."""
    WATCHER.moved = monotonic()


@contextmanager
def working() -> Iterator[None]:
    """Mark a block of computation by the model, of any length. Nested blocks count as one."""
    outer = WORK.begun
    if outer is None:
        WORK.begun = monotonic()
    try:
        yield
    finally:
        WORK.begun = outer
        WATCHER.moved = monotonic()


@contextmanager
def decoding() -> Iterator[None]:
    """Mark a block of `working` that blocks the event loop, so that no coroutine goes on
    meanwhile."""
    WORK.decoding = monotonic()
    try:
        with working():
            yield
    finally:
        WORK.total = WORK.seconds(monotonic())
        WORK.decoding = None


@contextmanager
def waiting_outside() -> Iterator[None]:
    """Mark a block of waiting for a model, a rank or a process of rlkit outside of this process.

    The other side has a limit of its own, so this process is not ended meanwhile.
    """
    WORK.outside += 1
    try:
        yield
    finally:
        WORK.outside -= 1
        WATCHER.moved = monotonic()


def describe_wait(task: asyncio.Task[Any] | None) -> str:
    """Name the innermost call a task waits for; "a call" if no call is known."""
    own = [
        wait
        for wait in list(WAITS.values())
        if wait.task is not None and wait.task() is task and not wait.inner
    ]
    return str(own[-1]) if own else "a call"


def forget(*, task: asyncio.Task[Any] | None = None, thread: int | None = None) -> None:
    """Forget the waits of an abandoned task or thread."""
    for number, wait in list(WAITS.items()):
        own = task is not None and wait.task is not None and wait.task() is task
        if own or (thread is not None and wait.thread == thread):
            WAITS.pop(number, None)


@contextmanager
def limit_waiting(minutes: float | None, key: str, place: Callable[[], str]) -> Iterator[None]:
    """Limit the time of a block. At the limit the process says which call hangs, prints the stack
    of each thread, and ends with status 1.

    Nothing milder can end plain user code that never returns. Only waiting counts as hanging: while
    the model computes, no limit is reached.

    Args:
      minutes: length of the limit; None is no limit.
      key, place: as for `Limit`.
    """
    if minutes is None:
        yield
        return
    limit = Limit(minutes, key, place)
    if not WATCHER.limits:
        WATCHER.named.clear()
    WATCHER.limits = [*WATCHER.limits, limit]
    try:
        _arm(monotonic())
        if WATCHER.thread is None:
            _start()
        yield
    finally:
        WATCHER.limits = [other for other in WATCHER.limits if other is not limit]
        _arm(monotonic())


# -------------------------------------------------------------------------------------- the watcher


def _start() -> None:
    with LOCK:
        if WATCHER.thread is None:
            WATCHER.thread = threading.Thread(target=_watch, name=THREAD, daemon=True)
            WATCHER.thread.start()


def _watch() -> None:
    """Check all waits and limits repeatedly, as long as there are any."""
    looked = monotonic()
    while True:
        time.sleep(min([LOOK, *(15 * limit.minutes for limit in WATCHER.limits)]))
        now = monotonic()
        _pass_over(now - looked - 10 * LOOK)
        looked = now
        look_safely(now)
        with LOCK:
            WATCHER.thread = None  # set first, so a wait beginning now starts a new thread
            if not WAITS and not WATCHER.limits:
                return
            WATCHER.thread = threading.current_thread()


def _pass_over(stopped: float) -> None:
    """Subtract the seconds during which the whole process was stopped, for example by SIGSTOP.
    Nothing hung meanwhile."""
    if stopped > 0:
        WATCHER.moved += stopped
        for wait in list(WAITS.values()):
            wait.since += stopped
        for limit in WATCHER.limits:
            limit.since += stopped


def look_safely(now: float) -> None:
    """Call `look`, and print its failure instead of raising it. A call that reaches its own limit
    calls this too, because on a busy machine the watcher thread may not have had its turn."""
    try:
        with LOOKING:
            look(now)
    except Exception as error:  # an unprintable name must not end the watcher
        tell_user(f"rlkit: the watcher failed: {type(error).__name__}: {error}")


def look(now: float) -> None:
    """Name the waits that take too long, and end the process if a limit is reached."""
    reached = [limit for limit in WATCHER.limits if limit.is_reached(now)]
    groups: dict[str, tuple[int, float]] = {}
    for wait in list(WAITS.values()):
        age = wait.age(now)
        if not wait.inner and (reached or age >= NAMED_AFTER):
            number, oldest = groups.get(str(wait), (0, 0.0))
            groups[str(wait)] = number + wait.count, max(oldest, age)
    lines = {name: _line(name, *group) for name, group in groups.items()}
    for name, (_, age) in groups.items():
        if not reached and age >= WATCHER.named.get(name, NAMED_AFTER):
            # a hanging call is named again whenever its time has doubled
            WATCHER.named[name] = 2 * age
            line = f"rlkit: {_rank()}{lines[name]}"
            tell_user(line)
            WATCHER.tell(line)
    if reached:
        end_at(max(reached, key=lambda limit: bool(limit.place())), list(lines.values()))
    _arm(now)


def _line(name: str, number: int, age: float) -> str:
    return f"waiting for {age:.0f} s for {name}, in {number} episode{'' if number == 1 else 's'}"


def _rank() -> str:
    """Return the start of a message, with this rank; empty for a single process."""
    return (
        f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
    )


def end_at(limit: Limit, lines: list[str]) -> None:
    """Say which calls hang, print the stack of each thread, and end the process with status 1."""
    place = limit.place() or "the run hangs"
    within = f"nothing within {limit.key}={limit.minutes:g} minutes"
    waited = f"; {'; '.join(lines)}" if lines else ""
    line = cover(show_controls(f"rlkit: {_rank()}{place}: {within}{waited}"))
    os.write(2, f"\n{line}. Where each thread stands:\n".encode(errors="backslashreplace"))
    with suppress(Exception):
        WATCHER.tell(line)
    faulthandler.dump_traceback(2)
    end_process(1)


def _arm(now: float) -> None:
    """Set a timer to end the process LATE seconds after its next limit. It fires even if a call
    holds the interpreter's lock and the watcher cannot run."""
    if WATCHER.limits:
        seconds = 60 * min(limit.minutes for limit in WATCHER.limits)
        faulthandler.dump_traceback_later(seconds + LATE, exit=True, file=2)
    else:
        faulthandler.cancel_dump_traceback_later()


def _after_fork() -> None:
    """Reset the state in a forked process, where no watcher runs and nothing waits."""
    global LOCK, LOOKING
    LOCK = threading.Lock()
    LOOKING = threading.Lock()
    WAITS.clear()
    WATCHER.thread = None
    WATCHER.limits = []
    WATCHER.named.clear()
    WATCHER.tell = lambda line: None
    WORK.begun = None
    WORK.decoding = None
    WORK.outside = 0


os.register_at_fork(after_in_child=_after_fork)
