"""Lines of a command, wherever its output goes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os
from rlkit.system.output import guard_output
guard_output()
print("before: test accuracy 0.000")
os._exit(0)
"""


def test_a_pipe_gets_a_line_when_it_is_written():
    """The accuracy before training came a step later, with the next line."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "before: test accuracy 0.000\n"
