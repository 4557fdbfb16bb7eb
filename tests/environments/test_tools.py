"""Tools: the schema a policy is shown, and every wrong call coming back as a sentence."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from typing import Any, Literal

import pytest

from parametrise import each
from rlkit.environments import (
    PythonSession,
    calculator,
    execute,
    get_weather,
    name_tools,
    python_tool,
    tool_schema,
    with_schema,
)
from rlkit.errors import ConfigError, Interrupted
from rlkit.system.deadline import warn_once
from rlkit.system.loops import run
from rlkit.types import ToolCall


def executed(*args, **settings):
    """What `execute` gives, in an event loop of its own."""
    return run(execute(*args, **settings))


def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", at: list[float] | None = None
) -> dict[str, object]:
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


def leave(status: int) -> str:
    os._exit(status)


def leave_at_once(status: int) -> str:
    os._exit(status)


leave_at_once.bounded = True  # runs without a thread


def forking() -> str:
    child = os.fork()
    if not child:
        os._exit(7)
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def flood(n: int) -> str:
    return "x" * n


def half() -> str:
    return "\ud800"


RELEASED = threading.Event()  # never set while a test looks


def hang() -> str:
    RELEASED.wait()
    return "late"


class Slow:
    def __str__(self) -> str:
        return hang()


def lazy() -> Slow:
    return Slow()


def own_timeout() -> str:
    raise TimeoutError("no answer from the server")


def undocumented(x):
    return x


ENDS = (stop, interrupted, leave, leave_at_once, forking)
TOOLS = {
    f.__name__: f
    for f in (
        weather,
        fail,
        fail_silently,
        flood,
        half,
        own_timeout,
        calculator,
        get_weather,
        *ENDS,
    )
}


def call(name: str, **arguments) -> ToolCall:
    return ToolCall("call_7", name, arguments)


def test_schema_of_the_calculator_is_short():
    function = tool_schema(calculator)["function"]
    assert function["name"] == "calculator"
    assert function["description"] == "Evaluates arithmetic."
    assert function["parameters"]["properties"] == {
        "expression": {"type": "string", "description": "The expression."}
    }


def test_a_bound_keyword_leaves_the_schema():
    schema = tool_schema(functools.partial(weather, city="Paris"))["function"]
    assert schema["name"] == "weather"
    assert "city" not in schema["parameters"]["properties"] and "city" not in schema[
        "parameters"
    ].get("required", [])


def test_the_policy_neither_changes_nor_reads_a_bound_keyword():
    """A root folder that a config had bound to a tool could be called with another one, and an
    answer to a wrong call quoted it."""
    tools = {"weather": functools.partial(weather, unit="F")}
    for arguments in ({"city": "Paris", "unit": "C"}, {"town": "Paris"}):
        refused = executed(call("weather", **arguments), tools)
        assert not refused.ok and "unexpected argument" in refused.content
        assert "'F'" not in refused.content and "unit=" not in refused.content
    assert executed(call("weather", city="Paris"), tools).ok


class Shop:
    """A tool class of the user's."""

    def search(self, text: str) -> str:
        """Searches."""
        return text

    def buy(self, text: str) -> str:
        """Buys."""
        return text


def test_tools_are_named_with_the_place_of_those_that_are_not_rlkits():
    """Also a bound keyword, an object that is called, and methods of an instance."""

    class Asked:
        def __call__(self, text: str) -> str:
            return text

    shop = Shop()
    own = {"calculator": calculator, "python": python_tool()}
    given = {"search": shop.search, "weather": functools.partial(weather, unit="F")}
    assert name_tools({**own, **given, "buy": shop.buy}) == (
        f"calculator, python; search, buy ({__name__}.Shop); weather ({__name__})"
    )
    assert name_tools({"python": PythonSession().python}) == "python"
    assert name_tools({"ask": Asked()}) == f"ask ({__name__})"


def test_a_function_without_docstring_is_refused_in_one_line_with_its_place():
    with pytest.raises(ConfigError, match=r"test_tools\.py:\d+\): .*'undocumented'.*Args:") as said:
        tool_schema(undocumented)
    assert "\n" not in str(said.value)


