"""Guess a number: higher or lower, up to fifty turns. The history only grows, so an episode is one
training sequence."""

from __future__ import annotations

import re
from typing import Literal

from rlkit.environments._dialogue import dialogue
from rlkit.types import Environment, Rollout, safe

NUMBER = re.compile(r"[0-9]{1,18}")  # of a reply, the last one counts


@safe("system_prompt")
def guess_number(
    *,
    max_turns: int = 50,
    system_prompt: str | None = None,
    overflow: Literal["truncate", "drop_oldest"] = "truncate",
) -> Environment:
    """The game of tasks=guess_number: after each reply "higher" or "lower", until the guess is
    `task.answer`.

    Args:
      max_turns: guesses of an episode, at least 1; an episode without the right one among them is
        truncated.
      system_prompt: put in front of the task's messages; None adds none.
      overflow: as in `dialogue`.
    """
    return dialogue(
        prompt_fn=hint,
        termination_fn=found,
        max_turns=max_turns,
        system_prompt=system_prompt,
        history="keep_thinking",
        overflow=overflow,
    )


def hint(rollout: Rollout, step: int) -> str:
    """Where the number lies, seen from the last guess."""
    guess = last_guess(rollout)
    if guess is None:
        return "Say a whole number."
    return "higher" if guess < int(rollout.task.answer) else "lower"


def found(rollout: Rollout, step: int) -> bool:
    """Whether the last guess is the number."""
    return last_guess(rollout) == int(rollout.task.answer)


def last_guess(rollout: Rollout) -> int | None:
    """The last whole number of the last reply, thinking excluded; None where it has none."""
    numbers = NUMBER.findall(rollout.final_content)
    return int(numbers[-1]) if numbers else None
