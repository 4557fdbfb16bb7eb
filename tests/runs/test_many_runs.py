"""Many runs, by `rlkit train -m` and by `rlkit bench`: after any disturbance, the next call gives
the rows of an undisturbed matrix."""

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

from rlkit.commands.arguments import drop, option
from rlkit.commands.cli import main
from rlkit.config.compose import compose
from rlkit.errors import ConfigError
from rlkit.runs import bench
from rlkit.runs import folder as runs
from rlkit.runs.reading import find_runs
from rlkit.runs.sweeps.jobs import RunJob, read_jobs, record_path, save
from rlkit.runs.sweeps.plan import refuse_running
from rlkit.runs.sweeps.runner import SIGNALS, STOP, do_job, make_sweep, wait_for
from rlkit.system import owner
from rlkit.system.identity import read_identity

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
    names = [f"vowels/{split}/{i}" for i in range(max_samples)]
    return [Task(name, asked, "", "listed", "single_turn", row) for name in names]


@gives("binary", "raw")
def watched(rollout):
    """`listed`. Where the test asks for it, the first job stops in its second step, and waits or
    fails."""
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
    "sweep": [
        "train",
        "-m",
        "experiment=bench/vowels",
        "algorithm=grpo,rloo",
        "seed=0",
        "resume=auto",
    ],
    "bench": [
        "bench",
        "algorithms=grpo,rloo",
        "tasks=vowels",
        "seeds=1",
        "placebo=false",
        "jobs=1",
        "folder=outputs/sweep",
    ],
}
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


def heed() -> None:
    """Take the signals that a shell without job control, or nohup, has had ignored."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def begin(name: str, place: Path) -> subprocess.Popen:
    """Starts the command."""
    own = {"PYTHONPATH": str(place), "DISTURB": str(place), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "rlkit", *COMMANDS[name], "--config-dir", "conf"],
        cwd=place,
        env=os.environ | own,
        preexec_fn=heed,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


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
def test_the_next_call_ends_with_the_rows_of_an_undisturbed_matrix(
    name, disturb, undisturbed, tmp_path
):
    place = furnish(tmp_path)
    disturb(name, place)
    done = complete(name, place)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(name, place) == undisturbed(name)
    assert not list((place / "outputs" / "sweep").glob("owner.json"))


# --------------------------------------------------------------------- its parts, without processes


class Ended:
    """A job's process that has ended."""

    def __init__(self, status: int = 0):
        self.pid = 2**22 + 1  # more than there are
        self.status = status

    def wait(self, timeout: float | None = None) -> int:
        return self.status

    def send_signal(self, sig: int) -> None: ...


class Jobs:
    """Starts jobs that end at once: each leaves a finished run of its config, or fails as it is
    told."""

    def __init__(self):
        self.started: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, words, log, environment) -> Ended:
        folder = Path(option(words, "hydra.run.dir").strip("'"))
        arm = folder.parent.name
        self.started.append(arm)
        overrides = drop(words[1:], "hydra.run.dir")
        runs.write_config(folder, compose(overrides).config)
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "overrides.yaml").write_bytes(runs.dump(overrides))
        if arm in self.failing:
            log.write(b"rlkit: grpo, kl none\nrlkit: it was told to fail\n")
            log.flush()
            return Ended(1)
        after = {"reward": len(self.started) / 10, "accuracy": 0.5}
        summary = {"ended": "finished", "steps": 1, "after": after, "before": after}
        (folder / "summary.json").write_text(
            json.dumps(summary | {"identity": read_identity(folder)})
        )
        (folder / "metrics.jsonl").write_text("")
        return Ended()


def matrix(place: Path, *common: str) -> list[bench.MatrixRun]:
    arms = {"a": ("algorithm=grpo",), "b": ("algorithm=rloo",)}
    return bench.matrix(place, ["noisy"], arms, [0], common)


def run(place: Path, start: Jobs, *common: str) -> list[RunJob]:
    return bench.run_all(matrix(place, *common), place, jobs=1, config_dir=None, start=start)[0]


def test_a_bench_reuses_runs_of_the_same_settings_alone(tmp_path, capsys):
    """The same command with another length counted all runs as done, and labelled them with it."""
    start = Jobs()
    run(tmp_path, start, "trainer.steps=1")
    assert start.started == ["a", "b"]
    run(tmp_path, start, "trainer.steps=1")
    assert start.started == ["a", "b"] and "2 of them done earlier" in capsys.readouterr().out
    for number, changed in enumerate(("trainer.steps=2", "optimizer.lr=0.5", "task.placebo=coin")):
        done = run(tmp_path, start, changed)
        assert len(start.started) == 2 * (number + 2) and {job.status for job in done} == {
            "finished"
        }
        said = capsys.readouterr().out
        assert "set aside 2 runs of other settings" in said and changed.partition("=")[0] in said
        row, _ = (bench.read_row(cell) for cell in matrix(tmp_path))
        assert changed in row["overrides"] and row["reward"] == (2 * (number + 2) - 1) / 10
    assert len(list((tmp_path / "noisy" / "a").glob("0.set_aside*"))) == 3
    assert find_runs([tmp_path], "compare") == [tmp_path / "noisy" / arm / "0" for arm in "ab"]


