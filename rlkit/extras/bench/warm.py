"""Keep one server process with all imports of a run done, and fork the server for each job.

    sweep ── command line, environment, log ──▶ server ──fork──▶ keeper ──fork──▶ job
      ◀──────── process id of the job, then its exit status ───────┘

A job is `python -m rlkit WORDS` without the five seconds that a new process takes to import torch,
transformers and Lightning. The server itself computes nothing and has no thread, so a forked copy
begins like a new process. The keeper waits for one job. Every process ends with its parent, so no
process is left when the sweep is gone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from rlkit.system.parent import end_with, end_with_parent, make_child_environment

START = "from rlkit.extras.bench import warm; warm.serve_jobs()"
LONGEST = 1 << 17  # largest number of bytes of a request: a command line and environment variables
IMPORTS = (
    "rlkit.runs.python",
    "rlkit.training.module",
    "rlkit.training.ahead.modes",
    "rlkit.training.callbacks",
    "rlkit.training.loggers",
    "rlkit.engines.cached",
    "rlkit.training.callbacks.checkpoints",
    "rlkit.training.callbacks.conversations",
    "rlkit.training.callbacks.terminal",
    "hydra.main",
    "lightning",
    "pandas",
    "pyarrow.parquet",
    "transformers.models.qwen3.modeling_qwen3",
)


class WarmJob:
    """Control a job's process, with the methods of subprocess.Popen that a sweep uses."""

    def __init__(self, pid: int, answers: socket.socket):
        self.pid = pid
        self.answers = answers
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; it is negative for a signal. Raises:
        subprocess.TimeoutExpired."""
        if self.returncode is None:
            self.answers.settimeout(timeout)
            try:
                said = self.answers.recv(32)
            except TimeoutError:
                raise subprocess.TimeoutExpired("rlkit", timeout or 0.0) from None
            # no answer: the server and its jobs were killed
            self.returncode = int(said) if said else -signal.SIGKILL
            self.answers.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process. Do nothing if the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)


class WarmServer:
    """Start and use the server from the sweep's process. Several threads may use the same
    WarmServer.

    Args:
      environment: environment variables of the server and of all jobs, in addition to this
        process's.
      imports: further modules for the server to import for its jobs.
    """

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str] = ()):
        self.environment = dict(environment)
        self.imports = list(imports)
        self.lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Start the server's process."""
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The server counts the GPUs through the driver's NVML. Then it does not use a GPU
            # itself, and its forked copies still can.
            nvml = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), *self.imports],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | nvml | self.environment | make_child_environment(),
                process_group=0,  # a signal typed at the terminal reaches only the sweep
            )

    def start(self, words: list[str], log: IO[bytes], environment: Mapping[str, str]) -> WarmJob:
        """Start `rlkit WORDS` as a process whose output goes to a file. If the server has ended,
        start another server first.

        Raises: OSError if no process can be started.
        """
        request = json.dumps({"words": words, "environment": dict(environment)}).encode()
        for _ in range(2):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(self.link, [request], [theirs.fileno(), log.fileno()])
            pid = ours.recv(32)
            if pid:
                return WarmJob(int(pid), ours)
            ours.close()
            self.replace()
        raise OSError("the process that starts the jobs has ended; is there memory left?")

    def replace(self) -> None:
        """Start another server in place of one that has ended."""
        with self.lock:
            if self.process.poll() is not None:
                self.link.close()
                self.begin()

    def close(self) -> None:
        """End the server and all jobs that still run."""
        self.link.close()
        self.process.wait()


@contextlib.contextmanager
def warm_server(
    environment: Mapping[str, str], imports: Sequence[str] = ()
) -> Iterator[WarmServer]:
    """Yield a server for the jobs started in the block of a `with` statement."""
    server = WarmServer(environment, imports)
    try:
        yield server
    finally:
        server.close()


# ------------------------------------------------------------------------------ the other processes


def serve_jobs() -> None:
    """Run the server: import the modules, then start a keeper for each request, until the sweep
    closes its end of the connection."""
    end_with_parent()
    link = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the exit status of a keeper is not needed
    for name in (*IMPORTS, *sys.argv[2:]):
        with contextlib.suppress(ImportError):  # the job reports the missing module
            importlib.import_module(name)
    server = os.getpid()
    while True:
        data, files, _, _ = socket.recv_fds(link, LONGEST, 2)
        if not data:
            return
        if os.fork() == 0:
            link.close()
            end_with(server)
            keep(json.loads(data), socket.socket(fileno=files[0]), files[1])
            return  # reached only in a job's process, once its command is done
        for file in files:
            os.close(file)


def keep(request: Mapping[str, Any], answers: socket.socket, log: int) -> None:
    """Run the keeper: start the job, wait for it and report how it ended. This function returns
    only in the job's process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    job = os.fork()
    if job == 0:
        answers.close()
        end_with(keeper)
        become_job(request, log)
        return
    answers.send(str(job).encode())
    _, status = os.waitpid(job, 0)
    with contextlib.suppress(OSError):  # the sweep no longer listens
        answers.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def become_job(request: Mapping[str, Any], log: int) -> None:
    """Run `python -m rlkit WORDS` in this process. The function ends by raising SystemExit with the
    command's exit status."""
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(request["environment"])
    sys.argv = ["rlkit", *request["words"]]
    runpy.run_module("rlkit", run_name="__main__", alter_sys=True)
