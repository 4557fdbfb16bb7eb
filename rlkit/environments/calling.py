"""Make environments with tool calls from a function that makes the tools of each episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from rlkit.environments._single_turn import single_turn
from rlkit.environments.tools import execute
from rlkit.errors import ConfigError
from rlkit.types import Environment, Task, Tool, ToolParser


def make_calling(
    made: Callable[[Task], Any],
    known: Mapping[str, Tool],
    parse_calls: ToolParser,
    *,
    max_turns: int,
    max_calls: int,
    max_chars: int,
    timeout: float | None,
    deadline: float | None,
    overflow: Literal["truncate", "drop_oldest"],
    system_prompt: str | None,
) -> Environment:
    """Make an environment like that of `tool_use`. For each episode, `made(task)` makes the tools.
    `known` holds the signatures of the tools, for a parser with a keyword `tools`."""
    check_counts(max_turns=max_turns, max_calls=max_calls, max_chars=max_chars)
    check_seconds(timeout=timeout, deadline=deadline)
    parser: Callable[..., Any] = parse_calls
    if "tools" in inspect.signature(parser).parameters:
        parser = partial(parser, tools=known)
    return single_turn(system_prompt=system_prompt)._replace(
        tools=made,
        parse_calls=parser,
        max_steps=max_turns,
        max_calls=max_calls,
        overflow=overflow,
        execute=partial(execute, max_chars=max_chars, timeout=timeout),
        deadline=deadline,
    )


def check_counts(**limits: int | None) -> None:
    """Raise ConfigError naming the first limit of the environment below 1. None means no limit."""
    for key, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigError(f"environment.{key} is {limit}; it must be at least 1")


def check_seconds(**limits: float | None) -> None:
    """Raise ConfigError if a time limit of the environment is not above 0 seconds. None means no
    limit."""
    for key, seconds in limits.items():
        if seconds is not None and not seconds > 0:
            raise ConfigError(
                f"environment.{key} is {seconds}; it must be > 0 seconds, or null for no limit"
            )
