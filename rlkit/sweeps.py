"""Sweeps: every job is checked first, then runs in a process and a folder of its own; one line per job, and one comparison at the end.

Hydra's sweeper decides the jobs and its launcher where they run. What the jobs do is read from files alone, so it does not matter
where that is: <sweep>/jobs/NAME.json and NAME.log of a job, and the run folder <sweep>/NAME with its metrics and summary.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from rlkit import runs
from rlkit.callbacks.files import write_atomic, write_json
from rlkit.errors import ConfigError, Refusal
from rlkit.launch import sweep_problem

STOP = "stop"  # jobs/stop: no further job starts
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Plan(NamedTuple):
    """What a sweep will do."""

    config: DictConfig  # Hydra's, with its sweeper and launcher
    arguments: list[str]  # as the sweeper takes them
    root: Path
    total: int  # jobs
    resume: bool


class Job(NamedTuple):
    """A job as its file tells."""

    number: int
    overrides: list[str]
    folder: Path
    status: str  # running, finished, failed, interrupted, not started
    pid: int = 0
    host: str = ""
    started: float = 0.0
    ended: float = 0.0
    reason: str = ""


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
        again = [*(text for text in arguments if text.partition("=")[0] != "resume"), "resume=auto"]
        folder = f" --config-dir {shlex.quote(config_dir)}" if config_dir else ""
        print(f"to go on         rlkit train -m {shlex.join(again)}{folder}")
    sys.stdout.flush()
    return 128 + received[0] if received else int(missing > 0)


# ------------------------------------------------------------------------------------------------------ planning


def make_plan(arguments: Sequence[str], config_dir: str | None) -> Plan:
    """The jobs of a command line, each of them composed, checked and dry-run. Raises ConfigError with all problems at once."""
    from rlkit.compose import compose, experiment

    given = [quoted(text) for text in arguments]
    config = compose_sweep(given, config_dir)
    root = Path(config.hydra.sweep.dir)
    resume = ([text.partition("=")[2] for text in given if text.lstrip("+").partition("=")[0] == "resume"] or ["never"])[-1]
    if resume not in ("never", "auto"):
        raise ConfigError(
            f"resume={resume}: a sweep takes resume=auto, which goes on where {root} ended; a single run is resumed without -m"
        )
    params = config.hydra.sweeper.get("params") or {}
    ours = [text for text in given if not text.lstrip("+~").startswith("hydra")]
    every = [*(f"{key}={value}" for key, value in params.items()), *ours]
    search = config.hydra.sweeper._target_ != BASIC
    batches = corners(every) if search else expand(every)
    problems: dict[str, list[str]] = {}
    added: set[str] = set()
    for job in batches:
        try:
            composed = compose(job, config_dir=config_dir)
            added |= {key[2:] for text in composed.overrides if (key := text.partition("=")[0]).startswith("++")}
            x = experiment(composed)
            if problem := sweep_problem(x.trainer.devices, x.trainer.nodes):
                raise ConfigError(problem)
            folder = root / folder_name(dirname(composed.overrides))
            lines = [] if search else folder_problems(folder, composed.config, resume == "auto")
        except Refusal as error:
            lines = str(error).splitlines()
        for line in lines:
            problems.setdefault(line, []).append(" ".join(job))
    if problems:
        raise ConfigError("\n".join(line if len(of) == len(batches) > 1 else f"job {of[0]}: {line}" for line, of in problems.items()))
    if running := [job for job in read_jobs(root / "jobs") if alive(job)]:
        raise ConfigError(f"{root}: job {running[0].folder.name} still runs there as process {running[0].pid}; wait for it, or end it")
    if len(batches) == 1 and not search and not any(is_sweep(text) for text in every):
        raise ConfigError("-m: no key has several values; write algorithm=grpo,dapo seed=1,2, or leave -m away")
    task = [f"++{text}" if text.partition("=")[0] in added else text for text in ours]
    return Plan(config, task, root, int(config.hydra.sweeper.n_trials) if search else len(batches), resume == "auto")


def compose_sweep(given: Sequence[str], config_dir: str | None) -> DictConfig:
    """The config of the sweep itself: which sweeper, launcher and folder. Raises ConfigError, also where a plugin is missing."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from rlkit.compose import conf_dir, is_group, one_sentence, searchpath

    GlobalHydra.instance().clear()
    search = searchpath(config_dir)
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="train"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        # A key that only a signature knows is added; the check of the jobs decides about it.
        texts = [text if text[0] in "+~" or is_sweep(text) or is_group(text, search) else f"++{text}" for text in given]
        try:
            config = hydra.compose_config("train", [*search, *texts], RunMode.MULTIRUN, from_shell=False, validate_sweep_overrides=False)
            config.hydra.mode = RunMode.MULTIRUN
            targets = {name: str(config.hydra[name]._target_) for name in ("sweeper", "launcher")}
        except (HydraException, OmegaConfBaseException) as error:
            said, absent = one_sentence(error), re.search(r"hydra/(launcher|sweeper)/(joblib|submitit|optuna)", str(error))
            raise ConfigError(f"{absent[0]} is not installed; pip install 'rlkit[{absent[2]}]'" if absent else said) from error
    for name, target in targets.items():
        package = target.rpartition(".")[0].split(".")
        plugin = ".".join(package[:2])
        if package[0] == "hydra_plugins" and not installed(plugin):
            extra = next((e for e in ("joblib", "submitit", "optuna") if e in target), "")
            raise ConfigError(f"hydra/{name}: {plugin} is not installed; pip install 'rlkit[{extra}]'")
    if "optuna" in targets["sweeper"]:  # its own option minimises, and ends a search with the first job that fails
        config.hydra.sweeper.direction, config.hydra.sweeper.max_failure_rate = "maximize", 1.0
    return config


