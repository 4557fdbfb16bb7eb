"""The python tool: what it prints, its last value, its errors as sentences, and nothing of this machine."""

from __future__ import annotations

import pytest

from laws import each
from rlkit.environments import execute, python_tool, tool_name, tool_schema, tool_use
from rlkit.sandbox import Sandbox
from rlkit.system.loops import run
from rlkit.types import ToolCall


def executed(*args, **settings):
    """What `execute` gives, in an event loop of its own."""
    return run(execute(*args, **settings))


TOOL = python_tool(sandbox=Sandbox(time_limit=0.5))

CALLS = {
    "value": ("1 + 1", "2", True),
    "text is shown as a literal": ("'a' + 'b'", "'ab'", True),
    "prints": ("for i in range(3): print(i)", "0\n1\n2", True),
    "prints, then a value": ("print('a')\nx = 3\nx", "a\n3", True),
    "nothing": ("x = 1", "(no output)", True),
    "None is nothing": ("None", "(no output)", True),
    "main guard": ("if __name__ == '__main__': print('main')", "main", True),
    "error": ("print('before')\n1 / 0", "ZeroDivisionError: division by zero (line 2); before that it printed: before", False),
    "not Python": ("1 +", "SyntaxError", False),
    "endless": ("while True: pass", "took longer", False),
    "exit": ("import os\nos._exit(0)", "ended early", False),
    "file": ("open('/etc/passwd').read()", "PermissionError", False),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "PermissionError", False),
    "long": ("'x' * 10**4", "[cut: 10002 characters", True),
    "long before an error": ("print('x' * 10**4)\n1 / 0", "ZeroDivisionError", False),
}


@each("name", CALLS)
def test_what_the_policy_reads(name):
    code, text, ok = CALLS[name]
    result = executed(ToolCall("1", "python", {"code": code}), {"python": TOOL}, max_chars=100)
    assert result.ok is ok and text in result.content and len(result.content) < 200
    if ok and name != "long":
        assert result.content == text


def test_calls_keep_nothing():
    assert TOOL("x = 1") == "(no output)"
    with pytest.raises(ValueError, match="NameError"):
        TOOL("x")


def test_its_schema_has_the_code_alone():
    schema = tool_schema(TOOL)["function"]
    assert schema["name"] == "python" == tool_name(TOOL) and list(schema["parameters"]["properties"]) == ["code"]
    assert tool_use(tools={"python": TOOL}).max_steps == 4
