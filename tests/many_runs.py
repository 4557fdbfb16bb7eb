"""Many runs in one folder, and what may disturb them: shared by the tests of each command of many
runs. After any disturbance, the next call gives the rows of an undisturbed matrix."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from copies import LIMIT, Piped, begin_sweep, heed
from rlkit.commands.cli import main
from rlkit.system import owner

UNEQUAL = {"seconds", "processor_s", "folder"}  # columns of time and place
TASK = '''
import os
from pathlib import Path

from rlkit.types import Task, gives

calls = 0


def vowels(*, split, seed=0, max_samples=64, placebo="none"):
    row = {"right": ["a", "e"], "value": [0.25, 1.0]}
    asked = ({"role": "user", "content": "v"},)
    names = [f"vowels/{split}/{i}" for i in range(max_samples)]
    return [Task(name, asked, "", "listed", "single_turn", row) for name in names]


@gives("binary", "raw")
def watched(rollout):
    """1 for a reply with a or e. If the test asks for it, the first job stops in its second step,
    and waits or fails."""
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
    return float(any(letter in rollout.final_content for letter in "ae"))
'''


class Command(NamedTuple):
    """A command of many runs, two of them, in the folder outputs/sweep."""

    words: list[str]
    rows: str  # the file of its rows
    options: Mapping[str, str]  # file below conf/ → its text, STEPS where the number of steps is
    refuses: bool  # runs of other settings; else it sets them aside
    fork: Callable[..., int] | None = None  # the fixture `forked`; else all processes are new


def furnish(command: Command, place: Path, steps: int = 3) -> Path:
    """A folder with the task, the command's options, and two pipes."""
    for name, text in command.options.items():
        option = place / "conf" / name
        option.parent.mkdir(parents=True, exist_ok=True)
        option.write_text(text.replace("STEPS", str(steps)))
    (place / "my_vowels.py").write_text(TASK)
    for pipe in ("at", "go"):
        if not (place / pipe).exists():
            os.mkfifo(place / pipe)
    return place


