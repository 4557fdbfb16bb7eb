"""Running the jobs: a process each, on this machine or where a launcher puts it; signals reach all of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rlkit.config.changes import ONCE
from rlkit.distributed.launch import own_gpus
from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.runs.sweeps.compare import comparison, report, table_csv
from rlkit.runs.sweeps.jobs import STOP, RunJob, alive, read_jobs, save
from rlkit.runs.sweeps.plan import Plan, is_search, make_plan
from rlkit.runs.sweeps.watch import watching
from rlkit.system import owner
from rlkit.system.files import put_aside, write_atomic
from rlkit.system.output import clock
from rlkit.system.processors import cores
from rlkit.system.rows import read_rows

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def sweep(arguments: Sequence[str], *, config_dir: str | None = None) -> int:
    """Runs all jobs of a command line and compares them; the exit status: 0 all done, 1 one failed, 130 or 143 stopped by a signal."""
    plan = make_plan(arguments, config_dir)
    jobs = plan.root / "jobs"
    jobs.mkdir(parents=True, exist_ok=True)
    for old in (*jobs.glob("*.json"), jobs / STOP):
        old.unlink(missing_ok=True)
    print(f"sweep of {plan.total} jobs in {plan.root}; what each prints is in {jobs}", flush=True)
    began = time.time()
    task = functools.partial(run_job, config_dir=config_dir, parallel=parallel(plan), parent=os.getpid())
    with signals_to_jobs(jobs) as received, watching(plan):
        try:
            launch(plan, task)
        except KeyboardInterrupt:
            received.append(signal.SIGINT)
    done = read_jobs(jobs)
    print(f"\n{comparison(done)}", flush=True)
    write_atomic(plan.root / "comparison.csv", table_csv(done).encode())
    print(f"\ncomparison       {plan.root / 'comparison.csv'}")
    if page := report(plan.root, done):
        print(f"report           {page}")
    failed = [job for job in done if job.status == "failed"]
    missing = plan.total - sum(job.status == "finished" for job in done)
    print(f"{plan.total - missing} of {plan.total} jobs finished, {len(failed)} failed, {clock(time.time() - began)}")
    if missing:
        again = [*(text for text in arguments if text.partition("=")[0] not in ONCE), "resume=auto"]
        folder = f" --config-dir {shlex.quote(config_dir)}" if config_dir else ""
        print(f"to go on         rlkit train -m {shlex.join(again)}{folder}")
    sys.stdout.flush()
    return 128 + received[0] if received else int(missing > 0)


def launch(plan: Plan, task: Callable[[DictConfig], float | None]) -> None:
    """What Hydra's multirun does, with the config that is composed already. Raises ConfigError where the sweeper refuses."""
    import logging
    import warnings

    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException

    from rlkit.config.compose import hydra_context

    if "optuna" in plan.config.hydra.sweeper._target_:
        importlib.import_module("optuna").logging.set_verbosity(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="optuna|hydra_plugins")
    with hydra_context(plan.config) as context:
        context.callbacks.on_multirun_start(config=plan.config, config_name="train")
        sweeper = Plugins.instance().instantiate_sweeper(config=plan.config, hydra_context=context, task_function=task)
        try:
            sweeper.sweep(arguments=plan.arguments)
        except HydraException as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:  # optuna's, where no trial has a value
            if "trial" not in str(error).lower():
                raise
        context.callbacks.on_multirun_end(config=plan.config, config_name="train")


