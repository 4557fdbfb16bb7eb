"""Copies of the tests' process in place of new ones: they have imported torch and Lightning.

A new process of rlkit takes several seconds of the processor for its imports. A copy runs the same
command, takes signals and ends as a new process does. The fixture `forked` makes those that run a
command; what is here makes the processes that such a command starts itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlkit.commands.cli import main
from rlkit.runs.sweeps import runner
from rlkit.system.extras import list_extras
from rlkit.system.parent import make_child_environment

# A pool of threads does not survive a fork. A copy of a process that has one makes its own at once,
# or threads that load a model ask for it together and one of them finds none.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))

LIMIT = 400  # seconds in which what has to happen does, on the slowest machine


class Copy:
    """A copy of this process, with what is used of subprocess.Popen."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG) if self.returncode is None else (0, 0)
        self.returncode = os.waitstatus_to_exitcode(status) if pid else self.returncode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            handle = os.pidfd_open(self.pid)
            ready, _, _ = select.select([handle], [], [], timeout)
            os.close(handle)
            if not ready:
                raise subprocess.TimeoutExpired("rlkit", timeout or 0.0)
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Piped(Copy):
    """A copy that runs a command, whose words this process reads.

    Args:
      fork: the fixture `forked` with the command's words.
      before: called in the copy before the command.
    """

    def __init__(self, fork: Callable[..., int], before: Callable[[], None]):
        out, errors = os.pipe(), os.pipe()

        def begin() -> None:
            for number, (_, end) in enumerate((out, errors), start=1):
                os.dup2(end, number)
            for end in (*out, *errors):
                os.close(end)
            before()

        super().__init__(fork(before=begin))
        for _, end in (out, errors):
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(end) for end, _ in (out, errors))

    def communicate(self, timeout: float = LIMIT) -> tuple[str, str]:
        """What it says until its end."""
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(pipe.read) for pipe in (self.stdout, self.stderr)]
            if wait_for(readers, timeout).not_done:
                self.kill()
                raise subprocess.TimeoutExpired("rlkit", timeout)
        self.wait()
        said, errors = (reader.result() for reader in readers)
        return said, errors


def heed() -> None:
    """Take all signals as a new process of Python does, also those that a shell without job
    control, or nohup, has had ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def begin_copy() -> None:
    """What makes a copy like a new process: its signals and what it has imported."""
    heed()
    forget_modules_of_tests()


def import_all() -> None:
    """Imports what a run of shipped options does, and parses their files."""
    import lightning  # noqa: F401
    import peft  # noqa: F401
    import torch.utils.tensorboard
    import transformers  # noqa: F401

    import rlkit.training.callbacks.checkpoints
    import rlkit.training.callbacks.faults
    import rlkit.training.callbacks.stopping
    import rlkit.training.module
    import rlkit.training.run  # noqa: F401
    from rlkit.config.compose import compose, experiment

    experiment(compose(["debug=fast"]))
    torch.set_num_threads(1)  # a pool of threads does not survive a fork


def start_copy_of_rlkit(
    words: Sequence[str],
    log: Path | str,
    before: Callable[[], object] | None = None,
    call: Callable[[Sequence[str]], int] = main,
) -> int:
    """Starts `rlkit WORDS` in a fork of this process; its process id.

    Args:
      log: takes what it prints. before: is called in the child first. call: in place of rlkit.
    The exit status is that of `os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])`.
    """
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        begin_copy()
        for stream in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w", 1, closefd=False),
            os.fdopen(2, "w", 1, closefd=False),
        )
        if before is not None:
            before()
        status = call(words) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed
                stream.flush()
        os._exit(status)


def forget_modules_of_tests() -> None:
    """A file that a test has written is imported anew, though another test has written and imported
    one of that name."""
    written = os.path.join(os.path.realpath(tempfile.gettempdir()), "pytest-of-")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and os.path.realpath(file).startswith(written):
            del sys.modules[name]
    importlib.invalidate_caches()


def copied(work: Callable[[], Any], environment: Mapping[str, str]) -> int:
    """A copy of this process that does some work with other variables of the environment; its
    process id. Its exit status is what the work returns, or that of a SystemExit."""
    pid = os.fork()
    if pid:
        return pid
    status: Any = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        begin_copy()
        status = work()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status or 0))


def run_script(command: Sequence[str], *, env: Mapping[str, str], cwd: Any = None, **_: Any) -> Any:
    """In place of subprocess.run, for `python FILE.py WORDS` whose output is read in one piece."""
    with tempfile.TemporaryFile() as said:

        def work() -> Any:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            os.chdir(cwd or ".")
            return as_script(command[1:])

        process = Copy(copied(work, env))
        process.wait()
        said.seek(0)
        text = said.read().decode()
    return subprocess.CompletedProcess(command, process.returncode or 0, text)


def as_script(words: Sequence[str]) -> Any:
    """`python FILE.py WORDS` in this process; its exit status."""
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


# ------------------------------------------------------------------------------------------- sweeps

# A sweep of two jobs has three processes. All of a sweep's own code runs in copies too: records,
# signals, owners, and the server that copies itself for each job of a bench.


def begin_sweep(
    forked: Callable[..., int], words: list[str], place: Path, own: Mapping[str, str]
) -> Piped:
    """Starts `rlkit WORDS`, a command of many runs, in a folder, with variables of its own."""

    def settle() -> None:
        os.chdir(place)
        os.environ.update(own)
        sys.path.insert(0, str(place))
        if "bench" in list_extras():  # else the jobs are new processes
            from rlkit.extras.bench import warm

            warm.WarmServer.begin = begin_server  # type: ignore[method-assign]
            runner.start_process = warm.WarmServer({}).start

    return Piped(partial(forked, words, os.devnull), settle)


def begin_server(self: Any) -> None:
    """In place of WarmServer.begin."""
    from rlkit.extras.bench import warm

    self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve() -> None:
        self.link.close()
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        sys.argv = ["-c", str(theirs.fileno()), *self.imports]
        warm.serve_jobs()

    with theirs:
        self.process = Copy(copied(serve, os.environ | self.environment | make_child_environment()))


# -------------------------------------------------------------------------------- ranks and scripts


def start_copy(command: Sequence[str], *, env: Mapping[str, str], start_new_session: bool) -> Copy:
    """In place of subprocess.Popen, for `python -m rlkit WORDS` and `python FILE.py WORDS`."""
    assert start_new_session

    def work() -> Any:
        os.setsid()
        if list(command[1:3]) == ["-m", "rlkit"]:
            return main(command[3:])
        return as_script(command[1:])

    return Copy(copied(work, env))
