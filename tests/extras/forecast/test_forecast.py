"""`rlkit check check.device=CARD`: what it says of a card, and what it refuses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlkit.algorithm import Critic
from rlkit.commands.cli import main
from rlkit.extras.forecast.load import list_uncounted

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_card_that_is_not_here(capsys):
    """Qwen3-0.6B on an H200: neither the card, nor the weights, nor a network."""
    words = [
        "model=qwen3_0.6b",
        "trainer=gpu",
        "generation.max_new_tokens=600",
        "check.prompt_tokens=150",
        "check.device=h200",
    ]
    assert main(["check", *words]) == 0
    said = capsys.readouterr().out
    assert (
        "fits: " in said
        and "prompts of 150 tokens (given), replies of 300" in said
        and "weights 1.2" in said
    )
    for label in ("memory", "slots", "step", "decoding", "change"):
        assert f"\n{label} " in said


@pytest.mark.parametrize(
    "words, replies",
    [
        (["task=arithmetic"], 2),  # the environment stands below environment.environments
        (["environment=tool_use"], 2),
        (["task=digits"], 1),
    ],
    ids=str,
)
def test_an_episode_with_a_tool_has_two_replies(words, replies, capsys):
    assert main(["check", "check.device=h200", *words]) == 0
    assert f", {replies} a rollout" in capsys.readouterr().out


def test_what_the_forecast_leaves_out_is_named(capsys):
    """It told the costs of the policy alone as those of the run."""
    words = ["task=digits", "schedule=reinforce_to_ppo"]
    assert main(["check", "check.device=h200", *words]) == 0
    assert "\nnot counted the phases after the first" in capsys.readouterr().out
    critic = Critic(loss=print, model="separate")
    algorithm = SimpleNamespace(critic=critic, episodes=print)
    trainer = SimpleNamespace(devices=2, nodes=1)
    x = SimpleNamespace(algorithm=algorithm, trainer=trainer, needs_teacher=True)
    assert len(list_uncounted(x, 1)) == 4


@pytest.mark.parametrize(
    "words, expected",
    [
        (["check.device=h20"], "Did you mean 'h200'?"),
        (["check.device=h200", "check.trns=2"], "Did you mean 'turns'?"),
        (["check.turns=2"], "name a card"),
        (["check.device=h200", "check.turns=1.5"], "must be a whole number from 1"),
        (["check.device=h200", "check.reply_share=2"], "from 0.001 to 1"),
    ],
    ids=str,
)
def test_a_forecast_refuses_what_it_does_not_know(words, expected, capsys):
    assert main(["check", *words]) == 2 and expected in capsys.readouterr().err


@pytest.mark.slow
def test_the_costs_of_the_recipes_are_those_of_the_roofline(capsys):
    rows = re.findall(
        r"^\| .* \| `rlkit (check .*)` \| .* \| ([\d.]+) GB \| (\S+) s \|$",
        (ROOT / "docs" / "recipes.md").read_text(),
        re.M,
    )
    assert len(rows) == 6
    for command, memory, seconds in rows:
        assert main(shlex.split(command)) == 0
        said = capsys.readouterr().out
        assert f"fits: {memory} of " in said and re.search(
            rf"^step +{re.escape(seconds)} s:", said, re.M
        ), command
