"""The embedded model: small, with the control tokens that templates need, bad but not hopeless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlkit.models.load import TINY

CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
BUILD = Path(__file__).resolve().parents[2] / "experiments" / "tiny_model"


def test_it_is_at_most_5_megabytes():
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 5_000_000


@pytest.mark.parametrize("token", CONTROL)
def test_control_tokens_are_one_id_each(tiny, token):
    assert len(tiny.renderer.tokenizer.encode(token, add_special_tokens=False)) == 1


@pytest.mark.slow
def test_the_warm_start_of_guess_number_plays_in_the_right_form():
    """Every reply a number of the range that ends by itself, also deep in a game: what PPO needs to
    begin with."""
    from rlkit.engines import Cached
    from rlkit.environments import guess_number
    from rlkit.episodes import collect
    from rlkit.models import load_policy
    from rlkit.tasks import guess_number as games

    policy = load_policy(path="tiny_guess")
    assert next(policy.model.parameters()).dtype == torch.float32
    rollouts = collect(
        policy,
        games(max_samples=6, high=20),
        engine=Cached(),
        environment=guess_number(max_turns=12),
        max_new_tokens=8,
    )
    replies = [step for r in rollouts for step in r.steps]
    legal = [
        s.finish_reason == "stop" and s.content.isdigit() and 1 <= int(s.content) <= 20
        for s in replies
    ]
    assert sum(legal) >= 0.95 * len(legal) and len(legal) > 20


def test_it_is_a_qwen3():
    assert json.loads((TINY / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_any_bytes_survive_the_tokenizer(tiny):
    from rlkit.models import decode, encode_text

    text = "".join(map(chr, range(1, 1000))) + "数字 🎲"
    assert decode(tiny.renderer, encode_text(tiny.renderer, text)) == text


def test_the_committed_measurement_is_of_a_bad_but_not_hopeless_start():
    measured = json.loads((BUILD / "accuracy.json").read_text())
    assert 0.2 <= measured["greedy"]["accuracy"] <= 0.6
    assert 0.2 <= measured["sampled"]["pass@1"]["value"] <= 0.6


@pytest.mark.slow
def test_the_weights_are_those_that_were_measured(tiny, experiment):
    """The first 100 held-out problems, greedy, against the committed accuracy on 1,000: four
    standard errors apart at most."""
    from rlkit.episodes.evaluation import greedy_accuracy

    measured = json.loads((BUILD / "accuracy.json").read_text())["greedy"]["accuracy"]
    tasks = experiment.task(split="test", max_samples=100)
    result, _ = greedy_accuracy(
        tiny,
        tasks,
        reward=experiment.evaluation.reward,
        engine=experiment.generation.engine,
        environment=experiment.environment,
        max_new_tokens=64,
    )
    assert abs(result["accuracy"] - measured) < 4 * (0.25 / 100) ** 0.5
