"""The notebooks' tool functions: calls as dicts, read from a reply and executed."""

from __future__ import annotations

import json

from parametrise import each
from rlkit.environments import calculator
from rlkit.notebook import execute_tool_call, has_tool_call, parse_tool_calls


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_of_a_reply_are_those_outside_its_thinking():
    """The slips: a call inside the thinking is run, and a call that cannot be read vanishes."""
    text = f"<think>{call('add', a=1)}</think>{call('add', a=2)}<tool_call>oops</tool_call>"
    good, bad = parse_tool_calls(text)
    assert good == {
        "id": "call_0",
        "type": "function",
        "function": {"name": "add", "arguments": {"a": 2}},
    }
    assert bad["id"] == "call_1" and "bad JSON" in bad["error"]
    assert execute_tool_call(bad, {}) == bad["error"]
    assert (
        has_tool_call(text)
        and has_tool_call("<tool_call>oops")
        and not has_tool_call(f"<think>{call('add', a=1)}")
    )


@each(
    ("given", "text"),
    [
        ({"function": {"name": "calculator", "arguments": {"expression": "2 + 2"}}}, "4"),
        ({"function": {"name": "calculator", "arguments": '{"expression": "2 + 2"}'}}, "4"),
        ({"name": "calculator", "arguments": {"expression": "2 + 2"}}, "4"),
        ({"function": {"name": "calculator", "arguments": "{"}}, "bad JSON"),
        ({"function": {"name": "nope", "arguments": {}}}, "no tool 'nope'"),
        ({"function": {"name": 3, "arguments": {}}}, "non-empty string"),
        ({"function": {"name": "calculator", "arguments": {"x": 1}}}, "unexpected argument 'x'"),
        (
            {"function": {"name": "calculator", "arguments": {"expression": "__import__('os')"}}},
            "not part of arithmetic",
        ),
        ({"function": None}, "null, not an object"),
        ({}, "name is missing"),
        ("calculator", "a string, not an object"),
    ],
)
def test_whatever_a_call_does_wrong_is_text(given, text):
    assert text in execute_tool_call(given, {"calculator": calculator})
