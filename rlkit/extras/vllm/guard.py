"""Run a program that ends when this process is gone, even if SIGKILL ended this process.

The program is run by this file as a script:

    python -I -S -B guard.py PID COMMAND …

The script runs the command and ends with the command's exit status. Once its parent, process PID,
is gone, the script kills its own process group.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

LOOK = 0.2  # seconds between two checks for the parent


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
