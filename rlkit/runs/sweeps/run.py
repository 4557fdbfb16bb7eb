"""Run `rlkit train -m`: start the jobs of Hydra's sweeper through Hydra's launcher, and compare the
results."""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rlkit.config.changes import ONCE
from rlkit.config.compose import compose
from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.runs.sweeps.compare import format_comparison, write_csv
from rlkit.runs.sweeps.jobs import RunJob, label_job, read_jobs, read_objective
from rlkit.runs.sweeps.plan import Plan, is_search, make_plan, set_aside_changed
from rlkit.runs.sweeps.runner import Sweep, conduct_jobs, do_job, end_line, make_sweep, sum_up
from rlkit.system import owner
from rlkit.system.processors import count_cores


def sweep(
    arguments: Sequence[str],
    *,
    config_dir: str | None = None,
    report: Callable[[Sequence[Path], Path], None] | None = None,
) -> int:
    """Run all jobs of a command line and compare their results. Return the exit status: 0 if all
    jobs are done, 1 if one failed, 130 or 143 if a signal stopped the sweep.

    Args:
      arguments: overrides, some of them with several values.
      config_dir: a folder with the user's own options.
      report: writes one page about the run folders to a file, and prints the file's path.
    """
    plan = make_plan(arguments, config_dir)
    jobs = plan.root / "jobs"
    began = time.time()

    def line(job: RunJob) -> str:
        return end_line(job, shared, plan.total, label_job(job.overrides, plan.varied))

    with owner.own_folder(plan.root, takeover=bool(plan.config.takeover)):
        shared = make_sweep(plan.root, config_dir, count_parallel_jobs(plan))
        task = functools.partial(run_job, shared=shared, search=is_search(plan.config))
        print(f"sweep of {plan.total} jobs in {plan.root}; their output is in {jobs}", flush=True)
        with conduct_jobs(shared, line) as received:
            try:
                launch(plan, task)
            except KeyboardInterrupt:
                received.append(signal.SIGINT)
        done = read_jobs(jobs)
        print(f"\n{format_comparison(done)}", flush=True)
        write_csv(plan.root / "comparison.csv", done)
        print(f"\ncomparison       {plan.root / 'comparison.csv'}")
        folders = [job.folder for job in done if runs.is_run(job.folder)]
        if report and folders:
            report(folders, plan.root / "report.html")
    print(sum_up(done, plan.total, began))
    finished = sum(job.status == "finished" for job in done)
    if finished < plan.total:
        again = [
            *(text for text in arguments if text.partition("=")[0] not in ONCE),
            "resume=auto",
        ]
        folder = f" --config-dir {shlex.quote(config_dir)}" if config_dir else ""
        print(f"to go on         rlkit train -m {shlex.join(again)}{folder}")
    sys.stdout.flush()
    return 128 + received[0] if received else int(finished < plan.total)


def launch(plan: Plan, task: Callable[[DictConfig], float | None]) -> None:
    """Do the work of Hydra's multirun with the composed config. Raises ConfigError if the sweeper
    refuses."""
    import logging
    import warnings

    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException

    from rlkit.config.compose import hydra_context

    # optuna sets the level of its logger itself when it is imported
    if "optuna" in plan.config.hydra.sweeper._target_:
        importlib.import_module("optuna").logging.set_verbosity(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="optuna|hydra_plugins")
    with hydra_context(plan.config) as context:
        context.callbacks.on_multirun_start(config=plan.config, config_name="train")
        sweeper = Plugins.instance().instantiate_sweeper(
            config=plan.config, hydra_context=context, task_function=task
        )
        try:
            sweeper.sweep(arguments=plan.arguments)
        except HydraException as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:  # raised by optuna if no trial has a value
            if "trial" not in str(error).lower():
                raise
        context.callbacks.on_multirun_end(config=plan.config, config_name="train")


def run_job(config: DictConfig, *, shared: Sweep, search: bool = False) -> float | None:
    """Run one job from the launcher's process. Return the job's objective, or None without an
    objective.

    Args:
      config: the job's config. The job's own process composes the config again, from the overrides.
      search: whether the sweeper chose the values. In this case the job's folder has not been
        checked yet.
    """
    from hydra.core.hydra_config import HydraConfig

    state = HydraConfig.get()
    overrides = [str(text) for text in state.overrides.task]
    folder = Path(state.sweep.dir) / str(state.sweep.subdir)
    elsewhere = not owner.is_here(shared.process) or shared.process["pid"] != os.getpid()
    if elsewhere and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep passes the signal on to its jobs
    if search and runs.is_run(folder):
        set_aside_changed(folder, compose(overrides, config_dir=shared.config_dir).config)
    job = RunJob(int(state.job.num), overrides, folder)
    devices = int(OmegaConf.select(config, "trainer.devices", default=1))
    done = do_job(job, shared, devices=devices)
    return None if done.status == "not started" else read_objective(folder)


def count_parallel_jobs(plan: Plan) -> int:
    """Count the jobs that run at the same time on one machine and share its cores."""
    launcher = plan.config.hydra.launcher
    at_once = 1
    if "Joblib" in launcher._target_:
        at_once = int(launcher.n_jobs) if int(launcher.n_jobs) > 0 else count_cores()
    elif "LocalLauncher" in launcher._target_:
        at_once = plan.total
    batch = (
        int(plan.config.hydra.sweeper.get("n_jobs") or 1) if is_search(plan.config) else plan.total
    )
    return max(1, min(at_once, batch, plan.total))
