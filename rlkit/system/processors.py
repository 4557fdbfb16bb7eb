"""Cores that this process may use, and how many threads a model is computed with on them."""

from __future__ import annotations

import math
import os
from pathlib import Path

# The default run of 0.9 million parameters is as fast with one thread as with two, and beside busy
# processes much faster; at 4.5 million two threads are 1.4 to 1.8 times as fast (experiments/benchmarks).
PARAMETERS_PER_THREAD = 2_000_000
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> int:
    """Cores that this process may use: its affinity, and the processor time that its container may take, rounded up; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([allowed, *(quota(folder) for folder in groups())])))


def groups() -> list[Path]:
    """The folders of the control groups that this process is in, the innermost first: version 2's, then version 1's."""
    try:
        lines = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
    except OSError:  # no control groups here
        return []
    found = []
    for _, controllers, path in lines:
        if controllers in ("", "cpu", "cpu,cpuacct", "cpuacct,cpu"):
            root = CGROUP / "cpu" if controllers else CGROUP
            inner = root / path.lstrip("/")
            found += [inner, *(parent for parent in inner.parents if parent.is_relative_to(root))]
    return found


def quota(folder: Path) -> float:
    """Cores' worth of processor time that a control group may take, in either version's files; inf where it has no limit."""
    try:
        if (folder / "cpu.max").exists():
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(limit) / float(period) if float(limit) > 0 else math.inf
    except (OSError, ValueError):  # no such files, or "max": no limit
        return math.inf


def threads_for(parameters: int, available: int) -> int:
    """Threads to compute a model of so many parameters with on so many cores.

    A function of the model and the machine alone, never of the load of the moment: sums in another
    order round differently, so another number of threads gives other weights.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")  # the user's, or a sweep's with several jobs at once
    limit = min(available, int(asked)) if asked.isdecimal() and int(asked) else available
    return max(1, min(limit, parameters // PARAMETERS_PER_THREAD))


def wait_without_spinning() -> None:
    """Have OpenMP's threads sleep between operations instead of spinning. Acts only before torch is imported.

    A spinning thread takes a core from whoever wants it, and small operations end every few microseconds.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
