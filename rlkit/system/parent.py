"""Processes that end when the process that started them is gone, however that ended, SIGKILL
included.

rlkit's own children read RLKIT_PARENT when they start (`end_with_parent`). Any other program is run
by this file as a script:

    python -I -S -B parent.py PID COMMAND …

The script runs the command, ends with its exit status, and kills its process group once process
PID, which started it, is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

PARENT = "RLKIT_PARENT"  # in the environment of a child: the process that it must not outlive
DEATH_SIGNAL = 1  # of prctl, linux/prctl.h
LOOK = 0.2  # seconds between two looks at whether the parent lives, where the kernel does not tell


def tied() -> dict[str, str]:
    """Environment of a child of rlkit's own that has to end with this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Tie this process to the one that started it, if that one asked for it by `tied`. Its own
    children are not tied by that."""
    parent = os.environ.pop(PARENT, "")
    if parent.isdecimal():
        end_with(int(parent))


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends.

    On Linux the kernel does it, when the parent's thread that started this process ends; elsewhere
    a thread of this process looks.

    Args:
      parent: the parent's process id, as the parent knows it. If that process is gone already, this
        one ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except PermissionError:
        pass


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGKILL)


def guarded(command: Sequence[str]) -> list[str]:
    """The command that runs another one, and kills it when this process is gone. It needs a session
    of its own."""
    return [sys.executable, "-I", "-S", "-B", __file__, str(os.getpid()), *command]


def _main() -> None:
    """See the head of this file."""
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the command, which ends in its time
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.execvp(command[0], command)
    while os.getppid() == parent:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            os._exit(128 - code if code < 0 else code)
        time.sleep(LOOK)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _main()
