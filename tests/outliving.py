"""What rlkit starts ends when rlkit is gone, by SIGKILL too: shared by the tests of each kind of
process. Such a process reads from a pipe, and is gone once no one does."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

START = (
    "import sys; from pathlib import Path; pipe = sys.argv[1]; words = ['train', '--config',"
    " pipe]\n"
)
WAIT = "process.wait()\n"


def check_the_end(code: str, folder: Path) -> None:
    """No process outlives the one that started it.

    Args:
      code: starts a process that reads from the file `pipe`; `words` are those of an `rlkit` that
        does. WAIT waits for what is named `process`.
    """
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    parent = subprocess.Popen([sys.executable, "-c", START + code, str(pipe)])
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(os.open, pipe, os.O_WRONLY)  # waits until the process reads
        try:
            writer = opened.result(120)
        finally:
            parent.kill()
            parent.wait()
            os.close(os.open(pipe, os.O_RDWR))
    poller = select.poll()
    poller.register(writer, 0)  # an error: no one reads any more
    assert poller.poll(20_000), "the process goes on"
    os.close(writer)
