"""A confined interpreter. Its names are kept from one program to the next, until it is closed or
killed."""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import monotonic
from typing import Literal

from rlkit.sandbox.level import require
from rlkit.sandbox.process import (
    START_LIMIT,
    Ending,
    Job,
    Outcome,
    Sandbox,
    SandboxError,
    Status,
    _job,
    make_folder,
    read_output,
    require_start,
    start_child,
)
from rlkit.sandbox.values import split_records
from rlkit.system.deadline import end_when_left

# seconds of processor time for a whole session; the parent's clock limits each program
LIFETIME = 1_000_000.0
# A child is killed when the thread that started it ends, and each tool call has its own thread. So
# this lasting thread starts all children.
STARTER = ThreadPoolExecutor(1, "interpreters")


class Interpreter:
    """A child process for many programs, under the limits of `Sandbox`. The limits of time and
    output apply to each program.

    The first program starts the child. If a program runs out of time, writes too much or ends the
    interpreter, all names are lost, and the next program starts a new child. Programs run one at a
    time.
    """

    def __init__(self, sandbox: Sandbox | None = None):
        self.sandbox = sandbox or Sandbox()
        self.lock = threading.Lock()
        self.held = ExitStack()
        self.child: subprocess.Popen[bytes] | None = None

    def run(self, code: str) -> Outcome:
        """Run a program with the names defined by earlier programs.

        Raises: ConfigError, see `require`; SandboxError if the limits cannot be set. Nothing a
        program does raises an error.
        """
        with self.lock:
            try:
                if self.child is None:
                    self._start()
                outcome = self._outcome(code)
            except (OSError, subprocess.SubprocessError) as error:
                self._end()
                raise SandboxError(
                    f"no child could be started or read, and the program did not run: {error}"
                ) from error
            except BaseException:
                self._end()
                raise
            if outcome.status not in ("ok", "error"):
                self._end()
            return outcome

    def close(self) -> None:
        """Kill the interpreter, even if a program is running, and remove its folder."""
        if self.child is not None:
            self.kill()
        with self.lock:
            self._end()

    def _end(self) -> None:
        self.child = None
        self.held.close()

    def _start(self) -> None:
        features = require(self.sandbox).features
        path = self.held.enter_context(make_folder())
        self.child, self.kill = STARTER.submit(
            self.held.enter_context, start_child(path, subprocess.PIPE, "session")
        ).result()
        job = _job(Job("", interactive=True), self.sandbox, features) | {"cpu_s": LIFETIME}
        self._send(marshal.dumps(job), START_LIMIT)
        said, _ = self._read_answer(START_LIMIT, "RX")
        require_start(said)

    def _send(self, data: bytes, seconds: float) -> bool:
        """Send bytes, and return whether the interpreter has read all of them in time. A thread of
        an earlier program may keep it from reading."""
        assert self.child is not None and self.child.stdin is not None
        pipe = self.child.stdin.fileno()
        os.set_blocking(pipe, False)
        left = memoryview(len(data).to_bytes(8, "big") + data)
        end = monotonic() + seconds
        poller = select.poll()
        poller.register(pipe, select.POLLOUT)
        while left:
            wait = end - monotonic()
            if wait <= 0 or not poller.poll(wait * 1000):
                return False
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(pipe, left) :]
        return True

    def _outcome(self, code: str) -> Outcome:
        start = monotonic()
        with end_when_left(self.kill):
            try:
                if not self._send(code.encode("utf-8", "replace"), self.sandbox.time_limit):
                    return Outcome("timeout", seconds=monotonic() - start)
            except BrokenPipeError:  # a thread of an earlier program has ended the interpreter
                return Outcome("died")
            start = monotonic()
            said, how = self._read_answer(self.sandbox.time_limit, "DE")
        first = {tag: payload.decode("utf-8", "replace") for tag, payload in reversed(said)}
        status: Status
        if how == "said":
            status = "ok" if "D" in first else "error"
        else:
            status = "died" if how == "end" else how
        return Outcome(status, (), first.get("P", ""), first.get("E", ""), monotonic() - start)

    def _read_answer(
        self, seconds: float, last: str
    ) -> tuple[list[tuple[str, bytes]], Ending | Literal["said"]]:
        assert self.child is not None and self.child.stdout is not None
        data = bytearray()
        how = read_output(self.child.stdout.fileno(), data, seconds, self.sandbox, last)
        return split_records(bytes(data)), how