def installed(module: str) -> bool:
    """Whether a module could be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a grid, each as its overrides. Raises ConfigError where an override cannot be read or is no list of values."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    except HydraException as error:
        raise ConfigError(f"{error}; an interval needs hydra/sweeper=search" if "interval" in str(error).lower() else str(error)) from error
    return [list(job) for job in batches[0]]


def corners(overrides: Sequence[str]) -> list[list[str]]:
    """Jobs that a search may propose: the first value of every key, then each end or choice of each key in turn."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    values: dict[str, list[str]] = {}
    try:
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key = override.get_key_element()
            value: Any = override.value()
            if override.is_interval_sweep():
                values[key] = [str(value.start), str(value.end)]
            elif override.is_sweep_override():
                values[key] = list(override.sweep_string_iterator())
            else:
                values[key] = [override.get_value_element_as_str()]
    except HydraException as error:
        raise ConfigError(str(error)) from error
    first = {key: ends[0] for key, ends in values.items()}
    tried = [first, *(first | {key: end} for key, ends in values.items() for end in ends[1:])]
    return [[f"{key}={value}" for key, value in job.items()] for job in tried]


def is_sweep(text: str) -> bool:
    """Whether an override names several values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return bool(OverridesParser.create().parse_overrides([text])[0].is_sweep_override())


def quoted(text: str) -> str:
    """An override in Hydra's grammar, as for a single run. Raises ConfigError where it cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from rlkit.compose import one_sentence, parse_override

    try:
        return parse_override(OverridesParser.create(), text)[1]
    except HydraException as error:
        raise ConfigError(f"'{text}' cannot be read: {one_sentence(error)}") from error


def dirname(overrides: Sequence[str]) -> str:
    """Hydra's override_dirname: the overrides that make a job this one, in order of the alphabet."""
    return ",".join(sorted(text for text in overrides if text.partition("=")[0].lstrip("+") != "resume"))


def folder_name(text: str) -> str:
    """A job's overrides as the name of one folder: no slash in it, and not longer than a file system takes."""
    name = text.replace("/", ".").replace("++", "").replace("'", "").replace('"', "").replace(" ", "")
    return name if len(name) <= 160 else f"{name[:150]}~{hashlib.sha256(name.encode()).hexdigest()[:8]}"


OmegaConf.register_new_resolver("rlkit_folder", folder_name, replace=True)  # conf/train.yaml, hydra.sweep.subdir


def folder_problems(folder: Path, config: Mapping[str, Any], resume: bool) -> list[str]:
    """Why a job cannot run in its folder: a run is there already, or one of another config."""
    if not runs.is_run(folder):
        return []
    root = folder.parent
    other = f"another sweep needs a folder of its own, as in hydra.sweep.dir={root}_2"
    if not resume:
        return [f"{root} holds runs of these jobs already, which are never overwritten; resume=auto goes on with them, {other}"]
    changed = runs.difference(runs.read_config(folder), config, beside=runs.PLACE)
    said = ", ".join(f"{key} was {was} and is now {now}" for key, (was, now) in list(changed.items())[:3])
    return [f"{folder} holds a run of another config ({said}); {other}"] if changed else []


# ------------------------------------------------------------------------------------------------------- running


