"""`rlkit rollout`: episodes without training, as a user runs it."""

from __future__ import annotations

import json

import pytest

from rlkit.commands.cli import main
from rlkit.commands.rollout import step_counts
from rlkit.episodes import load_rollouts

FAST = ["trainer.accelerator=cpu", "task.max_samples=16"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Three tasks, two episodes each, in an empty folder."""
    folder = tmp_path_factory.mktemp("rollout")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["rollout", *FAST, "n=3", "num_return_sequences=2"]) == 0
        assert (
            main(
                [
                    "rollout",
                    *FAST,
                    "n=3",
                    "num_return_sequences=2",
                    "name=again",
                    "max_steps=1",
                    "format=jsonl",
                ]
            )
            == 0
        )
    return {name: next((folder / "outputs" / name).iterdir()) for name in ("rollout", "again")}


def test_episodes_are_recorded_scored_and_summed_up(played):
    rollouts = load_rollouts(played["rollout"] / "rollouts.jsonl.gz")
    assert sorted(f.name for f in played["rollout"].iterdir()) == [
        "conversations.txt",
        "prompts.txt",
        "rollouts.jsonl.gz",
        "summary.json",
    ]
    assert [(r.group, r.sample) for r in rollouts] == [(i, j) for i in range(3) for j in range(2)]
    assert all(r.reward is not None and r.steps for r in rollouts)
    summary = json.loads((played["rollout"] / "summary.json").read_text())
    assert summary["reward/mean"] == pytest.approx(sum(r.reward for r in rollouts) / 6)
    assert (
        summary["steps"] == {str(k): v for k, v in step_counts(rollouts).items()}
        and sum(summary["steps"].values()) == 6
    )
    read = (played["rollout"] / "prompts.txt").read_text()
    assert '"name": "calculator"' in read
    assert (played["rollout"] / "conversations.txt").read_text().startswith(read)


def test_max_steps_is_the_limit_of_every_environment(played):
    """The same seeds: the first replies are the same, and what would have gone on is truncated."""
    whole, cut = (
        load_rollouts(played[name] / file)
        for name, file in (("rollout", "rollouts.jsonl.gz"), ("again", "rollouts.jsonl"))
    )
    assert all(len(r.steps) == 1 for r in cut) and any(len(r.steps) > 1 for r in whole)
    assert [r.steps[0].response_ids for r in cut] == [r.steps[0].response_ids for r in whole]
    assert all(c.truncation == "steps" for c, w in zip(cut, whole, strict=True) if len(w.steps) > 1)


@pytest.mark.slow
def test_what_is_interrupted_leaves_the_episodes_that_had_ended(tmp_path, monkeypatch, capsys):
    """Hours of episodes are not lost to Ctrl-C; scored, they are those of a run that goes on."""
    from rich.progress import Progress

    ended = []

    def interrupted(bar, task):
        ended.append(task)
        if len(ended) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "advance", interrupted)
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", *FAST, "n=4", "max_steps=1"]) == 130
    (file,) = (tmp_path / "outputs" / "rollout").glob("*/*")
    kept = load_rollouts(file)
    assert (
        file.name == "unscored.jsonl.gz"
        and len(kept) == 3
        and all(r.steps and r.reward is None for r in kept)
    )
    assert (
        f"3 of 4 episodes had ended; they are in {file.relative_to(tmp_path)}, unscored"
        in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, reward, kept",
    [
        (
            ["rollout", "n=2", "max_steps=1"],
            "reward",
            {"failed_rollout.jsonl.gz", "unscored.jsonl.gz"},
        ),
        (
            ["evaluate", "evaluation.n=2", "evaluation.samples=1", "evaluation.k=[1]"],
            "evaluation.reward",
            {"failed_rollout.jsonl.gz"},
        ),
    ],
)
def test_a_reward_that_fails_leaves_its_rollout_behind(
    command, reward, kept, tmp_path, monkeypatch, capsys
):
    """As in training: the error is one sentence, and the rollout is there to look at."""
    (tmp_path / "late_reward.py").write_text(
        "def late(r):\n    return float(r.final_content != '') if not r.steps[0].response_ids else"
        " r.nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    overrides = [
        f"{'reward@' if '.' in reward else ''}{reward}=numeric",
        f"{reward}.terms.numeric.fn._target_=late_reward.late",
    ]
    assert main([*command, *FAST, "generation.max_new_tokens=20", *overrides]) == 1
    (folder,) = (tmp_path / "outputs").glob("*/*")
    assert {f.name for f in folder.iterdir()} == kept
    (failed,) = load_rollouts(folder / "failed_rollout.jsonl.gz")
    assert failed.steps[0].response_ids and failed.reward is None
    error = capsys.readouterr().err
    assert (
        "rlkit: reward term 'numeric' raised on task" in error
        and "failed_rollout.jsonl.gz" in error
        and "Traceback" not in error
    )


@pytest.mark.slow
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
        (["format=json"], "format: 'json' is not one of jsonl.gz, jsonl"),
        (["max_steps=0"], "max_steps=0: must be at least 1"),
        (["generation.temperature=-1"], "generation.temperature=-1"),
        (["generation.top_p=0"], "generation.top_p=0: must be greater than 0"),
        (["generation.top_k=-1"], "generation.top_k=-1: must be at least 0"),
        (["num_return_sequence=2"], "Did you mean 'num_return_sequences'"),
        (["-m", "n=1,2"], "-m belongs to rlkit train"),
    ],
)
def test_refused_with_the_place(overrides, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["rollout", *overrides]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())
