"""Many runs, by `rlkit train -m` and by `rlkit bench`: after any disturbance, the next call gives the rows of an undisturbed matrix."""

from __future__ import annotations

import contextlib
import csv
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 400  # seconds in which what has to happen does, on the slowest machine
UNEQUAL = {"seconds", "processor_s", "folder"}  # columns of time and place
TASK = '''
import os
from pathlib import Path

from rlkit.rewards import listed
from rlkit.types import Task, gives

calls = 0


def vowels(*, split, seed=0, max_samples=64, placebo="none"):
    row = {"right": ["a", "e"], "value": [0.25, 1.0]}
    asked = ({"role": "user", "content": "v"},)
    return [Task(f"vowels/{split}/{i}", asked, "", "listed", "single_turn", row) for i in range(max_samples)]


@gives("binary", "raw")
def watched(rollout):
    """`listed`. Where the test asks for it, the first job stops in its second step, and waits or fails."""
    global calls
    calls += 1
    place = Path(os.environ["DISTURB"])
    if calls == 43:  # 32 of the check of the rows, 8 of the first step
        for what in ("hold", "fail"):
            try:
                (place / what).unlink()
            except FileNotFoundError:
                continue
            if what == "fail":
                raise ValueError("asked to fail")
            (place / "at").write_text(str(os.getpid()))
            os.read(os.open(place / "go", os.O_RDONLY), 2)
    return listed(rollout)
'''
PRESET = """# @package _global_
defaults:
  - /experiment/bench: base
  - override /task: bench
task: {_target_: my_vowels.vowels}
model: {replies: [abcdefgh], steps: 5}
batch: {prompts: 2, group_size: 4}
trainer: {steps: STEPS}
evaluation: {n: 16}
reward: {terms: {task: {fn: {rewards: {listed: {_target_: my_vowels.watched, _partial_: true}}}}}}
"""
COMMANDS = {
    "sweep": ["train", "-m", "experiment=bench/vowels", "algorithm=grpo,rloo", "seed=0", "resume=auto"],
    "bench": ["bench", "algorithms=grpo,rloo", "tasks=vowels", "seeds=1", "placebo=false", "jobs=1", "folder=outputs/sweep"],
}  # fmt: skip
ROWS = {"sweep": "comparison.csv", "bench": "results.csv"}


def furnish(place: Path, steps: int = 3) -> Path:
    """A folder with the task, its preset, and two pipes."""
    preset = place / "conf" / "experiment" / "bench" / "vowels.yaml"
    preset.parent.mkdir(parents=True, exist_ok=True)
    preset.write_text(PRESET.replace("STEPS", str(steps)))
    (place / "my_vowels.py").write_text(TASK)
    for pipe in ("at", "go"):
        if not (place / pipe).exists():
            os.mkfifo(place / pipe)
    return place


def begin(name: str, place: Path) -> subprocess.Popen:
    """Starts the command; it takes Ctrl-C, even where a shell without job control started pytest."""
    command = [sys.executable, "-m", "rlkit", *COMMANDS[name], "--config-dir", "conf"]
    environment = os.environ | {"PYTHONPATH": str(place), "DISTURB": str(place), "OMP_NUM_THREADS": "1"}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=place, env=environment, preexec_fn=heed, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def complete(name: str, place: Path) -> subprocess.CompletedProcess:
    """The command, to its end."""
    process = begin(name, place)
    said = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(name, process.returncode, *said)


def rows(name: str, place: Path) -> list[dict]:
    """What the runs came to, without times."""
    found = csv.DictReader((place / "outputs" / "sweep" / ROWS[name]).read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in UNEQUAL} for row in found]


def gone(pid: int) -> None:
    """Waits until a process has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], 20)
    os.close(handle)
    assert ready, f"process {pid} goes on"


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Command → the rows of a matrix that nothing happened to."""

    @functools.cache
    def run(name: str) -> list[dict]:
        place = furnish(tmp_path_factory.mktemp(name))
        done = complete(name, place)
        assert done.returncode == 0, done.stdout + done.stderr
        return rows(name, place)

    return run


