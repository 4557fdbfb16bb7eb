"""Run many jobs for one command: one owner of the folder, one process per job, and signals to all
jobs.

A command of many runs owns its folder and calls `do_job` for each job in a block of `conduct_jobs`,
one after another or in several threads or processes. Every job is `rlkit train` in a run folder
below the sweep's, and ends when the sweep's process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from rlkit.config.functions import quote
from rlkit.distributed.launch import assign_gpus
from rlkit.runs import folder as runs
from rlkit.runs.kernels import decide_kernels
from rlkit.runs.sweeps.jobs import EARLIER, RunJob, is_alive, read_jobs, record_path, save
from rlkit.system import owner
from rlkit.system.files import put_aside
from rlkit.system.output import clock
from rlkit.system.parent import make_child_environment
from rlkit.system.processors import count_cores

# name of a file in jobs/. While the file exists, no further job starts. It holds the signal, and
# the jobs that have received the signal
STOP = "stop"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK = 1.0  # seconds between two checks for other reasons to end a job
ENDED = ("finished", "failed", "interrupted")


class Sweep(NamedTuple):
    """Hold the data shared by all jobs of a sweep. A launcher may pass this record to another
    process or machine."""

    root: Path
    config_dir: str | None
    parallel: int  # number of jobs that share this machine's cores
    environment: Mapping[str, str]  # environment of every job, see `settle`
    process: Mapping[str, Any]  # the process that handles signals, from `owner.describe_process`


class Process(Protocol):
    """Describe a job's process: a subprocess.Popen, or what another `Start` returns."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; it is negative for a signal. Raises:
        subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process. Do nothing if the process has ended."""


Start = Callable[[list[str], IO[bytes], Mapping[str, str]], Process]


def make_sweep(
    root: Path,
    config_dir: str | None,
    parallel: int,
    threads: int | None = None,
) -> Sweep:
    """Describe this process's sweep, with the settings common to all its jobs.

    Args:
      root: the sweep's folder, owned by this process.
      parallel: number of jobs at the same time.
      threads: number of threads of each job. With None the jobs share the cores. If only one job
        runs at a time, the job itself chooses.
    """
    shared = threads or (max(1, count_cores() // parallel) if parallel > 1 else None)
    environment = decide_kernels(root) | (dict.fromkeys(THREADS, str(shared)) if shared else {})
    return Sweep(root, config_dir, parallel, environment, owner.describe_process(os.getpid()))


# ---------------------------------------------------------------------------------------- the whole


@contextlib.contextmanager
def conduct_jobs(sweep: Sweep, line: Callable[[RunJob], str]) -> Iterator[list[int]]:
    """Prepare a sweep's folder for jobs, which the block of a `with` statement then runs. Files of
    an earlier sweep about its jobs are removed.

    The caller owns the sweep's folder (`owner.own_folder`).

    Args:
      line: the text to print about an ended job.
    Yields: the signals received.
    """
    jobs = sweep.root / "jobs"
    jobs.mkdir(parents=True, exist_ok=True)
    for old in (*jobs.glob("*.json"), jobs / STOP):
        old.unlink(missing_ok=True)
    with forward_signals(jobs) as received, watch_jobs(jobs, line):
        yield received


@contextlib.contextmanager
def forward_signals(jobs: Path) -> Iterator[list[int]]:
    """Pass SIGINT, SIGTERM and SIGHUP on to the running jobs of this machine. These jobs save and
    end, and no other job starts. A third signal ends everything immediately."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        (jobs / STOP).touch()
        known = read_jobs(jobs)
        mine = [job for job in known if is_alive(job)]
        last = len(received) > 2
        for job in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.process["pid"], signal.SIGKILL if last else number)
        told = {"signal": number, "told": [job.process["pid"] for job in mine]}
        (jobs / STOP).write_text(json.dumps(told))
        if len(received) == 1:
            elsewhere = any(job.status == "running" for job in known) and not mine
            more = "; what runs elsewhere goes on" if elsewhere else ""
            said = (
                f"\nstopping: {len(mine)} running jobs save and end{more}; once more ends them at"
                " once\n"
            )
            with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
                os.write(2, said.encode())
        if last or (len(received) > 1 and not mine):
            raise KeyboardInterrupt

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        (jobs / STOP).unlink(missing_ok=True)


