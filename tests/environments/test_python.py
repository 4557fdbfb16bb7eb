"""The python tool: what it prints, its last value, its errors as sentences, and nothing of this
machine."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from parametrise import each
from rlkit.environments import PythonSession, execute, python_tool, tool_name, tool_schema, tool_use
from rlkit.episodes.episode import play
from rlkit.errors import ConfigError
from rlkit.sandbox import Sandbox, SandboxError, interpreter, level
from rlkit.system.loops import run
from rlkit.types import Step, Task, ToolCall


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
    "error": (
        "print('before')\n1 / 0",
        "ZeroDivisionError: division by zero (line 2); before that it printed: before",
        False,
    ),
    "not Python": ("1 +", "SyntaxError", False),
    "endless": ("while True: pass", "took longer", False),
    "exit": ("import os\nos._exit(0)", "ended early", False),
    "file": ("open('/etc/passwd').read()", "PermissionError", False),
    "network": (
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "PermissionError",
        False,
    ),
    "long": ("'x' * 10**4", "[cut: 10002 characters", True),
    "long before an error": ("print('x' * 10**4)\n1 / 0", "ZeroDivisionError", False),
}


@pytest.mark.slow
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
    assert schema["name"] == "python" == tool_name(TOOL) and list(
        schema["parameters"]["properties"]
    ) == ["code"]
    assert tool_use(tools={"python": TOOL}).max_steps == 4


@pytest.mark.slow
def test_a_session_keeps_its_names_until_it_is_lost_and_no_longer():
    """Time, output and an exit take the interpreter and its names; an exception does not. Each
    episode has its own."""
    one, other = PythonSession(sandbox=Sandbox(time_limit=0.5)), PythonSession()
    try:
        assert (
            one.python("x = 20\nx + 1") == "21"
            and one.python("def f(y):\n    return x * y\nf(2)") == "40"
        )
        with pytest.raises(ValueError, match=r"ZeroDivisionError.*\(line 2\)"):
            one.python("x += 1\n1 / 0")
        assert one.python("print(x)") == "21"
        with pytest.raises(ValueError, match="NameError"):
            other.python("x")
        for end in (
            "while True: pass",
            "import os\nos._exit(0)",
            "raise_ = [print('a' * 60000) for _ in range(9)]\nwhile True: print(1)",
        ):
            one.python("x = 1")
            with pytest.raises(ValueError, match="the variables of this session are lost"):
                one.python(end)
            with pytest.raises(ValueError, match="NameError"):
                one.python("x")
        children = [s.interpreter.child.pid for s in (one, other)]
    finally:
        one.close()
        other.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_session_is_confined_as_a_program_is():
    session = PythonSession()
    try:
        for code in (
            "open('/etc/passwd').read()",
            "__import__('_socket').socket()",
            "import os\nos.fork()",
        ):
            with pytest.raises(ValueError, match=r"PermissionError|not permitted"):
                session.python(code)
        assert (
            session.python("open('note', 'w').write('hi')") == "2"
            and session.python("open('note').read()") == "'hi'"
        )
    finally:
        session.close()


@pytest.mark.slow
def test_a_thread_that_an_earlier_call_left_in_c_does_not_hold_up_the_next_one():
    """It kept the interpreter from reading, and a call of more than a pipe holds was written to it
    for ever."""
    session = PythonSession(sandbox=Sandbox(time_limit=1.0, allow_weak=True))
    counts = "lambda: (time.sleep(0.2), sum(range(10**12)))"
    session.python(
        f"import threading, time\nthreading.Thread(target={counts}, daemon=True).start()"
    )
    time.sleep(0.4)
    before = time.monotonic()
    with pytest.raises(
        ValueError, match="the code took longer than 1 s; the variables of this session are lost"
    ):
        session.python(f"text = {'x' * 200_000!r}")
    assert time.monotonic() - before < 20
    session.close()


def test_a_session_is_closed_although_a_program_still_runs_in_it():
    """`close` runs in the main thread, and waited for the call."""
    session = PythonSession(sandbox=Sandbox(time_limit=60.0, allow_weak=True))

    def call():
        with suppress(ValueError):
            session.python("import time; time.sleep(60)")

    calling = threading.Thread(target=call, daemon=True)
    session.python("1")
    calling.start()
    while not session.interpreter.lock.locked():
        time.sleep(0.001)
    before = time.monotonic()
    session.close()
    assert time.monotonic() - before < 20


@pytest.mark.parametrize("error", [SandboxError("no child here"), ConfigError("allow_weak")])
@pytest.mark.parametrize("tool", [TOOL, PythonSession().python])
def test_a_sandbox_that_refuses_ends_the_run_and_is_no_result(monkeypatch, tool, error):
    """The policy read it as the result of its call, and was trained on that."""

    def refuse(sandbox):
        raise error

    for place in (level, interpreter):
        monkeypatch.setattr(place, "require", refuse)

    async def say(rollout, messages, session):
        call = ToolCall("call_0", "python", {"code": "1"})
        return Step((), (), (), (), "tool", content="", tool_calls=(call,))

    task = Task("t", ({"role": "user", "content": "Go."},))
    with pytest.raises(type(error), match=str(error)):
        run(play(task, tool_use(tools={"python": tool}), say))


def test_an_episode_ends_its_session():
    environment = tool_use(tools={"session": partial(PythonSession, sandbox=Sandbox())})
    made = []

    async def say(rollout, messages, session):
        made.append(session.tools["python"].__self__.interpreter)
        calls = ("x = 2", "x * 21")
        said = tuple(
            ToolCall("call_0", "python", {"code": code}) for code in calls[len(rollout.steps) :][:1]
        )
        return Step((), (), (), (), "tool" if said else "stop", content="42", tool_calls=said)

    rollout = run(play(Task("t", ({"role": "user", "content": "Go."},)), environment, say))
    assert [step.tool_results[0].content for step in rollout.steps[:2]] == ["(no output)", "42"]
    assert made[0].child is None
