"""A run folder has one owner: a second process is refused while it lives, a dead one locks nobody
out, and one that is taken over stops."""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.config.changes import find_differences
from rlkit.runs import folder as runs
from rlkit.runs.sweeps.plan import folder_problems
from rlkit.system import owner
from rlkit.system.owner import (
    Occupied,
    TakenOver,
    check_owner,
    explain_loss,
    find_occupant,
    identify_process,
    own_folder,
    release,
)

SMALL = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "task.max_samples=32",
    "evaluation.n=0",
    "logger=none",
    "model.lora.rank=1",
    "generation.max_new_tokens=32",
]
KEYS = ("host", "pid", "place", "started", "beat", "slurm")


@pytest.fixture
def other():
    """A living process that is not this one: its record."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield {
        **identify_process(),
        "pid": process.pid,
        "started": owner.find_start_time(process.pid),
        "token": "other",
    }
    process.stdin.close()
    process.wait()


def dead() -> dict:
    """The record of a process of this machine that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    record = {
        **identify_process(),
        "pid": process.pid,
        "started": owner.find_start_time(process.pid) or "1",
        "token": "dead",
    }
    process.wait()
    return record


def write(folder: Path, record) -> None:
    (folder / "owner.json").write_text(json.dumps(record))


def read(folder: Path) -> dict:
    return json.loads((folder / "owner.json").read_text())


# -------------------------------------------------------------------------------------- who owns it


