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
    remove_leftovers,
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

# Each gives True if it gets through. CANARY is a readable file outside, PARENT the process id of
# the parent.
ATTACKS = {
    "files": "open(CANARY).read()",
    "writing": "open(CANARY, 'a')",
    # opened neither to read nor to write; Landlock alone does not look at this
    "truncation": "os.open(CANARY, 3 | os.O_TRUNC)",
    "network": "__import__('_socket').socket()",
    "fork": "os.fork() or os._exit(0)",
    "exec": "os.execv('/bin/sh', ['sh', '-c', 'exit']) if os.fork() == 0 else os.wait()",
    "signals": "os.kill(PARENT, 0)",
    "signals by the kernel": "fcntl.fcntl(0, fcntl.F_SETOWN, PARENT)",  # sends none by itself
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
    """The protection between a program and this machine. `open` names the successful attacks of the
    self-test."""

    name: str
    features: tuple[str, ...]
    open: tuple[str, ...]
    reasons: tuple[str, ...] = ()  # why there is no stronger level

    def __str__(self) -> str:
        blocked = ", ".join(f"{name} blocked" for name in ATTACKS if name not in self.open)
        through = f"; NOT blocked: {', '.join(self.open)}" if self.open else ""
        return f"sandbox: {self.name} - {blocked or 'time and memory limits only'}{through}"


@functools.cache
def find_level() -> Level:
    """The strongest level whose self-test passes here; found once a process. The weakest, `basic`,
    has limits of time and memory only.

    Folders left behind by a killed process are removed first.
    Raises: SandboxError if not even `basic` runs.
    """
    remove_leftovers()
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
    """The successful attacks under these features. Raises: SandboxError if the features cannot be
    set, or the test itself fails."""
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
    """The level here. Raises: ConfigError if it is weaker than required without consent, or if a
    number is out of range."""
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
    """The level, if a program has run or the level was asked for; None if no sandbox was needed so
    far."""
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
    """`run` for many programs on a few threads, each with one child at a time; outcomes in the
    order of the jobs.

    If a program's child cannot be set up, a SandboxError stands in place of its outcome, and the
    others run.

    Args:
      features, landlock_abi: as in `run_with`; None: the level's own.
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
