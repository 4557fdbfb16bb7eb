"""Many runs by `rlkit train -m`: after any disturbance, the next call gives the rows of an
undisturbed sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from many_runs import (
    Command,
    Ended,
    check_a_second_start,
    check_the_next_call,
    disturbances,
    killed,
    undisturbed_rows,
)
from rlkit.errors import ConfigError
from rlkit.runs.sweeps.jobs import RunJob, read_jobs, record_path, save
from rlkit.runs.sweeps.plan import refuse_running
from rlkit.runs.sweeps.runner import STOP, do_job, make_sweep, wait_for
from rlkit.system import owner

PRESET = """# @package _global_
defaults:
  - override /task: vowels
  - override /kl: none
  - override /reference: none
  - override /schedule: constant
  - override /logger: none
name: ${algorithm.name}
generation: {max_new_tokens: 3}
batch: {prompts: 2, group_size: 4}
algorithm: {epochs: 1, minibatches: 2}
trainer: {steps: STEPS, threads: 1}
evaluation: {n: 16}
callbacks: {checkpoint: {every: 1000000}, samples: {every: 1000000}, rollouts: {every: 1000000}}
reward: {terms: {task: {fn: {rewards: {listed: {_target_: my_vowels.watched, _partial_: true}}}}}}
"""
SWEEP = Command(
    words=[
        "train",
        "-m",
        "experiment=vowels",
        "algorithm=grpo,rloo",
        "seed=0",
        "resume=auto",
    ],
    rows="comparison.csv",
    options={
        "experiment/vowels.yaml": PRESET,
        "task/vowels.yaml": "_target_: my_vowels.vowels\n_partial_: true\nseed: 0\n",
    },
    refuses=True,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, forked):
    return undisturbed_rows(SWEEP._replace(fork=forked), tmp_path_factory.mktemp("sweep"))


@pytest.mark.slow
@pytest.mark.parametrize("disturb", disturbances(SWEEP))
def test_the_next_call_ends_with_the_rows_of_an_undisturbed_sweep(
    disturb, undisturbed, forked, tmp_path
):
    """One of them with new processes, the others with copies of this one."""
    command = SWEEP if disturb is killed else SWEEP._replace(fork=forked)
    check_the_next_call(command, disturb, undisturbed, tmp_path)


# --------------------------------------------------------------------- its parts, without processes


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


def test_a_second_start_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    words = [word for word in SWEEP.words if not word.startswith("experiment=")]
    check_a_second_start(words, tmp_path, monkeypatch, capsys)