def launch(plan: Plan, task: Callable[[DictConfig], float | None]) -> None:
    """What Hydra's multirun does, with the config that is composed already. Raises ConfigError where the sweeper refuses."""
    import logging
    import warnings

    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import HydraContext

    from rlkit.compose import conf_dir

    if "optuna" in plan.config.hydra.sweeper._target_:
        importlib.import_module("optuna").logging.set_verbosity(logging.ERROR)
        warnings.filterwarnings("ignore", category=FutureWarning, module="optuna|hydra_plugins")
    with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="train"):
        callbacks = Callbacks(plan.config)
        callbacks.on_multirun_start(config=plan.config, config_name="train")
        context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=callbacks)
        sweeper = Plugins.instance().instantiate_sweeper(config=plan.config, hydra_context=context, task_function=task)
        try:
            sweeper.sweep(arguments=plan.arguments)
        except HydraException as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:  # optuna's, where no trial has a value
            if "trial" not in str(error).lower():
                raise
        callbacks.on_multirun_end(config=plan.config, config_name="train")


def run_job(config: DictConfig, *, config_dir: str | None, parallel: int, parent: int) -> float | None:
    """One job in a process of its own, wherever Hydra's launcher has put us; its objective, or None where it has none.

    Args:
      config: the job's, unused: the process composes it again, from its overrides.
      parallel: jobs that share this machine's cores. parent: the process of the sweep, which handles signals.
    """
    from hydra.core.hydra_config import HydraConfig

    state = HydraConfig.get()
    overrides, folder = [str(text) for text in state.overrides.task], Path(state.sweep.dir) / str(state.sweep.subdir)
    record = Path(state.sweep.dir) / "jobs" / f"{folder.name}.json"
    log = record.with_suffix(".log")
    job = Job(int(state.job.num), overrides, folder, "running", host=socket.gethostname(), started=time.time())
    if os.getpid() != parent and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep passes it on
    if runs.is_finished(folder):
        save(record, job._replace(status="finished", ended=time.time(), reason="earlier"))
        return objective(folder)
    if (record.parent / STOP).exists():
        save(record, job._replace(status="not started"))
        return None
    if runs.is_run(folder) and not any((folder / "checkpoints").glob("*.ckpt")):
        set_aside(folder)
    command = [sys.executable, "-m", "rlkit", "train", *overrides, f"hydra.run.dir='{folder}'"]
    command += ["--config-dir", config_dir] if config_dir else []
    environment = dict(os.environ)
    if parallel > 1:
        environment |= {name: str(threads(parallel)) for name in THREADS}
    with log.open("ab") as out:
        # A group of its own: what is typed at the terminal reaches the sweep alone, which passes it on once.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        save(record, job := job._replace(pid=process.pid))
        code = process.wait()
    status = "finished" if runs.is_finished(folder) else "interrupted" if code in (130, 143) else "failed"
    save(record, job._replace(status=status, pid=0, ended=time.time(), reason="" if status == "finished" else why(code, log)))
    return objective(folder)


def set_aside(folder: Path) -> None:
    """Moves what an interrupted job left that never reached a checkpoint: it starts anew, and nothing is overwritten."""
    number = 1
    while (target := folder.parent / "set_aside" / f"{folder.name}_{number}").exists():
        number += 1
    target.parent.mkdir(exist_ok=True)
    folder.rename(target)


def objective(folder: Path) -> float | None:
    """What a search maximises: held-out accuracy after training; without an evaluation the mean reward of the last ten steps."""
    after = (runs.read_summary(folder) or {}).get("after")
    if after:
        return float(after["accuracy"])
    rewards = [row["reward/mean"] for row in rows(folder) if row.get("reward/mean") is not None]
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
    batch = int(plan.config.hydra.sweeper.get("n_jobs") or 1) if plan.config.hydra.sweeper._target_ != BASIC else plan.total
    return max(1, min(at_once, batch, plan.total))