@contextlib.contextmanager
def watch_jobs(jobs: Path, line: Callable[[RunJob], str]) -> Iterator[None]:
    """Print one line for each job that ends while the block of a `with` statement runs. A thread
    reads the jobs' files, so the jobs may run on any machine."""
    over = threading.Event()
    told: set[int] = set()

    def watch() -> None:
        last = False
        while not last:
            # checked before the files are read, so the last jobs are not missed
            last = over.wait(0.5)
            for job in read_jobs(jobs):
                if job.status in ENDED and job.number not in told:
                    told.add(job.number)
                    with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
                        print(line(job), flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_line(job: RunJob, sweep: Sweep, total: int, name: str, figure: str = "accuracy") -> str:
    """Write the line about an ended job, for example:

    3/9  algorithm=grpo seed=1  finished  20 steps  1:04  test accuracy 0.412 → 0.970
    """
    words = [f"{job.number + 1:>{len(str(total))}}/{total}", name, job.status]
    if job.status != "finished":
        log = record_path(sweep.root, job.folder).with_suffix(".log")
        return "  ".join([*words, job.reason, f"see {log}"])
    summary = runs.read_summary(job.folder) or {}
    words.append(f"{summary.get('steps')} steps")
    words.append("done earlier" if job.reason == EARLIER else clock(job.seconds))
    before = summary.get("before")
    after = summary.get("after")
    if before and after:
        words.append(f"test {figure} {before[figure]:.3f} → {after[figure]:.3f}")
    return "  ".join(words)


def sum_up(done: Sequence[RunJob], total: int, began: float) -> str:
    """Write the last line of a sweep, for example `8 of 9 jobs finished, 1 failed, 1:04`."""
    finished = sum(job.status == "finished" for job in done)
    failed = sum(job.status == "failed" for job in done)
    return f"{finished} of {total} jobs finished, {failed} failed, {clock(time.time() - began)}"


# ------------------------------------------------------------------------------------------ one job


def do_job(job: RunJob, sweep: Sweep, start: Start | None = None, *, devices: int = 1) -> RunJob:
    """Run one job in a process of its own. Return the job with its outcome, as its file holds it.

    A finished run is not repeated; the caller must have checked that the run has the job's
    settings. With `resume=auto` among the overrides, a run with a checkpoint continues from it. A
    run without a checkpoint is set aside and begins again.

    Args:
      start: a function to start the process; by default it starts a new Python process.
      devices: the GPUs of the job.
    """
    record = record_path(sweep.root, job.folder)
    if runs.is_finished(job.folder):
        return save(record, job._replace(status="finished", reason=EARLIER))
    if (record.parent / STOP).exists() or owner.explain_loss(sweep.root):
        return save(record, job._replace(status="not started"))
    if (
        runs.is_run(job.folder)
        and not any((job.folder / "checkpoints").glob("*.ckpt"))
        and not owner.find_occupant(job.folder)
    ):
        put_aside(job.folder, runs.SET_ASIDE)
    began = time.time()
    code, said = run_process(job, sweep, start or start_process, devices)
    stopped = (record.parent / STOP).exists() and -code in SIGNALS
    if runs.is_finished(job.folder):
        job = job._replace(status="finished")
    elif stopped or code - 128 in SIGNALS:
        job = job._replace(status="interrupted", reason=said)
    else:
        job = job._replace(status="failed", reason=said)
    return save(record, job._replace(seconds=time.time() - began))


def run_process(job: RunJob, sweep: Sweep, start: Start, devices: int) -> tuple[int, str]:
    """Run a job's process, and record the process in the job's file. Return its exit status, and a
    description of its end in a few words."""
    record = record_path(sweep.root, job.folder)
    log = record.with_suffix(".log")
    gpus = assign_gpus(record.parent / "gpus", jobs=sweep.parallel, devices=devices)
    with log.open("ab") as out, gpus as own:
        begin = out.tell()
        try:
            process = start(_build_command(job, sweep), out, {**sweep.environment, **own})
        except OSError as error:
            return 1, f"it cannot be started: {error.strerror or error}"
        named = owner.describe_process(process.pid)
        save(record, job._replace(status="running", process=named))
        code = wait_for(process, sweep)
    return code, explain_end(code, log, begin)


def _build_command(job: RunJob, sweep: Sweep) -> list[str]:
    """Build the command line of a job, without the word `rlkit`."""
    words = ["train", *job.overrides, f"hydra.run.dir={quote(str(job.folder))}"]
    return [*words, "--config-dir", sweep.config_dir] if sweep.config_dir else words


def start_process(words: list[str], log: IO[bytes], environment: Mapping[str, str]) -> Process:
    """Start `rlkit WORDS` as a new process whose output goes to a file."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlkit", *words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=os.environ | environment | make_child_environment(),
        # a signal typed at the terminal reaches only the sweep; the sweep passes it on once
        process_group=0,
    )


def wait_for(process: Process, sweep: Sweep) -> int:
    """Wait for a job, and return its exit status. If a signal reached the sweep while the job was
    starting, the job gets this signal now. The job is killed once the sweep is gone.

    A launcher may run this code in another process than the sweep's. In this case a job does not
    end by itself together with the sweep. Therefore this process checks whether the sweep still
    runs.
    """
    passed = False
    while True:
        try:
            return process.wait(LOOK)
        except subprocess.TimeoutExpired:
            pass
        if owner.is_here(sweep.process) and not owner.runs_here(sweep.process):
            process.send_signal(signal.SIGKILL)
        number = _find_missed_signal(sweep.root / "jobs" / STOP, process.pid)
        if number and not passed:
            passed = True
            process.send_signal(number)


def _find_missed_signal(stop: Path, pid: int) -> int:
    """Return the number of a signal that was sent to the other jobs before this job was known.
    Return 0 without such a signal."""
    try:
        said = json.loads(stop.read_text())
        return 0 if pid in said["told"] else int(said["signal"])
    # without a signal there is no file; and the file may be half-written
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def explain_end(code: int, log: Path, begin: int = 0) -> str:
    """Describe the end of a job in a few words: rlkit's own error message if the log has one,
    otherwise the last line of the log.

    Args:
      begin: position in the file, in bytes, at which the job's log begins. The logs of earlier
        attempts are before this position.
    """
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("rlkit: ")]
    last = lines[-1] if lines else "it printed nothing"
    if code in (1, 2) and len(own) > 1:  # the first line names the run
        last = own[-1]
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    return f"{how}: {last.removeprefix('rlkit: ')[:200]}"