def test_the_owner_is_named_while_it_works_and_leaves_nothing(tmp_path):
    with own_folder(tmp_path / "new" / "run"):
        found = read(tmp_path / "new" / "run")
        assert {key: found[key] for key in KEYS if key != "beat"} == {
            key: identify_process()[key] for key in KEYS if key != "beat"
        }
        assert found["pid"] == os.getpid() and abs(found["beat"] - time.time()) < 60
        check_owner(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == [] and owner.HELD == {}


def test_a_living_owner_is_named_with_the_way_to_take_over(tmp_path, other):
    write(tmp_path, other)
    for refused in (
        lambda: own_folder(tmp_path).__enter__(),
        lambda: (_ for _ in ()).throw(Occupied(find_occupant(tmp_path))),
    ):
        with pytest.raises(
            Occupied, match=rf"process {other['pid']} on {socket.gethostname()} .*takeover=true"
        ):
            refused()
    assert read(tmp_path) == other
    with own_folder(tmp_path, takeover=True):
        assert read(tmp_path)["pid"] == os.getpid() and not explain_loss(tmp_path)


def elsewhere(**changed) -> dict:
    return {**identify_process(), "pid": os.getppid(), "started": "7", "token": "other", **changed}


def ago(seconds: float) -> float:
    return time.time() - seconds


SLURM = ("17", 1)  # this process's job and how often it was queued again
CASES = {  # record → whether its process may live
    "a process that is gone": (dead, False),
    "another process with its number": (lambda: elsewhere(started="7"), False),
    "the same with an old beat": (
        lambda: elsewhere(started=owner.find_start_time(os.getppid()), beat=ago(9999)),
        True,
    ),
    "another machine": (lambda: elsewhere(host="elsewhere", beat=ago(10)), True),
    "another machine, silent for less than five minutes": (
        lambda: elsewhere(host="elsewhere", beat=ago(280)),
        True,
    ),
    "another machine, silent for more": (lambda: elsewhere(host="elsewhere", beat=ago(320)), False),
    "a machine whose clock is ahead": (lambda: elsewhere(host="elsewhere", beat=ago(-100)), True),
    "another container, or before a restart": (
        lambda: elsewhere(place="other", beat=ago(10)),
        True,
    ),
    "the same, silent": (lambda: elsewhere(place="other", beat=ago(320)), False),
    "this SLURM job before it was queued again": (
        lambda: elsewhere(host="node2", slurm=["17", 0]),
        False,
    ),
    "this SLURM job, another task": (lambda: elsewhere(host="node2", slurm=["17", 1]), True),
    "another SLURM job": (lambda: elsewhere(host="node2", slurm=["18", 0]), True),
    "an impossible process": (lambda: elsewhere(pid=-1, beat=ago(320)), False),
}


@pytest.mark.parametrize("make, alive", CASES.values(), ids=CASES)
def test_which_owners_live(tmp_path, monkeypatch, make, alive):
    monkeypatch.setenv("SLURM_JOB_ID", SLURM[0])
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(SLURM[1]))
    write(tmp_path, make())
    assert bool(find_occupant(tmp_path)) is alive
    if alive:
        with pytest.raises(Occupied):
            own_folder(tmp_path).__enter__()
    else:
        with own_folder(tmp_path):
            assert read(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("ahead", [100, 10_000, 3e12])
def test_a_beat_in_the_future_is_reported_with_both_times(tmp_path, ahead):
    """It tells nothing of how long the owner has been silent, and the refusal said "0 s ago", for
    years."""
    here = datetime.now().replace(microsecond=0)
    write(tmp_path, elsewhere(host="elsewhere", beat=time.time() + ahead))
    with pytest.raises(Occupied) as refusal:
        own_folder(tmp_path).__enter__()
    found = re.search(
        r"sign of life at (.*) by its clock, while it is (.*) here: one of the two",
        str(refusal.value),
    )
    assert found and "process" in str(refusal.value) and "takeover=true" in str(refusal.value)
    assert here <= datetime.fromisoformat(found[2]) <= here + timedelta(seconds=60)
    if ahead < 1e6:
        assert abs(datetime.fromisoformat(found[1]) - here - timedelta(seconds=ahead)) < timedelta(
            seconds=60
        )
    with own_folder(tmp_path, takeover=True):
        assert read(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("beat", ["NaN", "Infinity", "-Infinity"])
def test_a_beat_that_is_no_time_is_that_of_a_damaged_file(tmp_path, beat):
    write(tmp_path, elsewhere(host="elsewhere", beat=float(beat)))
    assert "cannot be read" in find_occupant(tmp_path)


def test_what_is_left_of_a_killed_process_is_dead(tmp_path):
    """Nobody has waited for it: its number and its start time are still there."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = {
        **identify_process(),
        "pid": process.pid,
        "started": owner.find_start_time(process.pid),
        "token": "other",
    }
    assert owner.lives(record)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not owner.lives(record)
    process.wait()
    process.stdin.close()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"host": "a"}', bytes(99)])
def test_an_owner_file_that_cannot_be_read_holds_as_long_as_a_silent_machine(tmp_path, content):
    """It is empty for an instant where a process starts; later it is only damaged."""
    (tmp_path / "owner.json").write_bytes(content)
    with pytest.raises(Occupied, match="cannot be read"):
        own_folder(tmp_path).__enter__()
    os.utime(tmp_path / "owner.json", (ago(320), ago(320)))
    with own_folder(tmp_path):
        assert read(tmp_path)["pid"] == os.getpid()


def test_a_folder_that_cannot_be_written_is_said_and_used(tmp_path, capsys):
    """A run goes on where its files cannot be written; this one is no exception."""
    (tmp_path / "owner.json").mkdir()
    with own_folder(tmp_path):
        check_owner(tmp_path)
    assert "nothing keeps a second process" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ beat and loss


class Once:
    """The end of the beating thread, which comes after one beat."""

    def __init__(self):
        self.waited: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return len(self.waited) > 1

    def is_set(self) -> bool:
        return False


def test_the_beat_is_renewed_every_30_seconds_also_where_the_file_was_deleted(
    tmp_path, monkeypatch
):
    record = {**identify_process(), "token": "mine"}
    owner.claim(tmp_path, record)
    monkeypatch.setattr(owner.time, "time", lambda: record["beat"] + 30)
    for change in (
        lambda: None,
        (tmp_path / "owner.json").unlink,
        lambda: (tmp_path / "owner.json").write_text("damaged"),
    ):
        change()
        owner.beat(tmp_path, record, ended := Once())
        assert read(tmp_path) == {**record, "beat": record["beat"] + 30} and ended.waited == [
            30,
            30,
        ]
    shutil.rmtree(tmp_path)
    owner.beat(tmp_path, record, Once())
    assert not tmp_path.exists()  # a run folder that was deleted does not come back


def test_an_owner_that_was_taken_over_knows_it_and_leaves_the_file_alone(tmp_path, other):
    with own_folder(tmp_path):
        mine = read(tmp_path)
        write(tmp_path, other)
        with pytest.raises(TakenOver, match=rf"taken over by process {other['pid']} on "):
            check_owner(tmp_path)
        owner.beat(tmp_path, mine, Once())  # its thread must not win the folder back
    assert read(tmp_path) == other


def test_an_owner_of_another_folder_is_not_concerned(tmp_path, other):
    with own_folder(tmp_path / "mine"):
        (tmp_path / "theirs").mkdir()
        write(tmp_path / "theirs", other)
        check_owner(tmp_path / "theirs")
        owner.check_path(tmp_path / "theirs" / "checkpoints" / "a.ckpt")
        write(tmp_path / "mine", other)
        with pytest.raises(TakenOver):
            owner.check_path(tmp_path / "mine" / "checkpoints" / "a.ckpt")


def test_what_is_released_early_is_free(tmp_path):
    with own_folder(tmp_path):
        release(tmp_path)
        with own_folder(tmp_path):
            assert (tmp_path / "owner.json").exists()
    assert not (tmp_path / "owner.json").exists()


RACER = """
import sys
from pathlib import Path
from rlkit.system.owner import Occupied, own_folder
print("ready", flush=True)
for line in sys.stdin:
    try:
        with own_folder(Path(line.strip())):
            print("owner", flush=True)
            sys.stdin.readline()
        print("released", flush=True)
    except Occupied:
        print("refused", flush=True)
        sys.stdin.readline()
        print("released", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start, locks",
    cases(
        [("an empty folder", True), ("a dead owner", True), ("an empty folder", False)],
        1,
        unpack=True,
    ),
    ids=["empty", "dead owner", "no locks"],
)
def test_of_processes_that_start_at_the_same_moment_exactly_one_owns_the_folder(
    tmp_path, start, locks
):
    """Real processes. On a file system without locks the exclusive creation of the file decides,
    where no dead owner's is there."""
    racer = (
        RACER
        if locks
        else "import fcntl\n\ndef none(*_):\n    raise OSError\n\nfcntl.flock = none\n" + RACER
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", racer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    try:
        assert [r.stdout.readline() for r in racers] == ["ready\n"] * 4
        draw, gone = random.Random(start), dead()
        for number in range(40):
            folder = tmp_path / str(number)
            folder.mkdir()
            if start == "a dead owner":
                write(folder, gone)
            draw.shuffle(racers)
            for r in racers:
                r.stdin.write(f"{folder}\n")
                r.stdin.flush()
            said = [r.stdout.readline().strip() for r in racers]
            said = [
                r.stdout.readline().strip() if line.startswith("resume: ") else line
                for r, line in zip(racers, said, strict=True)
            ]
            assert sorted(said) == ["owner", "refused", "refused", "refused"]
            for r in racers:
                r.stdin.write("\n")
                r.stdin.flush()
            assert [r.stdout.readline() for r in racers] == ["released\n"] * 4
            assert not (folder / "owner.json").exists()
    finally:
        for r in racers:
            r.kill()
            r.communicate()


# ------------------------------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("runs") / "outputs" / "small" / "run"
    assert main(["train", *SMALL, "name=small", f"hydra.run.dir={folder}"]) == 0
    assert not (folder / "owner.json").exists()
    return folder


@pytest.fixture
def copy(run, tmp_path, monkeypatch):
    """The run, as if it was interrupted, in a folder of its own below outputs/."""
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(run, tmp_path / "outputs" / "small" / "run", symlinks=True))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(summary | {"ended": "interrupted"}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("how", cases(["resume=FOLDER", "resume=auto", "hydra.run.dir"], 1))
def test_a_second_process_is_refused_and_changes_nothing(copy, other, capsys, how):
    write(copy, other)
    before = contents(copy)
    fresh = [*SMALL, "name=small", "trainer.steps=3"]
    words = {
        "resume=FOLDER": [f"resume={copy}", "trainer.steps=3"],
        "resume=auto": [*fresh, "resume=auto"],
    }
    assert main(["train", *words.get(how, [*fresh, f"hydra.run.dir={copy}"])]) == 2
    said = capsys.readouterr().err
    assert (
        f"process {other['pid']} on {socket.gethostname()} works there" in said
        and "takeover=true" in said
    )
    assert contents(copy) == before and [p.name for p in copy.parent.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_resumed_run_takes_the_place_of_a_dead_owner(copy, capsys):
    write(copy, dead())
    assert main(["train", f"resume={copy}", "trainer.steps=3"]) == 0
    assert "is gone without an end of its own" in capsys.readouterr().out
    assert not (copy / "owner.json").exists()


@pytest.mark.slow
def test_takeover_is_no_part_of_the_run(copy, other):
    """It is not taken up again by the next resume, and changes neither config nor place."""
    write(copy, other)
    assert main(["train", f"resume={copy}", "trainer.steps=3", "takeover=true"]) == 0
    assert not [text for text in runs.read_overrides(copy) if "takeover" in text]
    assert find_differences({"takeover": True}, {"takeover": False}) == {}
    write(copy, other)
    assert main(["train", f"resume={copy}", "trainer.steps=4"]) == 2


def test_a_refused_process_does_not_make_a_run_the_newest(tmp_path, monkeypatch):
    """resume=auto took the folder's own time, which looking for an owner changes."""
    monkeypatch.setattr(runs, "OUTPUTS", tmp_path)
    for age, name in ((200, "old"), (100, "new")):
        runs.write_config(tmp_path / "a" / name, {"seed": 0})
        os.utime(tmp_path / "a" / name / "config.yaml", (ago(age), ago(age)))
    with own_folder(tmp_path / "a" / "old"):
        pass
    assert runs.find_unfinished_run("a", {"seed": 0}) == tmp_path / "a" / "new"


def test_a_sweep_refuses_a_job_that_runs_already(tmp_path, other):
    runs.write_config(tmp_path / "job", {"seed": 1})
    write(tmp_path / "job", other)
    (problem,) = folder_problems(tmp_path / "job", {"seed": 1}, True)
    assert f"process {other['pid']}" in problem
    assert folder_problems(tmp_path / "job", {"seed": 1, "takeover": True}, True) == []


@pytest.mark.slow
def test_a_living_run_that_is_taken_over_ends_and_writes_nothing_more(tmp_path, forked, capsys):
    """Two real processes: the first stands in the middle of its second step while the other one
    does all that is left."""
    folder, log = tmp_path / "run", tmp_path / "log"
    at, go = (tmp_path / name for name in ("at", "go"))
    os.mkfifo(at), os.mkfifo(go)

    def hold():
        import rlkit.training.update.minibatch

        surrogate, steps = rlkit.training.update.minibatch.surrogate, []

        def held(*given):
            if (
                not steps and (folder / "metrics.jsonl").exists()
            ):  # a row is there: this is the second step
                steps.append(1)
                at.write_text("here")
                go.read_text()
            return surrogate(*given)

        rlkit.training.update.minibatch.surrogate = held

    child = forked(
        [
            "train",
            *SMALL,
            "algorithm.entropy_coef=0.01",
            "trainer.steps=3",
            f"hydra.run.dir={folder}",
        ],
        log,
        hold,
    )
    ready = os.open(
        at, os.O_RDONLY | os.O_NONBLOCK
    )  # a child that ends early must not leave this waiting for ever
    assert select.select([ready], [], [], 300)[0], log.read_text()
    os.close(ready)
    assert main(["train", f"resume={folder}"]) == 2
    assert f"process {child} on " in capsys.readouterr().err
    assert main(["train", f"resume={folder}", "takeover=true"]) == 0
    assert f"taken over from process {child} on " in capsys.readouterr().out
    before = contents(folder)
    with own_folder(folder):  # as if the new owner still worked there
        go.write_text("go on")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert (
        f"taken over by process {os.getpid()} on " in log.read_text()
        and "Traceback" not in log.read_text()
    )
    assert contents(folder) == before
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3]


@pytest.mark.slow
def test_of_several_ranks_the_first_one_owns_the_folder(copy, other, capfd):
    """All of them end with the status of a refusal, and at once."""
    write(copy, other)
    before = contents(copy)
    two = [
        f"resume={copy}",
        "trainer.steps=3",
        "trainer=ddp",
        "trainer.devices=2",
        "trainer.accelerator=cpu",
    ]
    assert main(["train", *two]) == 2
    assert f"process {other['pid']} on {socket.gethostname()} works there" in capfd.readouterr().err
    assert contents(copy) == before
    assert main(["train", *two, "takeover=true"]) == 0
    assert not (copy / "owner.json").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_locks_nobody_out(tmp_path, forked):
    folder, log = tmp_path / "run", tmp_path / "log"

    def killed():
        import rlkit.training.update.minibatch

        rlkit.training.update.minibatch.surrogate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    child = forked(
        ["train", *SMALL, "algorithm.entropy_coef=0.01", f"hydra.run.dir={folder}"], log, killed
    )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert read(folder)["pid"] == child
    assert main(["train", f"resume={folder}"]) == 0
    assert not (folder / "owner.json").exists()
