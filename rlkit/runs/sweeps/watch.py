"""One line for each job that ends and, on a terminal, for each that runs."""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlkit.errors import DataError
from rlkit.runs import folder as runs
from rlkit.runs.sweeps.jobs import Job, read_jobs
from rlkit.runs.sweeps.plan import Plan, is_sweep
from rlkit.system.output import clock
from rlkit.system.rows import read_rows


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
    """`3/9  algorithm=grpo seed=1  finished  20 steps  1:04  test accuracy 0.412 → 0.970`."""
    words = [f"{job.number + 1:>{len(str(total))}}/{total}", label(job, varied), job.status]
    summary = runs.read_summary(job.folder) or {}
    if job.reason and job.status != "finished":
        words += [job.reason, f"see {job.folder.parent / 'jobs' / job.folder.name}.log"]
    else:
        words.append(f"{summary.get('steps')} steps")
        words.append("done earlier" if job.reason else clock(job.ended - job.started))
        before, after = summary.get("before"), summary.get("after")
        words += [f"test accuracy {before['accuracy']:.3f} → {after['accuracy']:.3f}"] if before and after else []
    return "  ".join(words)


def progress_line(job: Job, total: int, varied: Sequence[str]) -> str:
    """`4/9  algorithm=dapo seed=1  step 12/20  reward 0.43  0:31, 0:20 left`."""
    words, taken = [f"{job.number + 1:>{len(str(total))}}/{total}", label(job, varied)], time.time() - job.started
    past = [row for row in read_rows(job.folder / "metrics.jsonl") if row.get("reward/mean") is not None]
    if not past:
        return "  ".join([*words, "starting", clock(taken)])
    step, steps = past[-1]["step"], steps_of(job.folder)
    each = [row["perf/step_s"] for row in past if row.get("perf/step_s")]
    left = f", {clock(statistics.fmean(each) * (steps - step))} left" if each and steps else ""
    return "  ".join([*words, f"step {step}/{steps or '?'}", f"reward {past[-1]['reward/mean']:.2f}", clock(taken) + left])


@functools.cache
def steps_of(folder: Path) -> int:
    """The length of a run."""
    with contextlib.suppress(DataError, AttributeError, TypeError, ValueError):  # not written yet, or damaged: no time left is shown
        return int((runs.read_config(folder).get("trainer") or {}).get("steps") or 0)
    return 0
