"""Handle SIGTERM, SIGINT, SIGHUP and SIGUSR1: save the run at the boundary of a step, and end it. A
second signal ends it immediately."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.errors import Interrupted, warn
from rlkit.system.files import reason
from rlkit.system.leaving import end_process

# SIGHUP: the terminal or the connection is gone. SIGUSR1: SLURM's warning before it ends the job
# (#SBATCH --signal=USR1@120).
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StopOnSignal(L.Callback):
    """Handle the signals that end a run. Rollouts in progress are dropped immediately. An update,
    evaluation or save in progress is finished first.

    These handlers replace Lightning's handlers, because Lightning's end the process with status 0
    and, under SLURM, save in the middle of a step. This callback runs before all other callbacks.
    Therefore either all callbacks run for a step, or none.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.module: Any = None

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.module = module
        module.droppable = True  # the evaluation before the first step can be dropped
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                # leave SIGHUP alone if nohup ignores it
                if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                    # Lightning restores the former handlers
                    signal.signal(signum, self.handle)

    def handle(self, signum: int, frame: Any) -> None:
        if self.signum is not None:
            end_process(128 + signum)
        self.signum = signum
        # with several ranks, all of them end together between two steps
        drop = self.module.droppable and ranks.size() == 1
        doing = "the rollouts of this step are dropped" if drop else "this step is finished"
        line = (
            f"rlkit: {signal.Signals(signum).name}: {doing}, then the run is saved and ends; a"
            " second signal ends it now"
        )
        with suppress(OSError):  # after SIGHUP there may be no terminal
            # no `print`, because the signal may have interrupted a `print`
            os.write(2, f"\n{line}\n".encode())
        if drop:
            raise Interrupted(signum)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        signum = ranks.all_reduce_max(self.signum or 0)
        if signum:
            raise Interrupted(signum)


def requeue() -> None:
    """Ask SLURM to queue this job again. Print whether the job is queued, and if not, why."""
    job = os.environ.get("SLURM_JOB_ID")
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if job is None or not re.fullmatch(r"[0-9_]+", job):
        warn(
            "trainer.requeue: this is not a SLURM job (SLURM_JOB_ID is not set); start it again by"
            " hand"
        )
        return
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=60
        )
        problem = done.stderr.strip() or f"status {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = reason(error)
    if problem:
        warn(f"scontrol requeue {job} failed ({problem}); start the job again by hand")
    else:
        print(f"rlkit: job {job} is queued again", flush=True)
