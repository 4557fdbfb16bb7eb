"""Let a process end when its parent is gone, even if SIGKILL ended the parent.

rlkit's own children read RLKIT_PARENT when they start (`end_with_parent`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

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
