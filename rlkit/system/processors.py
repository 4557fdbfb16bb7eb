"""Find the cores and memory available to this process, and choose the number of threads for a
model."""

from __future__ import annotations

import math
import os
from pathlib import Path

# The default run of 0.9 million parameters is as fast with one thread as with two, and beside busy
# processes much faster; at 4.5 million two threads are 1.4 to 1.8 times as fast
# (experiments/benchmarks).
PARAMETERS_PER_THREAD = 2_000_000
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def count_cores() -> int:
    """Count the cores available to this process: the cores of its affinity, or its container's
    share of processor time, rounded up, if this is less. At least 1."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, math.ceil(min([allowed, *map(quota, list_control_groups())])))


def list_control_groups() -> list[Path]:
    """List the folders of this process's control groups (version 2), the innermost first."""
    try:
        inner = next(
            CGROUP / line[3:].lstrip("/")
            for line in MEMBERSHIP.read_text().splitlines()
            if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return []
    return [inner, *(parent for parent in inner.parents if parent.is_relative_to(CGROUP))]


def quota(folder: Path) -> float:
    """Return the processor time of a control group, in cores; inf without a limit."""
    try:
        limit, period = (folder / "cpu.max").read_text().split()
        return float(limit) / float(period)
    except (OSError, ValueError):  # no file, or "max": no limit
        return math.inf


def machine_memory() -> int:
    """Return the bytes of memory this process may ever use: the machine's memory, or a control
    group's limit if smaller. It does not depend on the memory free at the moment."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(min([machine, *map(memory_limit, list_control_groups())]))


def memory_limit(folder: Path) -> float:
    """Return the memory limit of a control group in bytes; inf without a limit."""
    try:
        return float((folder / "memory.max").read_text())
    except (OSError, ValueError):  # no file, or "max": no limit
        return math.inf


def choose_threads(parameters: int, available: int) -> int:
    """Choose the number of threads for a model of `parameters` parameters on `available` cores.

    The number depends only on the model and the machine, never on how busy the machine is. With
    another number of threads, sums are added in another order and round differently, so the trained
    weights would differ.
    """
    # set by the user, or by a sweep with several jobs at once
    asked = os.environ.get("OMP_NUM_THREADS", "")
    limit = min(available, int(asked)) if asked.isdecimal() and int(asked) else available
    return max(1, min(limit, parameters // PARAMETERS_PER_THREAD))


def wait_without_spinning() -> None:
    """Have OpenMP's threads sleep between operations instead of spinning. Call this before torch is
    imported; later it has no effect.

    A spinning thread keeps a core from other processes, and small operations end every few
    microseconds.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
