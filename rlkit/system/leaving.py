"""End a process after its work is done, even if threads or exit handlers are left. Before then,
keep a user's os._exit from ending it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from rlkit.errors import describe_definition, tell_user

SHOWN = 3  # most threads named in the line
# seconds for non-daemon threads and `atexit` handlers to end
GRACE = 10.0
end_process = os._exit  # the system's own; `raise_exits` replaces os._exit
# The process in which this thread or coroutine may not end the process; its forks may exit as they
# like. A context variable, because the coroutines of one thread take turns.
GUARDED: ContextVar[int] = ContextVar("GUARDED", default=0)


class ExitAsked(SystemExit):
    """Raised by os._exit in code that may not end the process."""

    inner = 2  # `_raise_exit` is its innermost frame


ExitAsked.__name__ = "os._exit"  # as a message names it


@contextmanager
def raise_exits() -> Iterator[None]:
    """Turn os._exit in a block of this thread into an exception, like the one of sys.exit. The
    block may await."""
    outer = GUARDED.get()
    GUARDED.set(os.getpid())
    os._exit = _raise_exit  # type: ignore[assignment]  # it stays: outside of a block it is the system's own
    try:
        yield
    finally:
        GUARDED.set(outer)


def _raise_exit(status: int) -> None:
    if GUARDED.get() == os.getpid():
        raise ExitAsked(status)
    end_process(status)


def leave_process(status: int) -> None:
    """End the process with this status after flushing its output. This function does not return.

    Non-daemon threads and `atexit` handlers together have GRACE seconds to end, in Python's usual
    order. After this time a line names the remaining ones, and the process ends all the same. The
    interpreter does not clean up, so no object's finalizer can delay the end.
    """
    ended = threading.Event()

    def give_up() -> None:
        if not ended.wait(GRACE):
            named = name_threads(left_threads()) or "an exit handler of a library or of your code"
            tell_user(
                f"rlkit: {named} did not end within {GRACE:g} s; the process ends all the same"
            )
            _flush()
            end_process(status)

    threading.Thread(target=give_up, name="rlkit end", daemon=True).start()
    _flush()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, and ends pools of them
    atexit._run_exitfuncs()
    ended.set()
    _flush()
    end_process(status)


def left_threads() -> list[threading.Thread]:
    """List the threads that keep a process alive, except the main thread."""
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]


def name_threads(threads: list[threading.Thread]) -> str:
    """Name the first few threads, for example as "the thread 'upload' of my_reward.send
    (/home/me/my_reward.py:7)". Equal names are listed once, with their number."""
    targets = [getattr(thread, "_target", None) for thread in threads]
    names = Counter(
        (
            f"the thread {thread.name!r}"
            if target is None
            else f"the thread {thread.name!r} of {describe_definition(target)}"
        )
        for thread, target in zip(threads, targets, strict=True)
    )
    shown = [
        name if count == 1 else f"{name}, {count} times" for name, count in names.most_common(SHOWN)
    ]
    more = [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return " and ".join([*shown, *more])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
