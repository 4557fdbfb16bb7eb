"""Hermes tool calls: no call vanishes, no text raises."""

from __future__ import annotations

import pytest

from parametrise import each
from rlkit.environments import calculator, execute, get_weather, hermes, none, xml
from rlkit.system.loops import run

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
    assert hermes('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')[1][
        0
    ].arguments == {"a": 1}
    assert hermes('<tool_call>{"name": "f"}</tool_call>')[1][0][1:] == ("f", {}, "")


@each(
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
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "", "5000 digits"),
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
    assert (
        calls[1].name == "calculator"
        and calls[1].arguments == {}
        and "</tool_call> is missing" in calls[1].error
    )


def test_the_error_of_a_bad_call_is_what_the_policy_reads():
    _, calls = hermes("<tool_call>calculator(1 + 1)</tool_call>")
    result = run(execute(calls[0], {"calculator": calculator}))
    assert not result.ok and result.content == calls[0].error


def ratio(top: int, *, bottom: float) -> float:
    return top / bottom


def count(n: int, unit: str = "") -> str:
    return f"{n}{unit}"


def now() -> str:
    return "noon"


TOOLS = {f.__name__: f for f in (calculator, get_weather, ratio, count, now)}


def test_xml_gives_its_text_to_the_only_required_parameter():
    """In order, parameters with defaults left to their defaults, a text for a number read as JSON;
    a Hermes tag is none."""
    text = (
        "So <tool name=\"calculator\"> 1 < 2 </tool>\n<tool\n name = 'get_weather'"
        ' >Paris</tool><tool name="count">3</tool> end'
    )
    content, calls = xml(
        text + '<tool name="now"></tool><tool_call>{}</tool_call> <tools>', tools=TOOLS
    )
    assert content == "So\nend\n<tool_call>{}</tool_call> <tools>"
    assert [(c.id, c.name, c.arguments, c.error) for c in calls] == [
        ("call_0", "calculator", {"expression": "1 < 2"}, ""),
        ("call_1", "get_weather", {"city": "Paris"}, ""),
        ("call_2", "count", {"n": 3}, ""),
        ("call_3", "now", {}, ""),
    ]
    assert (
        "'n' must be int, not str"
        in run(execute(xml('<tool name="count">three</tool>', tools=TOOLS)[1][0], TOOLS)).content
    )


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (
            '<tool name="ratio">1</tool>',
            "ratio",
            "ratio(top: int, *, bottom: float), which has 2 required parameters",
        ),
        ('<tool name="now">x</tool>', "now", "now(), which has 0 required parameters"),
        ('<tool name="nope">x</tool>', "nope", "there is no tool 'nope'; the tools are calculator"),
        ('<tool name="calculator">1 + 1', "calculator", "</tool> is missing"),
        ("<tool>1 + 1</tool>", "", "the name is missing"),
        ("<tool/>", "", "the name is missing"),
        ("<tool name=calculator>1</tool>", "", "the name is missing"),
        ('<tool name=" ">1</tool>', "", "the name is missing"),
        ('<tool name="calculator" id="3">1</tool>', "", "the name is missing"),
    ],
)
def test_xml_that_is_no_call_becomes_an_error_that_says_why(text, name, reason):
    content, calls = xml(f"a {text}", tools=TOOLS)
    assert content == "a" and [(c.name, c.arguments) for c in calls] == [(name, {})]
    assert reason in calls[0].error and 'Write\n<tool name="tool">' in calls[0].error


def test_xml_text_without_a_call_is_unchanged():
    assert xml(" The </tool> <toolbox> is 2.\n", tools=TOOLS) == (
        " The </tool> <toolbox> is 2.\n",
        [],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "</tool_call><tool_call>",
        '<tool_call>{"name": "',
        "[",
    ],
)
def test_a_megabyte_of_tags_is_read(piece):
    _, calls = hermes(piece * (10**6 // len(piece)))
    assert all(call.error for call in calls)