def threads(parallel: int) -> int:
    """Threads of each of so many jobs, so that together they have the machine's cores once."""
    return max(1, cores() // parallel)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def why(code: int, log: Path) -> str:
    """The end of a job in a few words: rlkit's own sentence where there is one, else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line.removeprefix("rlkit: ") for line in lines if line.startswith("rlkit: ")]
    said = own[-1] if code in (1, 2) and len(own) > 1 else lines[-1] if lines else "it printed nothing"
    return f"{f'signal {-code}' if code < 0 else f'exit {code}'}: {said[:200]}"


# ------------------------------------------------------------------------------------------------------- signals


@contextlib.contextmanager
def signals_to_jobs(jobs: Path) -> Iterator[list[int]]:
    """SIGINT and SIGTERM go to the running jobs of this machine, which save and end; no further one starts. A third one ends it all."""
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
            os.write(2, f"\nstopping: {len(mine)} running jobs save and end{said}; once more ends them at once\n".encode())
        if len(received) > 2 or (len(received) > 1 and not mine):
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        (jobs / STOP).unlink(missing_ok=True)


def alive(job: Job) -> bool:
    """Whether a job's process runs, here: of one on another machine we know nothing."""
    if job.status != "running" or not job.pid or job.host != socket.gethostname():
        return False
    try:
        return b"rlkit" in Path(f"/proc/{job.pid}/cmdline").read_bytes()  # not another one that got its number
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------ watching


def save(record: Path, job: Job) -> None:
    """Writes what is known of a job."""
    write_json(record, job._asdict() | {"folder": str(job.folder)})


def read_jobs(jobs: Path) -> list[Job]:
    """All jobs that have begun, in order."""
    found = []
    for path in jobs.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            known = json.loads(path.read_text())
            found.append(Job(**known | {"folder": Path(known["folder"])}))
    return sorted(found, key=lambda job: job.number)


@contextlib.contextmanager
def watching(plan: Plan) -> Iterator[None]:
    """One line for each job that ends; on a terminal, below them, one that moves for each that runs."""
    over = threading.Event()
    shown = threading.Thread(target=watch, args=(plan, over), daemon=True)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()


def watch(plan: Plan, over: threading.Event) -> None:
    """Reads the jobs' files until the sweep is over, and prints."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, told = Console(), set()
    varied: list[str] = []
    live = Live(console=console, auto_refresh=False, transient=True) if sys.stdout.isatty() else None
    with live or contextlib.nullcontext():
        while True:
            last = over.is_set()  # looked at before the files, so that the end is seen
            jobs = read_jobs(plan.root / "jobs")
            varied = varied or swept(plan)
            for job in jobs:
                if job.status in ("finished", "failed", "interrupted") and job.number not in told:
                    told.add(job.number)
                    line = end_line(job, plan.total, varied)
                    console.print(line, markup=False, highlight=False, soft_wrap=True) if live else print(line, flush=True)
            if live:
                running = [progress_line(job, plan.total, varied) for job in jobs if job.status == "running"]
                live.update(Text("\n".join(running), no_wrap=True, overflow="ellipsis"), refresh=True)
            if last:
                return
            over.wait(0.5)


def swept(plan: Plan) -> list[str]:
    """The keys of which a sweep names several values."""
    params = [f"{key}={value}" for key, value in (plan.config.hydra.sweeper.get("params") or {}).items()]
    return list(dict.fromkeys(key_of(text) for text in (*params, *plan.arguments) if is_sweep(text)))


def key_of(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def label(job: Job, varied: Sequence[str]) -> str:
    """A job by what sets it apart: `algorithm=grpo seed=1`."""
    return " ".join(text.lstrip("+") for text in job.overrides if not varied or key_of(text) in varied)


def end_line(job: Job, total: int, varied: Sequence[str]) -> str:
    """`3/9  algorithm=grpo seed=1  finished  20 steps  1:04  accuracy 0.412 → 0.970`."""
    words = [f"{job.number + 1:>{len(str(total))}}/{total}", label(job, varied), job.status]
    summary = runs.read_summary(job.folder) or {}
    if job.reason and job.status != "finished":
        words += [job.reason, f"see {job.folder.parent / 'jobs' / job.folder.name}.log"]
    else:
        words.append(f"{summary.get('steps')} steps")
        words.append("done earlier" if job.reason else clock(job.ended - job.started))
        before, after = summary.get("before"), summary.get("after")
        words += [f"accuracy {before['accuracy']:.3f} → {after['accuracy']:.3f}"] if before and after else []
    return "  ".join(words)


def progress_line(job: Job, total: int, varied: Sequence[str]) -> str:
    """`4/9  algorithm=dapo seed=1  step 12/20  reward 0.43  0:31, 0:20 left`."""
    words, taken = [f"{job.number + 1:>{len(str(total))}}/{total}", label(job, varied)], time.time() - job.started
    past = [row for row in rows(job.folder, tail=8192) if row.get("reward/mean") is not None]
    if not past:
        return "  ".join([*words, "starting", clock(taken)])
    step, steps = past[-1]["step"], steps_of(job.folder)
    each = [row["perf/step_s"] for row in past if row.get("perf/step_s")]
    left = f", {clock(statistics.fmean(each) * (steps - step))} left" if each and steps else ""
    return "  ".join([*words, f"step {step}/{steps or '?'}", f"reward {past[-1]['reward/mean']:.2f}", clock(taken) + left])


@functools.cache
def steps_of(folder: Path) -> int:
    """The length of a run."""
    return int((runs.read_config(folder).get("trainer") or {}).get("steps") or 0)


def rows(folder: Path, tail: int = 0) -> list[dict[str, Any]]:
    """The rows of a run's metrics, or those in its last `tail` bytes; half-written ones left out."""
    found = []
    with contextlib.suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
        if tail:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                found += [row] if isinstance(row, dict) else []
    return found


def clock(seconds: float) -> str:
    """1:04, or 2:01:04."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


# ----------------------------------------------------------------------------------------------------- comparing


def table(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One row a job: what it varies, how it ended, held-out accuracy before and after, the last reward, steps, time."""
    settings = [dict(text.lstrip("+").partition("=")[::2] for text in job.overrides) for job in jobs]
    keys = [key for key in dict.fromkeys(k for s in settings for k in s) if len({s.get(key) for s in settings}) > 1 and key != "resume"]
    out = []
    for job, setting in zip(jobs, settings, strict=True):
        summary = runs.read_summary(job.folder) or {}
        rewards = [row["reward/mean"] for row in rows(job.folder) if row.get("reward/mean") is not None]
        before, after = summary.get("before") or {}, summary.get("after") or {}
        out.append(
            {key: setting.get(key, "") for key in keys}
            | {"status": job.status, "before": before.get("accuracy"), "after": after.get("accuracy")}
            | {"reward": statistics.fmean(rewards[-10:]) if rewards else None, "steps": summary.get("steps")}
            | {"seconds": summary.get("wall_seconds"), "folder": str(job.folder)}
        )
    return out


def table_csv(jobs: Sequence[Job]) -> str:
    """The table of all jobs as CSV."""
    lines, out = table(jobs), io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else ["status"])
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def comparison(jobs: Sequence[Job]) -> str:
    """The table for people, best first, and over seeds mean ± standard deviation where there are several."""
    lines = table(jobs)
    if not lines:
        return "no job has begun"
    keys = list(lines[0])[: list(lines[0]).index("status")]

    def score(line: Mapping[str, Any]) -> float | None:
        return line["after"] if line["after"] is not None else line["reward"]

    best_first = sorted(lines, key=lambda line: (score(line) is None, -(score(line) or 0.0)))
    columns = [*keys, "status", "before", "after", "reward", "steps", "seconds"]
    text = aligned(columns, [[cell(line[c]) for c in columns] for line in best_first], left=len(keys) + 1)
    others = [key for key in keys if key != "seed"]
    groups: dict[tuple[str, ...], list[float]] = {}
    for line in best_first:
        value = score(line)
        if value is not None and line["status"] == "finished":
            groups.setdefault(tuple(str(line[key]) for key in others), []).append(value)
    if "seed" in keys and any(len(values) > 1 for values in groups.values()):
        ordered = sorted(groups.items(), key=lambda item: -statistics.fmean(item[1]))
        seeds = [
            [*group, str(len(v)), f"{statistics.fmean(v):.3f}", f"{statistics.stdev(v):.3f}" if len(v) > 1 else "-"] for group, v in ordered
        ]
        text += "\n\n" + aligned([*others, "seeds", "mean after", "std"], seeds, left=len(others))
    return text


def cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def aligned(columns: Sequence[str], lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Columns of text, the first `left` of them flush left, the numbers right."""
    widths = [max(len(text) for text in (column, *(line[i] for line in lines))) for i, column in enumerate(columns)]

    def put(line: Sequence[str]) -> str:
        return "  ".join(t.ljust(w) if i < left else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True))).rstrip()

    return "\n".join([put(columns), "-" * (sum(widths) + 2 * len(widths) - 2), *map(put, lines)])


def report(root: Path, jobs: Sequence[Job]) -> Path | None:
    """One HTML page of all runs of a sweep, where the part that draws it is installed."""
    folders = [job.folder for job in jobs if runs.is_run(job.folder)]
    if not folders or not installed("rlkit.report"):
        return None
    try:
        write_report = importlib.import_module("rlkit.report").write_report
        return Path(write_report(folders, root / "report.html"))
    except (ImportError, AttributeError, Refusal) as error:
        print(f"report           none: {error}")
        return None
