"""Let a process end when its parent is gone, even if SIGKILL ended the parent.

rlkit's own children read RLKIT_PARENT when they start (`end_with_parent`). Any other program is run
by this file as a script:

    python -I -S -B parent.py PID COMMAND …

The script runs the command and ends with the command's exit status. Once its parent, process PID,
is gone, the script kills its own process group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

PARENT = "RLKIT_PARENT"  # environment variable of a child: the process it must not outlive
DEATH_SIGNAL = 1  # of prctl, linux/prctl.h
LOOK = 0.2  # seconds between two checks for the parent, if the kernel does not report its end


def make_child_environment() -> dict[str, str]:
    """Return environment variables that make one of rlkit's own children end with this process."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Make this process end with its parent, if the parent started it with
    `make_child_environment`. Children of this process are not affected."""
    parent = os.environ.pop(PARENT, "")
    if parent.isdecimal():
        end_with(int(parent))


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends.

    On Linux the kernel kills this process when the thread that started it ends. On other systems a
    thread of this process checks for the parent.

    Args:
      parent: the parent's process id, as the parent knows it. If the parent is gone already, this
        process ends at once.
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


def guard_command(command: Sequence[str]) -> list[str]:
    """Wrap a command so that it is killed when this process is gone. Start the wrapped command in a
    session of its own."""
    return [sys.executable, "-I", "-S", "-B", __file__, str(os.getpid()), *command]


def _main() -> None:
    """See the head of this file."""
    parent = int(sys.argv[1])
    command = sys.argv[2:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the command may take its time to end
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
