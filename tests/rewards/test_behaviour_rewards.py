"""Rewards of how a reply is written: its length, its use of tools, its repetitions. Tables by hand,
and laws."""

from __future__ import annotations

import random

import pytest

from rlkit.errors import ConfigError
from rlkit.rewards import length, repetition, soft_length, tool_usage
from rlkit.types import Rollout, Step, Task, ToolCall, ToolResult


def step(content: str = "", *, tokens: int = 0, thinking: str = "", calls: str = "") -> Step:
    """`calls`: one letter a call; o worked, f failed, u was never answered."""
    made = tuple(ToolCall(f"call_{i}", "calculator", {}) for i in range(len(calls)))
    results = tuple(
        ToolResult(f"call_{i}", "calculator", "4", ok=c == "o")
        for i, c in enumerate(calls)
        if c != "u"
    )
    return Step(
        (),
        (),
        (1,) * tokens,
        (-1.0,) * tokens,
        "stop",
        thinking,
        content,
        tool_calls=made,
        tool_results=results,
    )


def rollout(*steps: Step) -> Rollout:
    return Rollout(Task("t", ()), steps)


def words(count: int) -> str:
    return " ".join(f"w{i}" for i in range(count))


# ------------------------------------------------------------------------------------------- length


@pytest.mark.parametrize(
    ("count", "score"), [(0, -0.5), (49, -0.5), (50, 0.0), (500, 0.0), (501, -0.3)]
)
def test_length_is_the_notebooks_band(count, score):
    assert length(rollout(step(words(count)))) == score


def test_length_counts_words_of_the_last_reply_or_tokens_of_all():
    episode = rollout(step(words(80), tokens=30), step("a\n\n b", tokens=30, thinking=words(90)))
    assert length(episode, low=2, high=2, inside=1.0) == 1.0
    assert length(episode, unit="tokens", low=60, high=60, inside=1.0) == 1.0
    assert length(rollout(), low=1, high=9) == -0.5


@pytest.mark.parametrize(
    ("count", "score"), [(0, 0.0), (60, 0.0), (70, -0.5), (80, -1.0), (100, -2.0), (500, -2.0)]
)
def test_soft_length_is_a_ramp(count, score):
    assert soft_length(rollout(step(tokens=count)), limit=100, buffer=40, penalty=2.0) == score


# --------------------------------------------------------------------------------------- tool usage


@pytest.mark.parametrize(
    ("calls", "score"),
    [
        ("", 0.0),
        ("o", 1.0),
        ("ooo", 1.0),
        ("oooo", 0.5),
        ("f", 0.0),
        ("fffff", 0.0),
        ("offff", 1.0),
        ("u", 0.0),
    ],
)
def test_tool_usage_counts_calls_that_worked(calls, score):
    """The slip: failed calls rewarded. They do not count as too many either."""
    assert tool_usage(rollout(step(calls=calls))) == score


def test_tool_usage_counts_all_replies_and_may_have_no_upper_bound():
    episode = rollout(step(calls="oo"), step(calls="fo"), step(calls="o"))
    assert (
        tool_usage(episode) == 0.5
        and tool_usage(episode, high=None) == 1.0
        and tool_usage(episode, low=5, high=None) == 0.0
    )


# --------------------------------------------------------------------------------------- repetition


@pytest.mark.parametrize(
    ("text", "n", "score"),
    [
        ("", 3, 0.0),
        ("a b", 3, 0.0),  # shorter than an n-gram
        ("a b c", 3, 0.0),
        ("a b a b a b", 2, -(1 - 2 / 5)),  # ab ba ab ba ab
        ("So so SO", 1, -2 / 3),
        ("a " * 100, 3, -(1 - 1 / 98)),
    ],
)
def test_repetition_by_hand(text, n, score):
    assert repetition(rollout(step(text)), n=n) == pytest.approx(score)


def test_repetition_counts_thinking_and_looks_at_each_text_by_itself():
    assert repetition(
        rollout(step("done", thinking="a a a a a")), n=2, penalty=0.5
    ) == pytest.approx(-0.5 * 3 / 4)
    assert repetition(rollout(step("let me see"), step("let me see")), n=3) == 0.0
    assert (
        repetition(rollout(step("a", thinking="a"), step("a")), n=2) == 0.0
    )  # no n-gram spans two texts


# --------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize(
    ("reward", "low", "high"),
    [
        (length, -0.5, 0.0),
        (soft_length, -1.0, 0.0),
        (tool_usage, 0.0, 1.0),
        (repetition, -1.0, 0.0),
    ],
)
def test_scores_stay_in_their_range_and_every_rollout_has_one(reward, low, high):
    generator = random.Random(0)
    for _ in range(50):
        steps = [
            step(
                " ".join(generator.choices("abc", k=generator.randrange(700))),
                tokens=generator.randrange(700),
                calls="".join(generator.choices("ofu", k=generator.randrange(6))),
            )
            for _ in range(generator.randrange(3))
        ]
        assert low <= reward(rollout(*steps)) <= high


@pytest.mark.parametrize(
    "call",
    [
        lambda r: length(r, low=5, high=4),
        lambda r: length(r, low=-1),
        lambda r: length(r, unit="letters"),
        lambda r: tool_usage(r, low=2, high=1),
        lambda r: soft_length(r, limit=10, buffer=0),
        lambda r: soft_length(r, limit=10, buffer=11),
        lambda r: repetition(r, n=0),
        lambda r: repetition(r, penalty=-1.0),
    ],
    ids=range(8),
)
def test_numbers_out_of_range_are_refused(call):
    with pytest.raises(ConfigError):
        call(rollout(step("a")))
