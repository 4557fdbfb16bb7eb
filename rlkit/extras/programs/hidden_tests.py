"""Run a task's own hidden tests on the folder that a program leaves: `tests/test.sh` in Harbor's
format."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rlkit.extras.programs._commands import SYSTEM
from rlkit.extras.programs._confinement import Root
from rlkit.extras.programs._processes import (
    GUARD,
    Limits,
    make_job,
    make_variables,
    run_guarded,
)
from rlkit.extras.programs._verifier import LONGEST_NUMBER, Verifier, check_range, keep_plain_files
from rlkit.sandbox.process import make_folder
from rlkit.system.deadline import Countdown, DeadlinePassed
from rlkit.system.plain_files import read_plain_file
from rlkit.types import Task

LONGEST_REPORT = 1 << 16  # largest size of reward.json, in bytes


class HiddenTests(NamedTuple):
    """Describe a task's own tests and its limits (`rlkit.extras.programs.harbor`)."""

    folder: str  # folder of the task
    time_limit: float | None  # seconds for the program
    tests_time_limit: float  # seconds for tests/test.sh
    memory_mb: int | None


def find_hidden_tests(task: Task) -> HiddenTests | None:
    """Return the hidden tests of a task; None if it has none."""
    own = task.metadata.get("harbor")
    return None if own is None else HiddenTests(**own)


def take_least(limit: Any, other: Any) -> Any:
    """Return the smaller of two limits. None means no limit."""
    return min((value for value in (limit, other) if value is not None), default=None)


def check_hidden(task: Task, readable: Sequence[str] | None, judged: bool) -> str:
    """Say why a task's hidden tests cannot run, or why they would not stay hidden; "" if all is
    well.

    Args:
      readable: paths that the program may read; None if it is not confined.
      judged: whether the config itself sets a judge.
    """
    tests = find_hidden_tests(task)
    if tests is None:
        return ""
    if judged:
        return (
            "its own tests give the reward; leave out environment.verify and environment.score, or"
            " choose another task"
        )
    if readable is None:
        return (
            "the program could read its hidden tests; set environment.confined=true and a command"
        )
    place = os.path.realpath(tests.folder)
    for path in map(os.path.realpath, readable):
        if os.path.commonpath((path, place)) in (path, place):
            return (
                f"the program could read its hidden tests in {path}; keep them apart from the"
                " folders that it reads"
            )
    problem = explain_no_tree()
    return problem and (
        f"its tests need /tests and /logs of their own, and this machine gives no file tree for"
        f" them ({problem}); allow user namespaces"
    )


@functools.cache
def explain_no_tree() -> str:
    """Say why this machine cannot give a command a separate file tree; "" if it can."""
    with make_folder() as where:
        limits = Limits(0, None, SYSTEM, root=Root(where, {}, {}))
        command = [sys.executable, "-I", "-S", "-B", str(GUARD)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd="/", env={}, stdin=pipe, stderr=pipe) as guard:
            assert guard.stdin is not None and guard.stderr is not None
            guard.stdin.write(make_job(["true"], "", limits))
            guard.stdin.flush()  # flushed and not closed, because closing it would end the command
            said = guard.stderr.read().decode(errors="replace")
    first, _, status = said.strip().rpartition("exit ")
    return "" if status == "0" else first.strip() or said.strip()


async def run_tests(verifier: Verifier, tests: HiddenTests, left_in: str) -> float | str:
    """Compute the reward of an episode with its task's tests. If there is no reward, return a
    sentence that says why.

    Every process of the episode must be dead. `bash /tests/test.sh` runs in the program's folder,
    which is first reduced to plain files. The command is confined and has no network. /tests is the
    task's folder tests/, and /logs is empty at the start. When all processes of the tests are dead,
    the reward is read: "reward" in /logs/verifier/reward.json, or else the text of reward.txt.
    Python imports from /tests and not from the program's folder.
    """
    try:
        keep_plain_files(left_in)
    except (OSError, RecursionError) as error:
        return f"what the program left cannot be tested: {error}"
    limit = min(verifier.time_limit, tests.tests_time_limit)
    with make_folder() as where:
        for name in ("root", "logs/verifier", "logs/home"):
            os.makedirs(os.path.join(where, name))
        logs = os.path.join(where, "logs")
        root = Root(
            os.path.join(where, "root"),
            {"tests": os.path.join(tests.folder, "tests")},
            {"logs": logs},
        )
        variables = make_variables("/logs/home", "")
        variables |= {
            "PYTHONPATH": "/tests",
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        limits = verifier.limits._replace(
            memory_mb=take_least(verifier.limits.memory_mb, tests.memory_mb), root=root
        )
        left: list[bool] = []
        try:
            async with Countdown(limit).running():
                done = await run_guarded(
                    ["bash", "/tests/test.sh"], left_in, variables, "", limits, left=left
                )
        except DeadlinePassed:
            return f"tests/test.sh ran for more than {limit} s"
        if done.flooded:
            return f"tests/test.sh printed more than {limits.output >> 20} MiB"
        if left != [False]:
            return "tests/test.sh ended its guard"
        try:
            number = read_reward(os.path.join(logs, "verifier"))
        except (OSError, ValueError, RecursionError, OverflowError) as error:
            printed = (done.complained or done.printed)[-500:]
            return f"tests/test.sh left no reward ({error}); its last output: {printed}"
        return check_range(number, verifier.least, verifier.most)


def read_reward(place: str) -> float:
    """Read the reward in /logs/verifier. Raises: OSError or ValueError if there is none."""
    held = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(FileNotFoundError):
            report = json.loads(read_plain_file("reward.json", most=LONGEST_REPORT, folder=held))
            number = report.get("reward") if isinstance(report, dict) else None
            if isinstance(number, int | float) and not isinstance(number, bool):
                return float(number)
        return float(read_plain_file("reward.txt", most=LONGEST_NUMBER, folder=held))
    finally:
        os.close(held)