def test_a_run_whose_config_cannot_be_read_is_run_anew(tmp_path):
    start = Jobs()
    run(tmp_path, start)
    config = tmp_path / "noisy" / "a" / "0" / "config.yaml"
    config.write_text("[")
    run(tmp_path, start)
    config.unlink()
    run(tmp_path, start)
    assert start.started == ["a", "b", "a", "a"]


@pytest.mark.parametrize("names", [("a b", "a_b"), ("placebo_coin", "x")])
def test_arms_that_would_share_a_folder_are_refused(tmp_path, capsys, names):
    (tmp_path / "arms.yaml").write_text(json.dumps({name: ["algorithm=grpo"] for name in names}))
    assert main(["bench", f"arms={tmp_path / 'arms.yaml'}", f"folder={tmp_path / 'out'}"]) == 2
    assert "would have one folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failed_run_is_told_and_tried_again(tmp_path, capsys):
    start = Jobs()
    start.failing = {"a"}
    first, second = run(tmp_path, start)
    assert (first.status, first.reason, second.status) == (
        "failed",
        "exit 1: it was told to fail",
        "finished",
    )
    assert "failed  exit 1: it was told to fail  see " in capsys.readouterr().out
    start.failing = set()
    assert [job.status for job in run(tmp_path, start)] == ["finished", "finished"]
    assert start.started == ["a", "b", "a"]


def test_a_row_says_what_its_run_says(tmp_path):
    """Its overrides are those that the run was started with, not those of the command that reads
    it."""
    start = Jobs()
    run(tmp_path, start, "trainer.steps=1")
    row, _ = (bench.read_row(cell) for cell in matrix(tmp_path, "trainer.steps=9"))
    assert "trainer.steps=1" in row["overrides"] and "trainer.steps=9" not in row["overrides"]
    assert "resume" not in row["overrides"]


def running(root: Path, **changed) -> Path:
    """The record of a job that this process does."""
    process = owner.describe_process(os.getpid()) | changed
    record = record_path(root, root / "a")
    save(record, RunJob(0, [], root / "a", "running", process))
    return record


def test_a_job_counts_as_running_only_while_its_own_process_does(tmp_path):
    """A sweep refused for ever once another program had the number, and advised to end that."""
    running(tmp_path)
    with pytest.raises(ConfigError, match=f"still runs there as process {os.getpid()}"):
        refuse_running(tmp_path)
    for changed in (
        {"started": "7"},
        {"place": "another boot"},
        {"host": "elsewhere"},
        {"pid": 2**22 + 1},
        {"pid": "x"},
    ):
        running(tmp_path, **changed)
        refuse_running(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"number": 0}',
        b'{"number": "x", "overrides": [], "folder": "a"}',
    ],
)
def test_a_damaged_record_is_passed_over(tmp_path, damage):
    running(tmp_path).write_bytes(damage)
    save(record_path(tmp_path, tmp_path / "b"), RunJob(1, [], tmp_path / "b", "finished"))
    assert [job.folder.name for job in read_jobs(tmp_path / "jobs")] == ["b"]
    refuse_running(tmp_path)


class Patient(Ended):
    """A job's process that ends when it is told to."""

    def __init__(self):
        super().__init__()
        self.told: list[int] = []

    def wait(self, timeout: float | None = None) -> int:
        if self.told:
            return -self.told[0]
        raise subprocess.TimeoutExpired("job", timeout)

    def send_signal(self, sig: int) -> None:
        self.told.append(sig)


def test_a_job_is_told_of_a_signal_that_came_while_it_was_started(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / STOP).write_text(json.dumps({"signal": signal.SIGTERM, "told": [1]}))
    assert wait_for(Patient(), make_sweep(tmp_path, None, 1)) == -signal.SIGTERM
    job = do_job(RunJob(0, [], tmp_path / "a"), make_sweep(tmp_path, None, 1), start=None)
    assert job.status == "not started"


def test_a_job_beside_its_sweep_ends_once_that_is_gone(tmp_path):
    """In a launcher's process, to which the kernel has tied the job, and not to the sweep."""
    sweep = make_sweep(tmp_path, None, 1)
    ended = sweep._replace(process={**sweep.process, "started": "7"})
    assert wait_for(Patient(), ended) == -signal.SIGKILL


@pytest.mark.parametrize("name", COMMANDS)
def test_a_second_start_is_refused_in_one_sentence(name, tmp_path, monkeypatch, capsys):
    """Two benches in one folder deleted each other's runs."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "outputs" / "sweep"
    root.mkdir(parents=True)
    living = {
        **owner.identity(),
        "pid": os.getppid(),
        "started": owner.started(os.getppid()),
        "token": "other",
    }
    (root / "owner.json").write_text(json.dumps(living))
    words = [word.replace("vowels", "noisy") for word in COMMANDS[name]]
    assert main(words) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        len(said) == 1 and f"process {os.getppid()} on " in said[0] and "takeover=true" in said[0]
    )
    assert [path.name for path in root.iterdir()] == ["owner.json"]
