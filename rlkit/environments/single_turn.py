"""One question, one reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlkit.environments.prompts import with_system_prompt
from rlkit.environments.tool_parsers import none
from rlkit.types import Environment, Messages, Rollout, Task


def single_turn(*, system_prompt: str | None = None) -> Environment:
    """The task's messages, one reply, no tools.

    Args:
      system_prompt: put in front of the task's messages; None adds none.
    """

    def first_prompt(task: Task) -> Messages:
        return with_system_prompt(task.messages, system_prompt)

    return Environment(
        first_prompt=first_prompt,
        next_prompt=no_next_prompt,
        tools=no_tools,
        stop=never,
        parse_calls=none,
        max_steps=1,
    )


def no_next_prompt(rollout: Rollout, step: int) -> None:
    """A reply without tool calls ends the episode."""


def no_tools(task: Task) -> Mapping[str, Callable[..., Any]]:
    return {}


def never(rollout: Rollout, step: int) -> bool:
    """The environment itself ends no episode early."""
    return False