def test_a_result_carries_the_id_and_text():
    result = executed(call("weather", city="Paris", days=2, unit="F", at=[48.9, 2]), TOOLS)
    assert result[:4] == ("call_7", "weather", '{"city": "Paris", "days": 2}', True)
    assert result.seconds >= 0


@each(
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
        (call("own_timeout"), ["Error: TimeoutError: no answer from the server."]),
        (
            call("get_weather", city="Atlantis"),
            ["no weather is known for 'Atlantis'", "Paris, London, Tokyo"],
        ),
        (
            call("get_weather", city="Paris", unit="kelvin"),
            ["'unit' must be", "celsius", "fahrenheit"],
        ),
        (
            call("stop", code=0),
            ["stop tried to end the process", "SystemExit(0) at ", "test_tools.py:"],
        ),
        (call("interrupted"), ["KeyboardInterrupt at ", "test_tools.py:"]),
        (call("leave", status=3), ["os._exit(3) at ", "test_tools.py:"]),
        (call("leave_at_once", status=0), ["os._exit(0) at ", "test_tools.py:"]),
        (ToolCall("call_7", "weather", {}, error="Error: bad JSON"), ["Error: bad JSON"]),
        (ToolCall("call_7", ["list"], {}), ["Error"]),
        (ToolCall("call_7", "weather", None), ["Error"]),
    ],
)
def test_every_wrong_call_comes_back_as_a_sentence(wrong, words):
    result = executed(wrong, TOOLS)
    assert (result.id, result.ok) == ("call_7", False)
    assert all(word in result.content for word in words), result.content


def test_a_call_that_failed_to_parse_is_not_run():
    assert executed(ToolCall("call_7", "flood", {"n": 1}, error="bad"), TOOLS).content == "bad"


def test_a_tool_that_ends_the_process_is_named_to_the_user_once(capsys):
    """The episode went on with a process that was gone: os._exit ran no handler and no
    traceback."""
    warn_once.cache_clear()
    for _ in range(2):
        executed(call("leave", status=3), TOOLS)
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("warning: the tool leave tried to end the process: os._exit(3) at ")
        and "test_tools.py:" in line
    )


def test_a_tool_may_fork_a_process_that_exits():
    """multiprocessing ends its children by os._exit."""
    assert executed(call("forking"), TOOLS).content == "7"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "a signal that rlkit handles"]
)
def test_a_real_interruption_passes(number):
    """A signal reaches the main thread wherever the tool runs; it was answered to the policy as the
    tool's own failure."""

    def handle(signum, frame):
        raise Interrupted(signum)

    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, handle),
        signal.SIGINT: signal.getsignal(signal.SIGINT),
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)
    waiting = threading.Event()

    def wait() -> str:
        os.kill(os.getpid(), number)
        waiting.wait(20)
        return "over"

    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Interrupted):
            executed(call("wait"), {"wait": wait})
    finally:
        waiting.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_long_result_is_cut_and_says_so():
    assert executed(call("flood", n=2000), TOOLS).content == "x" * 2000
    content = executed(call("flood", n=2001), TOOLS).content
    assert content.startswith("x" * 2000 + "\n") and "2001" in content
    assert executed(call("flood", n=9), TOOLS, max_chars=4).content.startswith("xxxx\n")


@pytest.mark.parametrize("tool", [hang, lazy])
def test_a_call_that_takes_too_long_is_given_up(tool):
    """The tool's thread waits for ever; its result, or making text of it, is no longer waited
    for."""
    result = executed(call(tool.__name__), {tool.__name__: tool}, timeout=0.02)
    assert (
        not result.ok
        and result.content == f"Error: {tool.__name__} took longer than 0.02 s and was given up."
    )
    assert result.seconds >= 0.02


