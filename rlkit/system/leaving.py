"""End a process after its work is done, whatever threads and exit handlers are left."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from contextlib import suppress

from rlkit.errors import defined_at, visible

SHOWN = 3  # threads named in the line
# seconds for threads other than daemons, and for `atexit` handlers of libraries
GRACE = 10.0
end_process = os._exit  # the system's own: rlkit.system.deadline replaces it in os


def leave_process(status: int) -> None:
    """End the process with this status, after all has been written. Does not return.

    Non-daemon threads and `atexit` handlers have GRACE seconds together, in Python's usual order.
    Then a line names the rest, and the process ends all the same. The interpreter is not taken
    apart, so no finalizer of an object can hold it up.
    """
    ended = threading.Event()

    def give_up() -> None:
        if not ended.wait(GRACE):
            named = name_threads(left_threads()) or "an exit handler of a library or of your code"
            print(
                visible(
                    f"rlkit: {named} did not end within {GRACE:g} s; the process ends all the same"
                ),
                file=sys.stderr,
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
    """The threads keeping a process alive, besides the main one."""
    return [
        thread
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread()
    ]


def name_threads(threads: list[threading.Thread]) -> str:
    """Name the first few of them as "the thread 'upload' of my_reward.send
    (/home/me/my_reward.py:7)", threads of one function once."""
    targets = [getattr(thread, "_target", None) for thread in threads]
    names = Counter(
        (
            f"the thread {thread.name!r}"
            if target is None
            else f"the thread {thread.name!r} of {defined_at(target)}"
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
