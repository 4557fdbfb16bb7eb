"""Tools: the schema a policy is shown, and every wrong call coming back as a sentence."""

from __future__ import annotations

import functools
from typing import Literal

import pytest

from rlkit.environments import calculator, execute, tool_schema
from rlkit.errors import ConfigError
from rlkit.types import ToolCall


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", at: list[float] | None = None) -> dict[str, object]:
    """Tells the weather.

    Args:
        city: The city.
        days: How many days.
        unit: The unit.
        at: Latitude and longitude.
    """
    return {"city": city, "days": days}


def stop(code: int) -> str:
    raise SystemExit(code)


def fail() -> str:
    raise KeyError("x")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def fail_silently() -> str:
    raise Unprintable


def interrupted() -> str:
    raise KeyboardInterrupt


def flood(n: int) -> str:
    return "x" * n


def half() -> str:
    return "\ud800"


def undocumented(x):
    return x


TOOLS = {f.__name__: f for f in (weather, stop, fail, fail_silently, interrupted, flood, half, calculator)}


def call(name: str, **arguments) -> ToolCall:
    return ToolCall("call_7", name, arguments)


def test_schema_of_the_calculator_is_short():
    function = tool_schema(calculator)["function"]
    assert function["name"] == "calculator"
    assert function["description"] == "Evaluates arithmetic."
    assert function["parameters"]["properties"] == {"expression": {"type": "string", "description": "The expression."}}


def test_a_bound_keyword_leaves_the_schema():
    schema = tool_schema(functools.partial(weather, city="Paris"))["function"]
    assert schema["name"] == "weather"
    assert "city" not in schema["parameters"]["properties"] and "city" not in schema["parameters"].get("required", [])


def test_a_function_without_docstring_is_refused_with_its_place_and_an_example():
    with pytest.raises(ConfigError, match=r"test_tools\.py:\d+: .*'undocumented'(?s:.*)Args:"):
        tool_schema(undocumented)


def test_a_result_carries_the_id_and_text():
    result = execute(call("weather", city="Paris", days=2, unit="F", at=[48.9, 2]), TOOLS)
    assert result[:4] == ("call_7", "weather", "{'city': 'Paris', 'days': 2}", True)
    assert result.seconds >= 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (call("nope"), ["no tool 'nope'", "calculator", "weather"]),
        (call("weather"), ["missing argument 'city'", "weather(city: str, days: int = 1"]),
        (call("weather", city="Paris", town="x"), ["unexpected argument 'town'"]),
        (call("weather", city=3), ["'city' must be str, not int"]),
        (call("weather", city="Paris", days="2"), ["'days' must be int, not str"]),
        (call("weather", city="Paris", days=True), ["'days' must be int, not bool"]),
        (call("weather", city="Paris", days=1.5), ["'days' must be int, not float"]),
        (call("weather", city="Paris", unit="K"), ["'unit' must be", "C", "F"]),
        (call("weather", city="Paris", at=["north"]), ["'at' must be"]),
        (call("calculator", expression="1/0"), ["Error: division by zero."]),
        (call("fail"), ["KeyError"]),
        (call("fail_silently"), ["Unprintable"]),
        (call("stop", code=0), ["SystemExit"]),
        (ToolCall("call_7", "weather", {}, error="Error: bad JSON"), ["Error: bad JSON"]),
        (ToolCall("call_7", ["list"], {}), ["Error"]),
        (ToolCall("call_7", "weather", None), ["Error"]),
    ],
)
def test_every_wrong_call_comes_back_as_a_sentence(wrong, words):
    result = execute(wrong, TOOLS)
    assert (result.id, result.ok) == ("call_7", False)
    assert all(word in result.content for word in words), result.content


def test_a_call_that_failed_to_parse_is_not_run():
    assert execute(ToolCall("call_7", "flood", {"n": 1}, error="bad"), TOOLS).content == "bad"


def test_a_keyboard_interrupt_passes():
    with pytest.raises(KeyboardInterrupt):
        execute(call("interrupted"), TOOLS)


def test_a_long_result_is_cut_and_says_so():
    assert execute(call("flood", n=2000), TOOLS).content == "x" * 2000
    content = execute(call("flood", n=2001), TOOLS).content
    assert content.startswith("x" * 2000 + "\n") and "2001" in content
    assert execute(call("flood", n=9), TOOLS, max_chars=4).content.startswith("xxxx\n")


def test_a_result_can_be_tokenised():
    execute(call("half"), TOOLS).content.encode("utf-8")


def test_a_tool_whose_annotations_cannot_be_resolved_is_still_called():
    def odd(x: Missing) -> str:  # noqa: F821
        return str(x)

    assert execute(call("odd", x=1), {"odd": odd}).content == "1"
    assert "missing argument 'x'" in execute(call("odd"), {"odd": odd}).content
