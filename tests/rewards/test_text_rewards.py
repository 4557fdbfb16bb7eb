"""Rewards on text: whole words, not substrings; equality; forms; and what each makes of an empty
truth."""

from __future__ import annotations

from functools import partial

import pytest

from parametrise import each
from rlkit.environments import split_thinking
from rlkit.errors import ConfigError
from rlkit.rewards import contains, exact_match, extract_answer, format_match, numeric
from rlkit.types import Rollout, Step, Task


def rollout(
    content: str, truth: str = "", finish_reason: str = "stop", thinking: str = ""
) -> Rollout:
    return Rollout(
        Task("t", (), truth),
        (Step((), (), (), (), finish_reason, thinking=thinking, content=content),),
    )


def test_exact_match_strips_and_folds_on_request():
    assert exact_match(rollout(" Paris\n", "Paris")) == 1.0
    assert exact_match(rollout("paris", "Paris")) == 0.0
    assert exact_match(rollout("PARIS", "paris"), ignore_case=True) == 1.0
    assert exact_match(rollout("Paris!", "Paris"), wrong=-1.0) == -1.0


def test_exact_match_compares_what_a_parse_gives():
    """Equality after the parse, never a substring; what cannot be parsed of the truth cannot be
    scored."""
    parsed = partial(exact_match, parse=extract_answer)
    assert [parsed(rollout(text, "10")) for text in ("it is 10.0", "#### 1", "100", "none")] == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    assert (
        parsed(rollout("none", "10")).status == "unparseable"
        and parsed(rollout("10", "no number")) is None
    )
    assert (
        exact_match(rollout("B", "b"), parse=str.swapcase) == 0.0
        and exact_match(rollout("B", "b"), parse=str.upper) == 1.0
    )


def test_an_answer_inside_an_unclosed_thinking_block_is_none():
    thinking, content, closed = split_thinking("<think>\nit is Paris, so Paris")
    assert not closed
    for reward in (exact_match, contains, partial(format_match, pattern="Paris"), numeric):
        found = reward(rollout(content, "7" if reward is numeric else "Paris", thinking=thinking))
        assert found == 0.0


@each(
    ("truth", "text", "expected"),
    [
        ("1", "10", 0.0),
        ("1", "it is 1.", 1.0),
        ("1", "1.5", 0.0),
        ("1", "1,000", 0.0),
        ("5", "1.5", 0.0),
        ("1", "-1", 0.0),
        ("1", "1/2", 0.0),
        ("1", "1, 2", 1.0),
        ("correct", "incorrect", 0.0),
        ("harm", "harmless", 0.0),
        ("New York", "in New\n  York, then", 1.0),
        ("C++", "use C++!", 1.0),
        ("a.c", "abc", 0.0),
    ],
)
def test_contains_finds_whole_words_only(truth, text, expected):
    assert contains(rollout(text, truth)) == expected


def test_contains_folds_case_on_request():
    assert contains(rollout("in paris", "Paris")) == 0.0
    assert contains(rollout("in paris", "Paris"), ignore_case=True) == 1.0


@pytest.mark.parametrize("reward", [exact_match, contains])
@pytest.mark.parametrize("truth", ["", " \n"])
def test_empty_truth_cannot_be_scored(reward, truth):
    assert reward(rollout("", truth)) is None


def test_format_searches_or_covers_the_whole_reply():
    assert format_match(rollout("so #### 18 \n"), pattern=r"#### \d+") == 1.0
    assert format_match(rollout("so #### 18 \n"), pattern=r"#### \d+", whole=True) == 0.0
    assert format_match(rollout(" #### 18 \n"), pattern=r"#### \d+", whole=True) == 1.0


@pytest.mark.parametrize("pattern", ["", "("])
def test_format_refuses_a_pattern_that_is_none(pattern):
    with pytest.raises(ConfigError, match="pattern"):
        format_match(rollout("x"), pattern=pattern)


@pytest.mark.parametrize(
    "reward", [exact_match, contains, lambda r: format_match(r, pattern="Paris")]
)
def test_thinking_and_replies_cut_by_length_do_not_count(reward):
    assert reward(rollout("Paris", "Paris", finish_reason="length")) == 0.0
    assert reward(rollout("", "Paris", thinking="Paris")) == 0.0
