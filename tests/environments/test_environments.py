"""The environments: what a policy is told first, which tools it has, when an episode ends, which
row gets which."""

from __future__ import annotations

import pytest

from rlkit.environments import (
    by_task,
    calculator,
    find_environment,
    hermes,
    single_turn,
    tool_use,
    xml,
)
from rlkit.episodes.episode import read_opening
from rlkit.errors import ConfigError
from rlkit.system.loops import run
from rlkit.types import Task, ToolCall

TASK = Task("t/0", ({"role": "user", "content": "2 + 2?"},), environment="tools")
TOOLS = {"calculator": calculator}


def test_single_turn_is_one_reply_without_tools():
    environment = single_turn()
    assert environment.first_prompt(TASK) == TASK.messages
    assert (environment.max_steps, environment.tools, environment.parse_calls) == (1, None, None)
    assert read_opening(TASK, environment)[:2] == (list(TASK.messages), {})


def test_tool_use_gives_its_tools_and_ends_with_a_reply_without_calls():
    environment = tool_use(tools=TOOLS, max_turns=3, max_calls=2)
    assert environment.tools(TASK) == TOOLS and environment.parse_calls is hermes
    assert (environment.max_steps, environment.max_calls) == (3, 2)
    assert read_opening(TASK, environment)[:2] == (list(TASK.messages), TOOLS)


def test_tool_use_hands_its_tools_to_a_parser_that_asks_and_its_limits_to_every_call():
    environment = tool_use(tools=TOOLS, parse_calls=xml, max_chars=3)
    _, (call,) = environment.parse_calls('<tool name="calculator">10000 * 10</tool>')
    assert call == ToolCall("call_0", "calculator", {"expression": "10000 * 10"})
    assert run(environment.execute(call, TOOLS)).content.startswith("100\n[cut")


@pytest.mark.parametrize(
    "environment", [single_turn(system_prompt="S"), tool_use(tools=TOOLS, system_prompt="S")]
)
def test_a_system_prompt_stands_in_front_and_a_rows_own_is_kept(environment):
    assert environment.first_prompt(TASK) == ({"role": "system", "content": "S"}, *TASK.messages)
    own = TASK._replace(messages=({"role": "system", "content": "own"}, *TASK.messages))
    assert environment.first_prompt(own) == (
        {"role": "system", "content": "S\n\nown"},
        *TASK.messages,
    )
    assert own.messages[0]["content"] == "own"


def test_a_system_prompt_stands_in_front_of_a_prompt_that_is_a_text():
    async def first_prompt(task):
        return "Go."

    own = single_turn()._replace(first_prompt=first_prompt)
    found = by_task(environments={"mine": own}, system_prompt="S")(
        TASK._replace(environment="mine")
    )
    assert run(found.first_prompt(TASK)) == (
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Go."},
    )


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"tools": {}}, "tools is empty"),
        ({"tools": {"sums": calculator}}, r"tools\.sums"),
        ({"tools": {"calculator": "calculator"}}, r"tools\.calculator"),
        ({"tools": TOOLS, "max_turns": 0}, "max_turns is 0"),
        ({"tools": TOOLS, "max_calls": 0}, "max_calls is 0"),
        ({"tools": TOOLS, "max_chars": 0}, "max_chars is 0"),
        ({"tools": TOOLS, "timeout": 0}, "timeout is 0"),
        ({"tools": TOOLS, "timeout": float("nan")}, "timeout is nan"),
        ({"tools": TOOLS, "deadline": -1.0}, "deadline is -1"),
    ],
)
def test_tool_use_refuses_settings_that_cannot_work(settings, key):
    with pytest.raises(ConfigError, match=key):
        tool_use(**settings)


def test_by_task_gives_each_row_its_own_environment():
    tools, plain = tool_use(tools=TOOLS), single_turn()
    lookup = by_task(environments={"tools": tools, "plain": plain})
    assert find_environment(lookup, TASK) is tools
    assert find_environment(lookup, TASK._replace(environment="plain")) is plain
    assert find_environment(plain, TASK) is plain  # one environment for all rows


def test_by_task_names_the_row_and_the_known_environments():
    with pytest.raises(ConfigError, match=r"'t/0'.*'tools'.*known ones are: plain"):
        by_task(environments={"plain": single_turn()})(TASK)
