"""What is known of the jobs of a sweep: a file of each, and the metrics in its run folder."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path
from typing import NamedTuple

from rlkit.system.files import write_json

STOP = "stop"  # jobs/stop: no further job starts


class RunJob(NamedTuple):
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


def save(record: Path, job: RunJob) -> None:
    """Writes what is known of a job."""
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
    """Whether a job's process runs, here: of one on another machine we know nothing."""
    if job.status != "running" or not job.pid or job.host != socket.gethostname():
        return False
    try:
        return b"rlkit" in Path(f"/proc/{job.pid}/cmdline").read_bytes()  # not another one that got its number
    except OSError:
        return False
