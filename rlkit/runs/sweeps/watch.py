"""One line for each job that ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from rlkit.runs import folder as runs
from rlkit.runs.sweeps.jobs import RunJob, read_jobs
from rlkit.runs.sweeps.plan import Plan, is_sweep
from rlkit.system.output import clock


@contextlib.contextmanager
def watching(plan: Plan) -> Iterator[None]:
    """One line for each job that ends."""
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
    told: set[int] = set()
    varied: list[str] = []
    while True:
        last = over.is_set()  # looked at before the files, so that the end is seen
        varied = varied or swept(plan)
        for job in read_jobs(plan.root / "jobs"):
            if job.status in ("finished", "failed", "interrupted") and job.number not in told:
                told.add(job.number)
                print(end_line(job, plan.total, varied), flush=True)
        if last:
            return
        over.wait(0.5)


def swept(plan: Plan) -> list[str]:
    """The keys of which a sweep names several values."""
    params = [f"{key}={value}" for key, value in (plan.config.hydra.sweeper.get("params") or {}).items()]
    return list(dict.fromkeys(key_of(text) for text in (*params, *plan.arguments) if is_sweep(text)))


def key_of(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def label(job: RunJob, varied: Sequence[str]) -> str:
    """A job by what sets it apart: `algorithm=grpo seed=1`."""
    return " ".join(text.lstrip("+") for text in job.overrides if not varied or key_of(text) in varied)


def end_line(job: RunJob, total: int, varied: Sequence[str]) -> str:
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
