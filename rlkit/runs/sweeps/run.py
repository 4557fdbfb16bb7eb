"""Running the jobs: a process each, on this machine or where a launcher puts it; signals reach all of them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shlex
import signal
import socket
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
from rlkit.runs.kernels import settled_kernels
from rlkit.runs.sweeps.compare import comparison, report, write_csv
from rlkit.runs.sweeps.jobs import STOP, RunJob, alive, label, objective, read_jobs, save
from rlkit.runs.sweeps.plan import Plan, is_search, make_plan
from rlkit.system import owner
from rlkit.system.files import put_aside
from rlkit.system.output import clock
from rlkit.system.processors import cores

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def sweep(arguments: Sequence[str], *, config_dir: str | None = None, trusted: bool = False) -> int:
    """Runs all jobs of a command line and compares them; the exit status: 0 all done, 1 one failed, 130 or 143 stopped by a signal.

    `trusted`: the command line says trust=true, which every job is told too.
    """
    plan = make_plan(arguments, config_dir, trusted=trusted)
    jobs = plan.root / "jobs"
    jobs.mkdir(parents=True, exist_ok=True)
    for old in (*jobs.glob("*.json"), jobs / STOP):
        old.unlink(missing_ok=True)
    print(f"sweep of {plan.total} jobs in {plan.root}; what each prints is in {jobs}", flush=True)
    began = time.time()
    task = functools.partial(run_job, config_dir=config_dir, trusted=trusted, parallel=parallel(plan), parent=os.getpid())
    with settled_kernels(plan.root), signals_to_jobs(jobs) as received, watching(plan):
        try:
            launch(plan, task)
        except KeyboardInterrupt:
            received.append(signal.SIGINT)
    done = read_jobs(jobs)
    print(f"\n{comparison(done)}", flush=True)
    write_csv(plan.root / "comparison.csv", done)
    print(f"\ncomparison       {plan.root / 'comparison.csv'}")
    if page := report(plan.root, done):
        print(f"report           {page}")
    finished, failed = (sum(job.status == status for job in done) for status in ("finished", "failed"))
    print(f"{finished} of {plan.total} jobs finished, {failed} failed, {clock(time.time() - began)}")
    if finished < plan.total:
        again = [*(text for text in arguments if text.partition("=")[0] not in ONCE), "resume=auto", *(["trust=true"] if trusted else [])]
        folder = f" --config-dir {shlex.quote(config_dir)}" if config_dir else ""
        print(f"to go on         rlkit train -m {shlex.join(again)}{folder}")
    sys.stdout.flush()
    return 128 + received[0] if received else int(finished < plan.total)


def launch(plan: Plan, task: Callable[[DictConfig], float | None]) -> None:
    """What Hydra's multirun does, with the config that is composed already. Raises ConfigError where the sweeper refuses."""
    import logging
    import warnings

    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException

    from rlkit.config.compose import hydra_context

    if "optuna" in plan.config.hydra.sweeper._target_:  # it sets the level of its logger itself when it is imported
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