def held(name: str, place: Path) -> tuple[subprocess.Popen, int]:
    """The command, whose first job waits in its second step; and that job's process."""
    (place / "hold").touch()
    process = begin(name, place)
    reader = os.open(place / "at", os.O_RDONLY | os.O_NONBLOCK)
    ready, _, _ = select.select([reader], [], [], LIMIT)
    os.set_blocking(reader, True)
    said = os.read(reader, 100)
    os.close(reader)
    assert ready and said, process.communicate()
    return process, int(said)


def let_go(process: subprocess.Popen, place: Path) -> tuple[str, str]:
    """The waiting job goes on; what the command says until its end."""
    pipe = os.open(place / "go", os.O_RDWR)  # never waits for a reader
    os.write(pipe, b"go")
    try:
        return process.communicate(timeout=LIMIT)
    finally:
        os.close(pipe)


def signalled(number: int):
    def disturb(name: str, place: Path) -> None:
        process, job = held(name, place)
        process.send_signal(number)
        line = "\n"
        while not line.startswith("stopping: 1 running"):
            line = process.stderr.readline()
            assert line, process.communicate()
        said, errors = let_go(process, place)
        assert process.returncode == 128 + number and "interrupted" in said, said + errors
        assert "to go on         rlkit " in said and "Traceback" not in said + errors
        gone(job)

    return disturb


def killed(name: str, place: Path) -> None:
    """SIGKILL of the parent: nothing that it started goes on."""
    process, job = held(name, place)
    all_of_them = descendants(process.pid)
    assert job in all_of_them
    process.kill()
    process.communicate()
    for one in all_of_them:
        gone(one)


def killed_job(name: str, place: Path) -> None:
    process, job = held(name, place)
    os.kill(job, signal.SIGKILL)
    said, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "failed  signal 9: " in said, said + errors
    assert "1 of 2 jobs finished, 1 failed" in said and "Traceback" not in said + errors


def record_of(place: Path) -> Path:
    (record,) = (place / "outputs" / "sweep" / "jobs").glob("*grpo*.json")
    return record


def damaged_record(name: str, place: Path) -> None:
    killed(name, place)
    record_of(place).write_text('{"number": 0')


def reused_pid(name: str, place: Path) -> None:
    """The number of a killed job belongs to this process now."""
    killed(name, place)
    known = json.loads(record_of(place).read_text())
    assert known["status"] == "running"
    known["process"]["pid"] = os.getpid()
    record_of(place).write_text(json.dumps(known))


def second_start(name: str, place: Path) -> None:
    process, _ = held(name, place)
    second = complete(name, place)
    assert second.returncode == 2 and "Traceback" not in second.stderr
    assert f"process {process.pid} on " in second.stderr, second.stderr
    said, errors = let_go(process, place)
    assert process.returncode == 0, said + errors


def changed_setting(name: str, place: Path) -> None:
    """The preset is edited, under its name. A sweep refuses; a bench sets the old runs aside."""
    furnish(place, steps=1)
    assert complete(name, place).returncode == 0
    furnish(place)
    if name == "sweep":
        refused = complete(name, place)
        assert refused.returncode == 2
        assert "trainer.steps was 1 and is now 3" in refused.stderr, refused.stderr
        shutil.rmtree(place / "outputs")
    else:
        damaged = place / "outputs" / "sweep" / ROWS[name]
        damaged.write_text("task,arm\nnothing")


def failing(name: str, place: Path) -> None:
    (place / "fail").touch()
    done = complete(name, place)
    assert done.returncode == 1 and "asked to fail" in done.stdout, done.stdout + done.stderr
    assert "1 of 2 jobs finished, 1 failed" in done.stdout and "Traceback" not in done.stderr


DISTURBANCES = {
    "Ctrl-C": signalled(signal.SIGINT),
    "SIGTERM": signalled(signal.SIGTERM),
    "SIGHUP": signalled(signal.SIGHUP),
    "SIGKILL of the parent": killed,
    "SIGKILL of a job": killed_job,
    "a damaged record": damaged_record,
    "a pid of another program": reused_pid,
    "a second start": second_start,
    "a changed setting": changed_setting,
    "a job that fails": failing,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
def test_the_next_call_ends_with_the_rows_of_an_undisturbed_matrix(name, disturb, undisturbed, tmp_path):
    place = furnish(tmp_path)
    disturb(name, place)
    done = complete(name, place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(name, place) == undisturbed(name)
    assert not list((place / "outputs" / "sweep").glob("owner.json"))
