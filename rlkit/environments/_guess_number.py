"""Guess a number: higher or lower, up to fifty turns. The history only grows, so an episode is one
training sequence."""

from __future__ import annotations

import re
from typing import Literal

from rlkit.environments._dialogue import dialogue
from rlkit.types import Environment, Rollout, safe

NUMBER = re.compile(r"[0-9]{1,18}")  # in a reply, the last number counts


@safe("system_prompt")
def guess_number(
    *,
    max_turns: int = 50,
    system_prompt: str | None = None,
    overflow: Literal["truncate", "drop_oldest"] = "truncate",
) -> Environment:
    """Play the game of tasks=guess_number: answer each reply with "higher" or "lower", until the
    guess is `task.answer`.

    Args:
      max_turns: guesses of an episode, at least 1. An episode without a right guess is truncated.
      system_prompt: put in front of the task's messages; None adds none.
      overflow: as in `dialogue`.
    """
    return dialogue(
        prompt_fn=hint,
        termination_fn=has_found_number,
        max_turns=max_turns,
        system_prompt=system_prompt,
        history="keep_thinking",
        overflow=overflow,
    )


def hint(rollout: Rollout, step: int) -> str:
    """Tell whether the number is higher or lower than the last guess."""
    guess = read_last_guess(rollout)
    if guess is None:
        return "Say a whole number."
    return "higher" if guess < int(rollout.task.answer) else "lower"


def has_found_number(rollout: Rollout, step: int) -> bool:
    """Whether the last guess is the number."""
    return read_last_guess(rollout) == int(rollout.task.answer)


def read_last_guess(rollout: Rollout) -> int | None:
    """The last whole number of the last reply, thinking excluded; None if it has none."""
    numbers = NUMBER.findall(rollout.final_content)
    return int(numbers[-1]) if numbers else None