def run_job(config: DictConfig, *, config_dir: str | None, trusted: bool = False, parallel: int, parent: int) -> float | None:
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
    job = RunJob(int(state.job.num), overrides, folder, "running", host=socket.gethostname())
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep passes it on
    if runs.is_finished(folder):
        save(record, job._replace(status="finished", reason="earlier"))
        return objective(folder)
    if (record.parent / STOP).exists():
        save(record, job._replace(status="not started"))
        return None
    if runs.is_run(folder) and not any((folder / "checkpoints").glob("*.ckpt")) and not owner.occupied(folder):
        put_aside(folder, ".set_aside")  # it never reached a checkpoint, so it starts again from the beginning
    command = [sys.executable, "-m", "rlkit", "train", *overrides, f"hydra.run.dir='{folder}'"]
    command += ["trust=true"] if trusted else []
    command += ["--config-dir", config_dir] if config_dir else []
    shared = dict.fromkeys(THREADS, str(max(1, cores() // parallel))) if parallel > 1 else {}
    devices, began = int(OmegaConf.select(config, "trainer.devices", default=1)), time.time()
    with log.open("ab") as out, own_gpus(record.parent / "gpus", jobs=parallel, devices=devices) as gpus:
        # A group of its own: what is typed at the terminal reaches the sweep alone, which passes it on once.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=os.environ | shared | gpus, process_group=0
        )
        save(record, job := job._replace(pid=process.pid))
        code = process.wait()
    status = "finished" if runs.is_finished(folder) else "interrupted" if code in (129, 130, 143) else "failed"
    reason = "" if status == "finished" else why(code, log)
    save(record, job._replace(status=status, pid=0, seconds=time.time() - began, reason=reason))
    return objective(folder)


def parallel(plan: Plan) -> int:
    """Jobs that run at once on one machine, and so share its cores."""
    launcher, at_once = plan.config.hydra.launcher, 1
    if "Joblib" in launcher._target_:
        at_once = int(launcher.n_jobs) if int(launcher.n_jobs) > 0 else cores()
    elif "LocalLauncher" in launcher._target_:
        at_once = plan.total
    batch = int(plan.config.hydra.sweeper.get("n_jobs") or 1) if is_search(plan.config) else plan.total
    return max(1, min(at_once, batch, plan.total))


def why(code: int, log: Path) -> str:
    """The end of a job in a few words: rlkit's own sentence where there is one, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix("rlkit: ") for line in lines if line.startswith("rlkit: ")]
    text = own[-1] if code in (1, 2) and len(own) > 1 else lines[-1] if lines else "it printed nothing"
    return f"{f'signal {-code}' if code < 0 else f'exit {code}'}: {text[:200]}"


@contextlib.contextmanager
def signals_to_jobs(jobs: Path) -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP go to the running jobs of this machine, which save and end; no other one starts. A third ends it all."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        (jobs / STOP).touch()
        known = read_jobs(jobs)
        mine = [job for job in known if alive(job)]
        for job in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job.pid, number)
        if len(received) == 1:
            elsewhere = "; what runs elsewhere goes on" if any(job.status == "running" for job in known) and not mine else ""
            with contextlib.suppress(OSError):  # after SIGHUP there may be no terminal
                os.write(2, f"\nstopping: {len(mine)} running jobs save and end{elsewhere}; once more ends them at once\n".encode())
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


@contextlib.contextmanager
def watching(plan: Plan) -> Iterator[None]:
    """Prints one line for each job that ends while the block runs; a thread reads the jobs' files, wherever the jobs are."""
    over, told = threading.Event(), set()

    def watch() -> None:
        last = False
        while not last:
            last = over.wait(0.5)  # looked at before the files, so that the last jobs are seen
            for job in read_jobs(plan.root / "jobs"):
                if job.status in ("finished", "failed", "interrupted") and job.number not in told:
                    told.add(job.number)
                    print(end_line(job, plan), flush=True)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_line(job: RunJob, plan: Plan) -> str:
    """`3/9  algorithm=grpo seed=1  finished  20 steps  1:04  test accuracy 0.412 → 0.970`."""
    words = [f"{job.number + 1:>{len(str(plan.total))}}/{plan.total}", label(job.overrides, plan.varied), job.status]
    if job.status != "finished":
        return "  ".join([*words, job.reason, f"see {job.folder.parent / 'jobs' / job.folder.name}.log"])
    summary = runs.read_summary(job.folder) or {}
    words += [f"{summary.get('steps')} steps", "done earlier" if job.reason else clock(job.seconds)]
    before, after = summary.get("before"), summary.get("after")
    return "  ".join([*words, *([f"test accuracy {before['accuracy']:.3f} → {after['accuracy']:.3f}"] if before and after else [])])
