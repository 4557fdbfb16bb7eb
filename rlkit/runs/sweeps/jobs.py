"""Read the jobs of a sweep from their files: a job's file <sweep>/jobs/NAME.json, and the summary
and metrics in the job's run folder."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlkit.runs import folder as runs
from rlkit.system import owner
from rlkit.system.files import write_json
from rlkit.system.rows import read_rows

EARLIER = "earlier"  # reason for not running a job: an earlier sweep has finished it


class RunJob(NamedTuple):
    """Hold a job, as recorded in the job's file."""

    number: int
    overrides: list[str]
    folder: Path
    status: str = "waiting"  # later running; finished, failed, interrupted or not started
    process: Mapping[str, Any] = {}  # while the job runs, from `owner.describe_process`
    seconds: float = 0.0
    reason: str = ""  # why the job did not finish; EARLIER if an earlier sweep has finished it


def record_path(root: Path, folder: Path) -> Path:
    """Return the path of a job's file, from the name of its run folder below the sweep's folder."""
    return root / "jobs" / f"{'.'.join(folder.relative_to(root).parts)}.json"


def save(record: Path, job: RunJob) -> RunJob:
    """Write the state of a job to the job's file, and return the job. Secrets in its overrides are
    left out."""
    known = job._asdict()
    known["folder"] = str(job.folder)
    known["overrides"] = runs.redact_node(list(job.overrides))
    write_json(record, known)
    return job


def read_jobs(jobs: Path) -> list[RunJob]:
    """Read all jobs begun so far, in order. An unreadable file is skipped."""
    found = []
    for path in jobs.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            known = json.loads(path.read_text())
            job = RunJob(**known | {"folder": Path(known["folder"])})
            if all(isinstance(job._asdict()[key], kind) for key, kind in TYPES.items()):
                found.append(job)
    return sorted(found, key=lambda job: job.number)


TYPES = {"number": int, "overrides": list, "status": str, "process": dict, "seconds": int | float}


def is_alive(job: RunJob) -> bool:
    """Return whether a job's process runs on this machine. The result is False for a
    process on another machine, because its state is unknown here."""
    named = isinstance(job.process.get("pid"), int) and job.process["pid"] > 0
    return job.status == "running" and named and owner.runs_here(job.process)


def read_last_reward(folder: Path) -> float | None:
    """Average the training reward over the last ten steps; None without a step."""
    rewards = [
        row["reward/mean"]
        for row in read_rows(folder / "metrics.jsonl")
        if row.get("reward/mean") is not None
    ]
    return statistics.fmean(rewards[-10:]) if rewards else None


def read_objective(folder: Path) -> float | None:
    """Read the objective of a search: the last validation accuracy, never a test result. Without
    validation, the objective is the mean training reward of the last ten steps."""
    last = (runs.read_summary(folder) or {}).get("validation")
    if last:
        return float(last["accuracy"])
    return read_last_reward(folder) if runs.is_finished(folder) else None


def label_job(overrides: list[str], varied: list[str]) -> str:
    """Label a job by the overrides that distinguish it, for example `algorithm=grpo seed=1`."""
    plain = [text.lstrip("+") for text in overrides]
    return " ".join(text for text in plain if not varied or text.partition("=")[0] in varied)
