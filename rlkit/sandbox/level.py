"""Find this machine's isolation level by running hostile programs, and run programs under it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from rlkit.errors import ConfigError
from rlkit.sandbox.process import (
    Job,
    Outcome,
    Sandbox,
    SandboxError,
    check_settings,
    count_workers,
    make_folder,
    run_with,
)

LEVELS = ("basic", "kernel", "kernel+ns")  # weakest first
CHOICES = (
    ("seccomp", "landlock", "namespaces"),
    ("seccomp", "landlock"),
    ("seccomp",),
    ("landlock",),
    (),
)  # strongest first

# Each expression is an attack. CANARY is a readable file outside, PARENT the parent's pid.
ATTACKS = {
    "files": "open(CANARY).read()",
    "writing": "open(CANARY, 'a')",
    # opened neither for reading nor for writing, which Landlock alone does not check
    "truncation": "os.open(CANARY, 3 | os.O_TRUNC)",
    "network": "__import__('_socket').socket()",
    "fork": "os.fork() or os._exit(0)",
    "exec": "os.execv('/bin/sh', ['sh', '-c', 'exit']) if os.fork() == 0 else os.wait()",
    "signals": "os.kill(PARENT, 0)",
    "signals by the kernel": "fcntl.fcntl(0, fcntl.F_SETOWN, PARENT)",  # sends no signal by itself
    "parent": "open(f'/proc/{PARENT}/environ', 'rb').read()",
}
SELF_TEST = """
import os, fcntl
def attempt(text):
    try:
        eval(text)
    except OSError:
        return False
    return True
"""


class Level(NamedTuple):
    """The level of protection between a program and this machine. `open` names the attacks of the
    self-test that succeeded."""

    name: str
    features: tuple[str, ...]
    open: tuple[str, ...]
    reasons: tuple[str, ...] = ()  # reasons why no stronger level is used

    def __str__(self) -> str:
        blocked = ", ".join(f"{name} blocked" for name in ATTACKS if name not in self.open)
        through = f"; NOT blocked: {', '.join(self.open)}" if self.open else ""
        return f"sandbox: {self.name} - {blocked or 'time and memory limits only'}{through}"


@functools.cache
def find_level() -> Level:
    """Find the strongest level whose self-test passes on this machine. It is found once in each
    process. The weakest level, `basic`, limits time and memory only.

    Raises: SandboxError if not even `basic` runs.
    """
    reasons = []
    for features in CHOICES if sys.platform.startswith("linux") else ((),):
        try:
            open_ = self_test(features)
        except SandboxError as error:
            if not features:
                raise
            reasons.append(f"{'+'.join(features)}: {error}")
            continue
        if open_ and {"seccomp", "landlock"} <= set(features):
            reasons.append(
                f"{'+'.join(features)}: the self-test got through with {', '.join(open_)}"
            )
            continue
        name = "kernel+ns" if "namespaces" in features else "kernel"
        if not {"seccomp", "landlock"} <= set(features):
            name = "basic"
        return Level(name, features, open_, tuple(reasons))
    raise SandboxError("no level of the sandbox runs here: " + "; ".join(reasons))


def self_test(features: Sequence[str]) -> tuple[str, ...]:
    """Run all attacks under these features, and return the names of the successful ones. Raises:
    SandboxError if the features cannot be set, or if the test itself fails."""
    with make_folder() as outside:
        canary = Path(outside, "canary")
        canary.write_text("readable by all")
        code = f"CANARY, PARENT = {str(canary)!r}, {os.getpid()}\n{SELF_TEST}"
        outcome = run_with(
            Job(code, tuple(f"attempt({text!r})" for text in ATTACKS.values())),
            Sandbox(time_limit=20.0),
            features,
        )
    if outcome.status != "ok" or any(result.error for result in outcome.results):
        raise SandboxError(f"the self-test ended with {outcome.status} {outcome.error}")
    return tuple(
        name
        for name, result in zip(ATTACKS, outcome.results, strict=True)
        if result.value is not False
    )


def require(sandbox: Sandbox) -> Level:
    """Return the level of this machine. Raises: ConfigError if a number of the settings is out of
    range, or if the level is weaker than `min_level` and the user has not set `allow_weak`."""
    check_settings(sandbox)
    if sandbox.min_level not in LEVELS:
        raise ConfigError(
            f"sandbox.min_level is {sandbox.min_level!r}; it must be one of {', '.join(LEVELS)}"
        )
    level = find_level()
    if LEVELS.index(level.name) < LEVELS.index(sandbox.min_level) and not sandbox.allow_weak:
        raise ConfigError(
            f"sandbox.min_level is {sandbox.min_level}, but this machine gives {level.name}"
            f" ({'; '.join(level.reasons) or sys.platform}). Run where the kernel has Landlock and"
            " seccomp (Linux 5.13 or newer), or consent with sandbox.allow_weak=true:"
            " model-written code could then read files, use the network and start processes"
        )
    return level


def get_known_level() -> Level | None:
    """Return the level if this process has found it already, otherwise None."""
    return find_level() if find_level.cache_info().currsize else None


def run(job: Job, sandbox: Sandbox | None = None) -> Outcome:
    """Run one untrusted program, at least as isolated as `sandbox.min_level`.

    Raises: ConfigError, see `require`; SandboxError if the limits cannot be set. Nothing a program
    does raises an error.
    """
    sandbox = sandbox or Sandbox()
    return run_with(job, sandbox, require(sandbox).features)


def run_many(
    jobs: Sequence[Job],
    sandbox: Sandbox | None = None,
    features: Sequence[str] | None = None,
    landlock_abi: int | None = None,
) -> list[Outcome | SandboxError]:
    """Run many programs as `run` does, on a few threads, each with one child at a time. The
    outcomes are in the order of the jobs.

    If the child of a program cannot be set up, its outcome is a SandboxError, and the other
    programs still run.

    Args:
      features, landlock_abi: as in `run_with`; None takes those of the level.
    Raises: ConfigError, see `require`.
    """
    if not jobs:
        return []
    sandbox = sandbox or Sandbox()
    used = require(sandbox).features if features is None else features

    def outcome(job: Job) -> Outcome | SandboxError:
        try:
            return run_with(job, sandbox, used, landlock_abi)
        except SandboxError as error:
            return error

    with ThreadPoolExecutor(min(count_workers(sandbox), len(jobs))) as pool:
        return list(pool.map(outcome, jobs))