def test_a_plain_tool_runs_in_a_thread_unless_it_is_bounded():
    def name() -> str:
        return threading.current_thread().name

    async def named() -> str:
        return name()

    def short() -> str:
        return name()

    short.bounded = True
    here = threading.current_thread().name
    assert all(
        executed(call("name"), {"name": name}, timeout=limit).content != here
        for limit in (None, 9.0)
    )
    for tool in (named, short, functools.partial(short)):  # a config makes the latter
        assert executed(call("tool"), {"tool": tool}).content == here


@pytest.mark.parametrize("timeout", [None, 9.0])
def test_an_async_tool_fails_as_a_plain_one_does(timeout):
    """In the loop's own thread, an exit or a cancellation of its own must end neither the episode
    nor the run."""
    for tool in (stop, fail, interrupted, leave, own_timeout, get_weather):
        arguments = {
            "stop": {"code": 0},
            "leave": {"status": 3},
            "get_weather": {"city": "Paris"},
        }.get(tool.__name__, {})

        async def same(tool=tool, **arguments: Any) -> str:
            await asyncio.sleep(0)
            return tool(**arguments)

        plain, other = (
            executed(call("t", **arguments), {"t": t}, timeout=timeout) for t in (tool, same)
        )
        assert (other.content, other.ok) == (plain.content, plain.ok)

    async def cancelled() -> str:
        raise asyncio.CancelledError

    assert executed(call("t"), {"t": cancelled}).content == "Error: CancelledError."


def test_an_async_tool_that_takes_too_long_is_cancelled():
    ended = []

    async def wait() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    assert (
        executed(call("wait"), {"wait": wait}, timeout=0.02).content
        == "Error: wait took longer than 0.02 s and was given up."
    )
    assert ended == [True]


def test_get_weather_knows_both_units():
    """The example of the docs: three cities, a unit that is a choice in the schema."""
    unit = tool_schema(get_weather)["function"]["parameters"]["properties"]["unit"]
    assert unit["enum"] == ["celsius", "fahrenheit"]
    assert "18 °C" in get_weather("paris ") and "64.4 °F" in get_weather("Paris", "fahrenheit")


SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def test_a_schema_and_an_implementation_make_a_tool():
    """Neither docstring nor types are needed; those that are there are checked, under the schema's
    name."""
    tool = with_schema(SCHEMA, lambda a, b=1: a + b)
    assert tool_schema(tool) == SCHEMA
    assert executed(call("add", a=2), {"add": tool}).content == "3"
    assert "missing argument 'a'" in executed(call("add", b=2), {"add": tool}).content
    assert (
        "'city' must be str"
        in executed(call("add", city=2), {"add": with_schema(SCHEMA, get_weather)}).content
    )


@pytest.mark.parametrize(
    "schema",
    [{}, {"function": {}}, {"function": {"name": 3}}, {"name": "add"}, "add", {"function": "add"}],
)
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(ConfigError, match="is no schema"):
        with_schema(schema, get_weather)


def test_a_schema_without_an_implementation_is_refused():
    with pytest.raises(ConfigError, match="no implementation of 'add'"):
        with_schema(SCHEMA, None)


def test_a_result_can_be_tokenised():
    executed(call("half"), TOOLS).content.encode("utf-8")


def test_a_tool_whose_annotations_cannot_be_resolved_is_still_called():
    def odd(x: Missing) -> str:  # noqa: F821
        return str(x)

    assert executed(call("odd", x=1), {"odd": odd}).content == "1"
    assert "missing argument 'x'" in executed(call("odd"), {"odd": odd}).content


@pytest.mark.parametrize("bounded, turns", [(False, 2), (True, 1)])
def test_an_async_tool_waits_by_its_kind_and_not_by_its_luck(bounded, turns):
    """One that has its answer at once now and then would otherwise join the decoding now at once
    and now later."""

    async def cached() -> str:
        """Looks up."""
        return "here"

    async def count() -> int:
        cached.bounded = bounded
        call = asyncio.create_task(execute(ToolCall("call_0", "cached", {}), {"cached": cached}))
        taken = 0
        while not call.done():
            await asyncio.sleep(0)
            taken += 1
        assert (await call).content == "here"
        return taken

    assert asyncio.run(count()) == turns
