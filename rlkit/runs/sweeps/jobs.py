"""The jobs of a sweep as their files tell: <sweep>/jobs/NAME.json of a job, and the summary and metrics in its run folder."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
from pathlib import Path
from typing import NamedTuple

from rlkit.runs import folder as runs
from rlkit.system import owner
from rlkit.system.files import write_json
from rlkit.system.rows import read_rows

STOP = "stop"  # jobs/stop: no further job starts


class RunJob(NamedTuple):
    """A job as its file tells."""

    number: int
    overrides: list[str]
    folder: Path
    status: str  # running, finished, failed, interrupted, not started
    pid: int = 0
    host: str = ""
    seconds: float = 0.0
    reason: str = ""  # why it did not finish; "earlier" where a sweep before did the job


def save(record: Path, job: RunJob) -> None:
    """Write what is known of a job."""
    write_json(record, job._asdict() | {"folder": str(job.folder)})


def read_jobs(jobs: Path) -> list[RunJob]:
    """All jobs that have begun, in order."""
    found = []
    for path in jobs.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            known = json.loads(path.read_text())
            found.append(RunJob(**known | {"folder": Path(known["folder"])}))
    return sorted(found, key=lambda job: job.number)


def alive(job: RunJob) -> bool:
    """Whether a job's process runs on this machine. Nothing is known of a process on another one."""
    return job.status == "running" and job.pid > 0 and job.host == socket.gethostname() and owner.started(job.pid) is not None


def last_reward(folder: Path) -> float | None:
    """The mean training reward of the last ten steps; None without a step."""
    rewards = [row["reward/mean"] for row in read_rows(folder / "metrics.jsonl") if row.get("reward/mean") is not None]
    return statistics.fmean(rewards[-10:]) if rewards else None


def objective(folder: Path) -> float | None:
    """What a search maximises: the last validation accuracy, never a test figure; without one the mean reward of the last ten steps."""
    if last := (runs.read_summary(folder) or {}).get("validation"):
        return float(last["accuracy"])
    return last_reward(folder) if runs.is_finished(folder) else None


def label(overrides: list[str], varied: list[str]) -> str:
    """The overrides that set a job apart: `algorithm=grpo seed=1`."""
    plain = [text.lstrip("+") for text in overrides]
    return " ".join(text for text in plain if not varied or text.partition("=")[0] in varied)
