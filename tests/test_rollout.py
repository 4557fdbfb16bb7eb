"""`rlkit rollout`: episodes without training, as a user runs it."""

from __future__ import annotations

import json

import pytest

from rlkit.cli import main
from rlkit.rollout import step_counts
from rlkit.rollouts import load_rollouts

FAST = ["trainer.accelerator=cpu", "task.max_samples=16"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Three tasks, two episodes each, in an empty folder."""
    folder = tmp_path_factory.mktemp("rollout")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["rollout", *FAST, "n=3", "num_return_sequences=2"]) == 0
        assert main(["rollout", *FAST, "n=3", "num_return_sequences=2", "name=again", "max_steps=1"]) == 0
    return {name: next((folder / "outputs" / name).iterdir()) for name in ("rollout", "again")}


def test_episodes_are_recorded_scored_and_summed_up(played):
    rollouts = load_rollouts(played["rollout"] / "rollouts.jsonl.gz")
    assert [(r.group, r.sample) for r in rollouts] == [(i, j) for i in range(3) for j in range(2)]
    assert all(r.reward is not None and r.steps for r in rollouts)
    summary = json.loads((played["rollout"] / "summary.json").read_text())
    assert summary["reward/mean"] == pytest.approx(sum(r.reward for r in rollouts) / 6)
    assert summary["steps"] == {str(k): v for k, v in step_counts(rollouts).items()} and sum(summary["steps"].values()) == 6
    assert (played["rollout"] / "conversations.txt").read_text()


def test_max_steps_is_the_limit_of_every_environment(played):
    """The same seeds: the first replies are the same, and what would have gone on is truncated."""
    whole, cut = (load_rollouts(played[name] / "rollouts.jsonl.gz") for name in ("rollout", "again"))
    assert all(len(r.steps) == 1 for r in cut) and any(len(r.steps) > 1 for r in whole)
    assert [r.steps[0].response_ids for r in cut] == [r.steps[0].response_ids for r in whole]
    assert all(c.truncation == "steps" for c, w in zip(cut, whole, strict=True) if len(w.steps) > 1)


def test_a_cut_reaches_the_engine(tmp_path, monkeypatch):
    """Of one token to choose from, each is certain."""
    monkeypatch.chdir(tmp_path)
    numbers = ["generation=notebook", "generation.top_k=1", "generation.max_new_tokens=4"]
    assert main(["rollout", *FAST, "n=1", "max_steps=1", *numbers]) == 0
    (file,) = tmp_path.glob("outputs/*/*/rollouts.jsonl.gz")
    assert load_rollouts(file)[0].steps[0].logprobs == (0.0,) * 4


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["n=0"], "n=0: must be at least 1"),
        (["max_steps=0"], "max_steps=0: must be at least 1"),
        (["generation.temperature=-1"], "generation.temperature=-1"),
        (["generation.top_p=0"], "generation.top_p=0: must be greater than 0"),
        (["generation.top_k=-1"], "generation.top_k=-1: must not be negative"),
        (["num_return_sequence=2"], "Did you mean 'num_return_sequences'"),
        (["-m", "n=1,2"], "-m belongs to rlkit train"),
    ],
)
def test_refused_with_the_place(overrides, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", *overrides]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
