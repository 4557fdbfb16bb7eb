"""Read tool calls from a reply. A parser takes a reply's content, without its thinking. A parser
never raises, whatever the text.

A failed attempt at a call becomes a ToolCall with an `error` for the policy, so no call is lost. A
parser numbers the calls within the reply (call_0, call_1, …). The code that keeps the conversation
later makes the ids unique.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlkit.environments.tools import text_arguments
from rlkit.types import ToolCall, reaches

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FORM = f'{OPEN}\n{{"name": "tool", "arguments": {{"parameter": "value"}}}}\n{CLOSE}'
XML_START = re.compile(r"<tool(?=[\s/>])")
XML_CLOSE = "</tool>"
XML_OPEN = re.compile(r"<tool\s+name\s*=\s*(?:\"([^\"<>]*)\"|'([^'<>]*)')\s*>")
XML_FORM = f'<tool name="tool">text{XML_CLOSE}'
# depth of nested lists and objects; a deeper value would exhaust the stack when the history is
# rendered
MAX_DEPTH = 64


def hermes(content: str) -> tuple[str, list[ToolCall]]:
    """Parse every `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

    Args:
      content: a reply without its thinking.
    Returns: the content without the calls, and the calls in order. The remaining pieces of the
      content are stripped and joined by newlines. Without a call, the content is unchanged. A call
      ends at the first closing tag. A call without the key "arguments" has no arguments. The
      arguments may also be given as a JSON string that holds an object. A call has an `error` and
      no arguments if it is not closed, if it is not strict JSON (NaN and Infinity are not), or if
      it is not an object. The same holds if its name is empty or not a string, or if its arguments
      are not an object.
    Source: the Hermes function-calling format, used by Qwen2.5 and Qwen3.
    """
    pieces: list[str] = []
    calls: list[ToolCall] = []
    rest = content
    while OPEN in rest:
        before, _, rest = rest.partition(OPEN)
        pieces.append(before)
        body, end, rest = rest.partition(CLOSE)
        read = partial(load_json, body.strip())
        calls.append(make_call(f"call_{len(calls)}", read, closed=bool(end)))
    if not calls:
        return content, []
    pieces.append(rest)
    return "\n".join(piece.strip() for piece in pieces if piece.strip()), calls


@reaches(tools="calls")
def xml(
    content: str, *, tools: Mapping[str, Callable[..., Any]] = {}
) -> tuple[str, list[ToolCall]]:
    """Parse every `<tool name="…">text</tool>`. The text is the argument for the tool's only
    required parameter.

    Args:
      content: a reply without its thinking.
      tools: tools by name. An environment passes its own tools to a parser with this keyword.
    Returns: the content without the calls, and the calls, as in `hermes`. The text is stripped. If
      the parameter is not a string, the text is read as JSON. A call has an `error` and no
      arguments if it is not closed, or if it has no name in quotes. The same holds if there is no
      tool of this name, or if the tool does not have exactly one required parameter. If the tool
      has no required parameter and the text is empty, the call has no arguments.
    """
    pieces: list[str] = []
    calls: list[ToolCall] = []
    rest = content
    while start := XML_START.search(rest):
        pieces.append(rest[: start.start()])
        opening = XML_OPEN.match(rest, start.start())
        name = (opening[1] or opening[2] or "").strip() if opening else ""
        body, end, rest = rest[(opening or start).end() :].partition(XML_CLOSE)
        calls.append(_xml_call(f"call_{len(calls)}", name, body.strip(), tools, closed=bool(end)))
    if not calls:
        return content, []
    pieces.append(rest)
    return "\n".join(piece.strip() for piece in pieces if piece.strip()), calls


def none(content: str) -> tuple[str, list[ToolCall]]:
    """Read no tool calls: return the content as it is."""
    return content, []


def make_call(id: str, read: Callable[[], Any], *, closed: bool = True) -> ToolCall:
    """Make a call from the object {"name": …, "arguments": {…}} returned by `read`. If the object
    is not a valid call, the result has an `error` with the mistake and the expected form.

    Args:
      read: function that returns the object, or raises ValueError with a readable reason. The
        arguments may be a JSON string of an object.
      closed: whether the closing tag is there.
    """
    name = ""
    try:
        payload = read()
        if not isinstance(payload, dict):
            raise ValueError(f"the call is {_kind(payload)}, not an object")
        if not isinstance(payload.get("name"), str) or not payload["name"].strip():
            raise ValueError(
                "the name is missing"
                if "name" not in payload
                else "the name must be a non-empty string"
            )
        name = payload["name"].strip()
        arguments = payload.get("arguments", {})
        if isinstance(arguments, str):
            arguments = load_json(arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments are {_kind(arguments)}, not an object")
        if not closed:
            raise ValueError(f"{CLOSE} is missing")
    except ValueError as error:
        return ToolCall(
            id=id, name=name, arguments={}, error=f"Error: not a tool call: {error}. Write\n{FORM}"
        )
    return ToolCall(id=id, name=name, arguments=arguments)


def _xml_call(
    id: str, name: str, text: str, tools: Mapping[str, Callable[..., Any]], *, closed: bool
) -> ToolCall:
    """Make the call of one tag. If the tag is not a valid call, the result has an `error` with the
    mistake and the expected form."""
    try:
        if not name:
            raise ValueError("the name is missing")
        if not closed:
            raise ValueError(f"{XML_CLOSE} is missing")
        if name not in tools:
            raise ValueError(
                f"there is no tool {name!r}; the tools are {', '.join(sorted(tools)) or 'none'}"
            )
        arguments = text_arguments(name, tools[name], text, load_json)
    except ValueError as error:
        return ToolCall(
            id=id,
            name=name,
            arguments={},
            error=f"Error: not a tool call: {error}. Write\n{XML_FORM}",
        )
    return ToolCall(id=id, name=name, arguments=arguments)


def load_json(text: str) -> Any:
    """Read strict JSON. The value must be one that a chat template can render again. Raises:
    ValueError with a readable reason for any other text."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"bad JSON at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"the JSON is nested deeper than {MAX_DEPTH} levels") from None
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"the JSON is nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, str) and re.search("[\ud800-\udfff]", item):
            raise ValueError("the JSON holds half of a surrogate pair")
        if isinstance(item, dict):
            pending += [(part, depth + 1) for pair in item.items() for part in pair]
        if isinstance(item, list):
            pending += [(part, depth + 1) for part in item]
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _parse_finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {text[:20]}… is too large")
    return number


def _kind(value: Any) -> str:
    """Return the name of a JSON value's type, with its article."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number")
