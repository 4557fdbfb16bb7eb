"""Many runs by `rlkit bench`: after any disturbance, the next call gives the rows of an undisturbed
matrix, and only runs of the same settings are reused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from many_runs import (
    Command,
    Ended,
    check_a_second_start,
    check_the_next_call,
    disturbances,
    undisturbed_rows,
)
from rlkit.commands.arguments import drop, find_option
from rlkit.commands.cli import main
from rlkit.config.compose import compose
from rlkit.extras.bench import matrix as bench
from rlkit.runs import folder as runs
from rlkit.runs.reading import find_runs
from rlkit.runs.sweeps.jobs import RunJob
from rlkit.system.identity import read_identity

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
BENCH = Command(
    words=[
        "bench",
        "algorithms=grpo,rloo",
        "tasks=vowels",
        "seeds=1",
        "placebo=false",
        "jobs=1",
        "folder=outputs/sweep",
    ],
    rows="results.csv",
    options={"experiment/bench/vowels.yaml": PRESET},
    refuses=False,
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, forked):
    return undisturbed_rows(BENCH._replace(fork=forked), tmp_path_factory.mktemp("bench"))


@pytest.mark.slow
@pytest.mark.parametrize("disturb", disturbances(BENCH))
def test_the_next_call_ends_with_the_rows_of_an_undisturbed_matrix(
    disturb, undisturbed, forked, tmp_path
):
    check_the_next_call(BENCH._replace(fork=forked), disturb, undisturbed, tmp_path)


# --------------------------------------------------------------------- its parts, without processes


class Jobs:
    """Starts jobs that end at once: each leaves a finished run of its config, or fails as it is
    told."""

    def __init__(self):
        self.started: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, words, log, environment) -> Ended:
        folder = Path(find_option(words, "hydra.run.dir").strip("'"))
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_row_says_what_its_run_says(tmp_path):
    """Its overrides are those that the run was started with, not those of the command that reads
    it."""
    start = Jobs()
    run(tmp_path, start, "trainer.steps=1")
    row, _ = (bench.read_row(cell) for cell in matrix(tmp_path, "trainer.steps=9"))
    assert "trainer.steps=1" in row["overrides"] and "trainer.steps=9" not in row["overrides"]
    assert "resume" not in row["overrides"]


@pytest.mark.slow
def test_a_second_start_is_refused_in_one_sentence(tmp_path, monkeypatch, capsys):
    """Two benches in one folder deleted each other's runs."""
    words = [word.replace("vowels", "noisy") for word in BENCH.words]
    check_a_second_start(words, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("arm", ["..", ".", "", "a/b", "-x"])
def test_an_arm_of_the_bench_is_a_plain_folder(arm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arms.yaml").write_text(f"{arm!r}: [algorithm=grpo]\n")
    assert main(["bench", "arms=arms.yaml", "tasks=needle", "seeds=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "arms=arms.yaml" in said
    assert [p.name for p in tmp_path.iterdir()] == ["arms.yaml"]