def run_job(config: DictConfig, *, config_dir: str | None, parallel: int, parent: int) -> float | None:
    """One job in a process of its own, wherever Hydra's launcher has put us; its objective, or None where it has none.

    Args:
      config: the job's; the process composes it again, from its overrides.
      parallel: jobs that share this machine's cores. parent: the process of the sweep, which handles signals.
    """
    from hydra.core.hydra_config import HydraConfig

    state = HydraConfig.get()
    overrides, folder = [str(text) for text in state.overrides.task], Path(state.sweep.dir) / str(state.sweep.subdir)
    record = Path(state.sweep.dir) / "jobs" / f"{folder.name}.json"
    log = record.with_suffix(".log")
    job = RunJob(int(state.job.num), overrides, folder, "running", host=socket.gethostname(), started=time.time())
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep passes it on
    if runs.is_finished(folder):
        save(record, job._replace(status="finished", ended=time.time(), reason="earlier"))
        return objective(folder)
    if (record.parent / STOP).exists():
        save(record, job._replace(status="not started"))
        return None
    if runs.is_run(folder) and not any((folder / "checkpoints").glob("*.ckpt")) and not owner.occupied(folder):
        put_aside(folder, ".set_aside")  # it never reached a checkpoint, so it starts anew
    command = [sys.executable, "-m", "rlkit", "train", *overrides, f"hydra.run.dir='{folder}'"]
    command += ["--config-dir", config_dir] if config_dir else []
    environment = dict(os.environ)
    if parallel > 1:
        environment |= {name: str(threads(parallel)) for name in THREADS}
    devices = int(OmegaConf.select(config, "trainer.devices", default=1))
    with log.open("ab") as out, own_gpus(record.parent / "gpus", jobs=parallel, devices=devices) as own:
        # A group of its own: what is typed at the terminal reaches the sweep alone, which passes it on once.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment | own, process_group=0
        )
        save(record, job := job._replace(pid=process.pid))
        code = process.wait()
    status = "finished" if runs.is_finished(folder) else "interrupted" if code in (129, 130, 143) else "failed"
    save(record, job._replace(status=status, pid=0, ended=time.time(), reason="" if status == "finished" else why(code, log)))
    return objective(folder)


def objective(folder: Path) -> float | None:
    """What a search maximises: the last validation accuracy, never a test figure; without one the mean reward of the last ten steps."""
    last = (runs.read_summary(folder) or {}).get("validation")
    if last:
        return float(last["accuracy"])
    rewards = [row["reward/mean"] for row in read_rows(folder / "metrics.jsonl") if row.get("reward/mean") is not None]
    return statistics.fmean(rewards[-10:]) if rewards and runs.is_finished(folder) else None


def parallel(plan: Plan) -> int:
    """Jobs that run at once on one machine, and so share its cores."""
    launcher = plan.config.hydra.launcher
    if "Joblib" in launcher._target_:
        wanted = int(launcher.n_jobs)
        at_once = wanted if wanted > 0 else cores()
    elif "LocalLauncher" in launcher._target_:
        at_once = plan.total
    else:
        at_once = 1
    batch = int(plan.config.hydra.sweeper.get("n_jobs") or 1) if is_search(plan.config) else plan.total
    return max(1, min(at_once, batch, plan.total))


def threads(parallel: int) -> int:
    """Threads of each of so many jobs, so that together they have the machine's cores once."""
    return max(1, cores() // parallel)


def why(code: int, log: Path) -> str:
    """The end of a job in a few words: rlkit's own sentence where there is one, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix("rlkit: ") for line in lines if line.startswith("rlkit: ")]
    said = own[-1] if code in (1, 2) and len(own) > 1 else lines[-1] if lines else "it printed nothing"
    return f"{f'signal {-code}' if code < 0 else f'exit {code}'}: {said[:200]}"


@contextlib.contextmanager
def signals_to_jobs(jobs: Path) -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP go to the running jobs of this machine, which save and end; no other one starts. A third ends it all."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        (jobs / STOP).touch()
        mine = [job for job in read_jobs(jobs) if alive(job)]
        for job in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, number)
        if len(received) == 1:
            said = "; what runs elsewhere goes on" if any(j.status == "running" for j in read_jobs(jobs)) and not mine else ""
            with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
                os.write(2, f"\nstopping: {len(mine)} running jobs save and end{said}; once more ends them at once\n".encode())
        if len(received) > 2 or (len(received) > 1 and not mine):
            raise KeyboardInterrupt

    heard = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        (jobs / STOP).unlink(missing_ok=True)
