"""Resuming destroys no evidence: what cannot be read or is written again is set aside, and a run
that has trained never begins again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.episodes import append_step
from rlkit.runs import folder as runs
from rlkit.runs.folder import count_lost_steps
from rlkit.system.identity import read_identity
from rlkit.system.rows import read_rows

SMALL = [
    "debug=fast",
    "trainer.accelerator=cpu",
    "task.max_samples=32",
    "evaluation.n=0",
    "logger=none",
    "model.lora.rank=1",
    "generation.max_new_tokens=32",
]
LATE = "callbacks.checkpoint.every=5"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, saved at its end alone."""
    folder = tmp_path_factory.mktemp("runs") / "outputs" / "small" / "run"
    assert main(["train", *SMALL, LATE, "name=small", f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture
def copy(run, tmp_path, monkeypatch):
    """The run in a folder of its own below outputs/, which is the working folder's."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(run, tmp_path / "outputs" / "small" / "run", symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def as_if_killed(folder: Path) -> None:
    """Leaves what a run of the same steps leaves that is killed before its first save."""
    for name in ("checkpoints", "model"):
        shutil.rmtree(folder / name)
    (folder / "summary.json").unlink()


@pytest.mark.slow
def test_a_bad_line_and_a_tail_that_is_no_text_cost_a_resumed_run_no_row(copy, capsys):
    metrics = copy / "metrics.jsonl"
    first, second = metrics.read_bytes().splitlines()
    metrics.write_bytes(
        b'{"step": 1, "rew\n' + first + b"\n" + second + b'\n{"step": 3, "a": "\xff'
    )
    (copy / "run.json").write_bytes(b"\xff" + (copy / "run.json").read_bytes())
    (copy / "failed_rollout.jsonl.gz").write_bytes(b"a rollout")
    assert main(["train", f"resume={copy}", "trainer.steps=3"]) == 0
    assert steps(metrics) == [1, 2, 3] and metrics.read_bytes().startswith(
        first + b"\n" + second + b"\n"
    )
    assert (
        copy / "metrics.unreadable"
    ).read_bytes() == b'{"step": 1, "rew\n{"step": 3, "a": "\xff\n'
    said = capsys.readouterr().out
    assert (
        "2 line(s) of metrics.jsonl cannot be read" in said
        and "run.json cannot be read and is kept as run.json.unreadable" in said
    )
    assert (copy / "run.json.unreadable").read_bytes().startswith(b"\xff") and len(
        json.loads((copy / "run.json").read_text())
    ) == 1
    assert (copy / "failed_rollout.jsonl.gz.earlier").read_bytes() == b"a rollout"


@pytest.mark.slow
def test_rows_after_the_checkpoint_are_set_aside(copy, capsys):
    row = {"step": 3, "reward/mean": 0.5}
    with (copy / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert main(["train", f"resume={copy}", "trainer.steps=3"]) == 0
    assert steps(copy / "metrics.jsonl") == [1, 2, 3]
    assert read_rows(copy / "metrics.discarded.jsonl") == [row]
    assert "1 line(s) after step 2: moved to metrics.discarded.jsonl" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["the files", "the folder"])
@pytest.mark.parametrize("resume", cases(["the run", "auto"], 1))
def test_a_run_whose_checkpoints_are_gone_does_not_begin_again(copy, capsys, gone, resume):
    """It once did, and dropped its rows."""
    if gone == "the files":
        (copy / "checkpoints" / "step_000002.ckpt").unlink()
    else:
        shutil.rmtree(copy / "checkpoints")
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps(summary | {"ended": "interrupted"}))
    before = contents(copy)
    words = (
        [f"resume={copy}"] if resume == "the run" else [*SMALL, LATE, "name=small", "resume=auto"]
    )
    assert main(["train", *words, "trainer.steps=3"]) == 2
    said = capsys.readouterr().err
    assert (
        "has trained 2 steps" in said
        and "none of its checkpoints is left" in said
        and "Start a new run" in said
    )
    assert contents(copy) == before and [p.name for p in copy.parent.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_save_begins_again_and_keeps_its_rows(copy):
    as_if_killed(copy)
    rows = (copy / "metrics.jsonl").read_bytes()
    assert main(["train", f"resume={copy}"]) == 0
    assert steps(copy / "metrics.jsonl") == [1, 2]
    assert (copy / "metrics.discarded.jsonl").read_bytes() == rows


def row(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step}) + "\n")


def summary(folder: Path, **given) -> None:
    (folder / "summary.json").write_text(
        json.dumps({"identity": read_identity(folder), "steps": 2, "unsaved": None} | given)
    )


CHECKPOINT = {"_target_": "rlkit.training.callbacks.checkpoint", "every": 5}
EVIDENCE = {  # what is done to a run of two rows that has no checkpoint → the steps that are lost
    "nothing": (lambda f: None, 0),
    "a row of the step at which it saves": (lambda f: row(f, 5), 0),
    "a row after its first save": (lambda f: row(f, 6), 6),
    "rollouts after its first save": (lambda f: append_step(f / "rollouts", 7, []), 7),
    "half a checkpoint": (lambda f: (f / "checkpoints" / "step_000002.ckpt.tmp").touch(), 0),
    "a checkpoint": (lambda f: (row(f, 9), (f / "checkpoints" / "step_000005.ckpt").touch()), 0),
    "a damaged checkpoint that was set aside": (
        lambda f: (f / "checkpoints" / "step_000002.ckpt.damaged").touch(),
        2,
    ),
    "the name of the best one": (lambda f: (f / "checkpoints" / "best.json").touch(), 2),
    "an end": (lambda f: summary(f, ended="finished"), 2),
    "an end that was not saved": (
        lambda f: summary(f, ended="interrupted", unsaved="No space left on device"),
        0,
    ),
    "a failure": (lambda f: summary(f, ended="failed: OSError: x"), 0),
    "no checkpoints at all": (
        lambda f: runs.write_config(f, {"callbacks": {"checkpoint": None}}),
        2,
    ),
    "a config that cannot be read": (lambda f: (f / "config.yaml").write_bytes(b"\xff"), 2),
    "rows that cannot be read": (lambda f: (f / "metrics.jsonl").write_bytes(b"\xff\n"), 0),
}


@pytest.mark.parametrize("change, lost", EVIDENCE.values(), ids=EVIDENCE)
def test_which_runs_have_lost_their_checkpoints(tmp_path, change, lost):
    (tmp_path / "checkpoints").mkdir()
    runs.write_config(tmp_path, {"callbacks": {"checkpoint": CHECKPOINT}})
    for step in (1, 2):
        row(tmp_path, step)
    change(tmp_path)
    assert count_lost_steps(tmp_path) == lost
