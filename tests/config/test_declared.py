"""A task declares the rewards and environments that its rows name; only those are composed."""

from __future__ import annotations

import pytest

from rlkit.commands.cli import main
from rlkit.config.compose import compose


def parts(*overrides: str) -> tuple[set[str], set[str]]:
    """The rewards and the environments of a composed config that rows may name."""
    config = compose(overrides).config
    rewards = config["reward"]["terms"]["task"]["fn"]["rewards"]
    return set(rewards), set(config["environment"]["environments"])


@pytest.mark.slow
def test_only_what_the_task_declares_is_composed():
    assert parts() == ({"numeric"}, {"tool_use"})
    assert parts("task=guess_number") == ({"few_turns"}, {"guess_number"})


@pytest.mark.slow
def test_a_mixture_has_what_its_parts_declare():
    assert parts("task=mixture") == ({"numeric", "few_turns"}, {"tool_use", "guess_number"})


def test_more_can_be_declared():
    both, _ = parts("task.rewards=[numeric,exact_match]")
    assert both == {"numeric", "exact_match"}


def test_a_part_that_an_override_sets_stays():
    key = "reward.terms.task.fn.rewards"
    rewards, _ = parts(
        f"{key}.numeric.correct=2",
        f"+{key}.mine={{_target_: rlkit.rewards.contains, _partial_: true}}",
    )
    assert rewards == {"numeric", "mine"}
    rewards, _ = parts(f"{key}.contains._target_=rlkit.rewards.contains")
    assert rewards == {"numeric", "contains"}


@pytest.mark.slow
def test_the_declaration_stays_out_of_the_config():
    task = compose(["task=gsm8k"]).config["task"]
    assert "rewards" not in task and "environments" not in task


@pytest.mark.parametrize("key", ["reward", "environment"])
def test_a_row_that_names_another_part_is_refused_with_the_key_to_set(
    key, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    other = {"reward": "contains", "environment": "python"}[key]
    row = f'{{"prompt": "Say 4.", "answer": "4", "{key}": "{other}"}}\n'
    (tmp_path / "rows.jsonl").write_text(row * 8)
    words = ["train", "task=jsonl", "task.path=rows.jsonl", f"+task.fields.{key}={key}"]
    words += ["evaluation.n=0", "trainer.steps=1"]
    status = main(words)
    said = "".join(capsys.readouterr())
    assert status == 2 and f"task.{key}s=[" in said and other in said