def begin(command: Command, place: Path) -> subprocess.Popen | Piped:
    """Starts the command."""
    words = [*command.words, "--config-dir", "conf"]
    own = {"PYTHONPATH": str(place), "DISTURB": str(place), "OMP_NUM_THREADS": "1"}
    if command.fork:
        return begin_sweep(command.fork, words, place, own)
    return subprocess.Popen(
        [sys.executable, "-m", "rlkit", *words],
        cwd=place,
        env=os.environ | own,
        preexec_fn=heed,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def complete(command: Command, place: Path) -> subprocess.CompletedProcess:
    """The command, to its end."""
    process = begin(command, place)
    said = process.communicate(timeout=LIMIT)
    return subprocess.CompletedProcess(command.words, process.returncode, *said)


def rows(command: Command, place: Path) -> list[dict]:
    """What the runs came to, without times."""
    found = csv.DictReader((place / "outputs" / "sweep" / command.rows).read_text().splitlines())
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


def held(command: Command, place: Path) -> tuple[subprocess.Popen, int]:
    """The command, whose first job waits in its second step; and that job's process."""
    (place / "hold").touch()
    process = begin(command, place)
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
    def disturb(command: Command, place: Path) -> None:
        process, job = held(command, place)
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


def killed(command: Command, place: Path) -> None:
    """SIGKILL of the parent: nothing that it started goes on."""
    process, job = held(command, place)
    all_of_them = descendants(process.pid)
    assert job in all_of_them
    process.kill()
    process.communicate()
    for one in all_of_them:
        gone(one)


def killed_job(command: Command, place: Path) -> None:
    process, job = held(command, place)
    os.kill(job, signal.SIGKILL)
    said, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and "failed  signal 9: " in said, said + errors
    assert "1 of 2 jobs finished, 1 failed" in said and "Traceback" not in said + errors


def record_of(place: Path) -> Path:
    (record,) = (place / "outputs" / "sweep" / "jobs").glob("*grpo*.json")
    return record


def damaged_record(command: Command, place: Path) -> None:
    killed(command, place)
    record_of(place).write_text('{"number": 0')


def reused_pid(command: Command, place: Path) -> None:
    """The number of a killed job belongs to this process now."""
    killed(command, place)
    known = json.loads(record_of(place).read_text())
    assert known["status"] == "running"
    known["process"]["pid"] = os.getpid()
    record_of(place).write_text(json.dumps(known))


def second_start(command: Command, place: Path) -> None:
    process, _ = held(command, place)
    second = complete(command, place)
    assert second.returncode == 2 and "Traceback" not in second.stderr
    assert f"process {process.pid} on " in second.stderr, second.stderr
    said, errors = let_go(process, place)
    assert process.returncode == 0, said + errors


def changed_setting(command: Command, place: Path) -> None:
    """The preset is edited, under its name. A sweep refuses; a bench sets the old runs aside."""
    furnish(command, place, steps=1)
    assert complete(command, place).returncode == 0
    furnish(command, place)
    if command.refuses:
        refused = complete(command, place)
        assert refused.returncode == 2
        assert "trainer.steps was 1 and is now 3" in refused.stderr, refused.stderr
        shutil.rmtree(place / "outputs")
    else:
        damaged = place / "outputs" / "sweep" / command.rows
        damaged.write_text("task,arm\nnothing")


def failing(command: Command, place: Path) -> None:
    (place / "fail").touch()
    done = complete(command, place)
    assert done.returncode == 1 and "asked to fail" in done.stdout, done.stdout + done.stderr
    assert "1 of 2 jobs finished, 1 failed" in done.stdout and "Traceback" not in done.stderr


# All commands of many runs share rlkit.runs.sweeps.runner. So a disturbance that only this meets is
# tried with one of them; with both, where a command has code of its own for it.
DISTURBANCES = {  # name → (what happens, the commands that meet it)
    "Ctrl-C": (signalled(signal.SIGINT), "bench"),
    "SIGTERM": (signalled(signal.SIGTERM), "train"),
    "SIGHUP": (signalled(signal.SIGHUP), "train"),
    "SIGKILL of the parent": (killed, "train bench"),
    "SIGKILL of a job": (killed_job, "train bench"),
    "a damaged record": (damaged_record, "train"),
    "a pid of another program": (reused_pid, "bench"),
    "a second start": (second_start, "train"),
    "a changed setting": (changed_setting, "train bench"),
    "a job that fails": (failing, "bench"),
}


def disturbances(command: Command) -> list[Any]:
    """What this command meets, for pytest.mark.parametrize."""
    return [
        pytest.param(disturb, id=name)
        for name, (disturb, commands) in DISTURBANCES.items()
        if command.words[0] in commands.split()
    ]


def check_the_next_call(command: Command, disturb, expected: list[dict], place: Path) -> None:
    """The law: after a disturbance, the same command ends with the expected rows."""
    furnish(command, place)
    disturb(command, place)
    done = complete(command, place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(command, place) == expected
    assert not list((place / "outputs" / "sweep").glob("owner.json"))


def undisturbed_rows(command: Command, place: Path) -> list[dict]:
    """The rows of a matrix that nothing happened to."""
    done = complete(command, furnish(command, place))
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(command, place)


class Ended:
    """A job's process that has ended."""

    def __init__(self, status: int = 0):
        self.pid = 2**22 + 1  # more than there are
        self.status = status

    def wait(self, timeout: float | None = None) -> int:
        return self.status

    def send_signal(self, sig: int) -> None: ...


def check_a_second_start(words: list[str], place: Path, monkeypatch, capsys) -> None:
    """It is refused in one sentence, while another process owns the folder."""
    monkeypatch.chdir(place)
    root = place / "outputs" / "sweep"
    root.mkdir(parents=True)
    living = {
        **owner.identify_process(),
        "pid": os.getppid(),
        "started": owner.find_start_time(os.getppid()),
        "token": "other",
    }
    (root / "owner.json").write_text(json.dumps(living))
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        len(said) == 1 and f"process {os.getppid()} on " in said[0] and "takeover=true" in said[0]
    )
    assert [path.name for path in root.iterdir()] == ["owner.json"]
