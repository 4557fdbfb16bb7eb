"""Hermes tool calls: no call vanishes, no text raises."""

from __future__ import annotations

import json
import random

import pytest

from rlkit.environments import calculator, execute, hermes, none

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 1"}}\n</tool_call>'


def test_calls_in_order_and_content_without_them():
    content, calls = hermes(f"  Let me see.\n{CALL}\n{CALL.replace('1 + 1', '2')} done ")
    assert content == "Let me see.\ndone"
    assert [(c.id, c.name, c.arguments, c.error) for c in calls] == [
        ("call_0", "calculator", {"expression": "1 + 1"}, ""),
        ("call_1", "calculator", {"expression": "2"}, ""),
    ]


def test_text_without_a_call_is_unchanged():
    assert hermes(" The answer is 2.\n</tool_call>") == (" The answer is 2.\n</tool_call>", [])
    assert none(CALL) == (CALL, [])


def test_arguments_may_be_a_json_string_or_left_out():
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')[1][0].arguments == {"a": 1}
    assert hermes('<tool_call>{"name": "f"}</tool_call>')[1][0][1:] == ("f", {}, "")


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "", "bad JSON"),
        ("", "", "bad JSON"),
        ('{"name": "f"} {"name": "g"}', "", "bad JSON"),
        ('{"name": "f", "arguments": {"a": "\x01"}}', "", "bad JSON"),
        ('["f"]', "", "a list, not an object"),
        ("3", "", "a number, not an object"),
        ("{}", "", "name is missing"),
        ('{"name": 3}', "", "non-empty string"),
        ('{"name": " "}', "", "non-empty string"),
        ('{"name": "f", "arguments": [1]}', "f", "a list, not an object"),
        ('{"name": "f", "arguments": null}', "f", "null, not an object"),
        ('{"name": "f", "arguments": "[1]"}', "f", "a list, not an object"),
        ('{"name": "f", "arguments": "x"}', "f", "bad JSON"),
        ('{"name": "f", "arguments": {"a": NaN}}', "", "NaN is not JSON"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "", "-Infinity is not JSON"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "", "too large"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 2000 + "}}", "", "2000 digits"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "", "surrogate"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}", "", "nested deeper"),
        ("[" * 10**5, "", "nested deeper"),
        ('{"name": "f", "arguments": {}} <tool_call>' + CALL[11:-12], "", "bad JSON"),
    ],
)
def test_text_that_is_no_call_becomes_an_error_that_says_why(body, name, reason):
    content, calls = hermes(f"a <tool_call>{body}</tool_call> b")
    assert content == "a\nb"
    assert [(c.name, c.arguments) for c in calls] == [(name, {})]
    assert reason in calls[0].error and "Write\n<tool_call>" in calls[0].error


def test_a_call_that_is_never_closed_is_an_error():
    content, calls = hermes(CALL + " and " + CALL.removesuffix("</tool_call>"))
    assert content == "and"
    assert [c.error == "" for c in calls] == [True, False]
    assert calls[1].name == "calculator" and calls[1].arguments == {} and "</tool_call> is missing" in calls[1].error


def test_the_error_of_a_bad_call_is_what_the_policy_reads():
    _, calls = hermes("<tool_call>calculator(1 + 1)</tool_call>")
    result = execute(calls[0], {"calculator": calculator})
    assert not result.ok and result.content == calls[0].error


def malformed(rng: random.Random) -> str:
    """A reply as a bad policy writes it: calls and junk in any order, then cut, spliced or repeated."""
    junk = [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name":',
        '"calculator"',
        '"arguments":',
        "{",
        "}",
        "[",
        "]",
    ]
    junk += [
        '"',
        "\\",
        "\x00",
        "\x1b",
        "\ud800",
        "\\ud800",
        "\U0001f600",
        "NaN",
        "1e999",
        "null",
        "true",
        "-",
        "9" * 50,
        ",",
        "\n",
    ]
    junk += [
        CALL,
        CALL.replace("1 + 1", "9**9**9"),
        '"name"',
        ":",
        '{"expression": 3}',
        '{"expr": "1"}',
        "<|im_end|>",
        "'",
    ]
    text = "".join(rng.choices(junk, k=rng.randrange(1, 30)))
    start, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return rng.choice([text, text[start:end], text[:start] + text[end:], text.replace("calculator", "3"), CALL[:start] + text])


def test_no_malformed_reply_raises_and_each_call_is_classified():
    rng = random.Random(0)
    kinds = {"ok": 0, "parse": 0, "run": 0}
    for _ in range(4000):
        text = malformed(rng)
        content, calls = hermes(text)
        assert len(calls) == 0 or content == content.strip()
        assert bool(calls) == ("<tool_call>" in text)
        for call in calls:
            json.dumps(call.arguments, allow_nan=False).encode("utf-8")
            result = execute(call, {"calculator": calculator})
            result.content.encode("utf-8")
            assert result.ok or result.content
            kinds["parse" if call.error else "ok" if result.ok else "run"] += 1
    assert min(kinds.values()) > 50, kinds  # the generator reaches every kind


@pytest.mark.parametrize("piece", ["<tool_call>", "<tool_call></tool_call>", "</tool_call><tool_call>", '<tool_call>{"name": "', "["])
def test_a_megabyte_of_tags_is_read(piece):
    _, calls = hermes(piece * (10**6 // len(piece)))
    assert all(call.error for call in calls)
