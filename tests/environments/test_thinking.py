"""Thinking: the last closing tag counts, tags are in neither part, and an unclosed block hides what follows."""

from __future__ import annotations

import pytest

from rlkit.environments import split_thinking


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" 18 ", ("", " 18 ", True)),
        ("<think>\na\n</think>\n\n18", ("a", "18", True)),
        ("a</think>18", ("a", "18", True)),  # the opening tag stood in the prompt
        ("<think>a</think>b</think>18", ("ab", "18", True)),
        ("<think>a<think>b</think>18", ("ab", "18", True)),
        ("<think>the answer is 18", ("the answer is 18", "", False)),
        ("so <think>18", ("18", "so", False)),
        ("<think>a</think> b <think>18", ("a\n18", "b", False)),
        ("</think>", ("", "", True)),
        ("", ("", "", True)),
    ],
)
def test_split(text, expected):
    assert split_thinking(text) == expected


def test_a_block_that_the_prompt_opened_must_be_closed():
    assert split_thinking("the answer is 18", opened=True) == ("the answer is 18", "", False)
    assert split_thinking("a</think>18", opened=True) == ("a", "18", True)
