"""Play a guessing game: the policy guesses a number, and the environment answers "higher" or
"lower", for up to fifty turns. The history only grows, so an episode is one training sequence."""

from __future__ import annotations

from typing import Literal

from rlkit.environments._dialogue import dialogue
from rlkit.rewards import extract_answer
from rlkit.types import Environment, Rollout, safe


@safe("system_prompt")
def guess_number(
    *,
    max_turns: int = 50,
    system_prompt: str | None = None,
    overflow: Literal["truncate", "drop_oldest"] = "truncate",
) -> Environment:
    """Make the environment for the tasks of guess_number. Each reply is answered with "higher" or
    "lower", until the guess is `task.answer`.

    Args:
      max_turns: number of guesses of an episode, at least 1. An episode without a right guess is
        truncated.
      system_prompt: text to put in front of the task's messages; None: no text.
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
    """Answer the last guess: say whether the number is higher or lower."""
    guess = read_last_guess(rollout)
    if guess is None:
        return "Say a whole number."
    return "higher" if guess < int(rollout.task.answer) else "lower"


def has_found_number(rollout: Rollout, step: int) -> bool:
    """Return whether the last guess is the number."""
    return read_last_guess(rollout) == int(rollout.task.answer)


def read_last_guess(rollout: Rollout) -> int | None:
    """Return the number that the last reply gives as its answer, as the reward reads it. Return
    None if it gives no whole number."""
    guess = extract_answer(rollout.final_content)
    return int(guess) if guess is not None and guess.denominator == 1 else None
