"""Ask one question and take one reply."""

from __future__ import annotations

from rlkit.environments.prompts import with_system_prompt
from rlkit.types import Environment, Messages, Task, safe


@safe("system_prompt")
def single_turn(*, system_prompt: str | None = None) -> Environment:
    """Make an environment with one reply to the task's messages, without tools.

    Args:
      system_prompt: text to put in front of the task's messages; None: no text.
    """

    def first_prompt(task: Task) -> Messages:
        return with_system_prompt(task.messages, system_prompt)

    return Environment(first_prompt=first_prompt)
