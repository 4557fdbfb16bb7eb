"""Hold a conversation in which a function plays the user. The function writes the next message and
ends the episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlkit.environments._single_turn import single_turn
from rlkit.environments._tool_use import tool_use
from rlkit.environments.calling import check_counts, check_seconds
from rlkit.types import Environment, Rollout, Tool, reaches, safe


@reaches(tools="calls")
@safe("prompt_fn", "termination_fn", "system_prompt")
def dialogue(
    *,
    prompt_fn: Callable[[Rollout, int], Any] | None = None,
    termination_fn: Callable[[Rollout, int], Any] | None = None,
    tools: Mapping[str, Tool] = {},
    max_turns: int = 50,
    system_prompt: str | None = None,
    history: Literal["keep_thinking", "strip_thinking"] = "strip_thinking",
    overflow: Literal["truncate", "drop_oldest"] = "truncate",
    deadline: float | None = None,
) -> Environment:
    """Make an environment with several turns: first the task's messages, then a message of
    `prompt_fn` after each reply. Both functions may be plain or async.

    Args:
      prompt_fn: function from (rollout, step) to the next user message or messages. If it returns
        None, the episode ends as terminated. `rollout` holds the replies so far, and `step` is the
        number of the last reply, from 0. Without a prompt_fn, a reply without a tool call ends the
        episode.
      termination_fn: function from (rollout, step) to a bool. If it returns True, the episode ends
        as terminated. This function is called before prompt_fn, and before any tool runs.
      tools: as in `tool_use`. If a reply calls tools, their results are the next prompt, and
        prompt_fn is not called.
      max_turns: number of replies of an episode, at least 1. If the episode has not ended after
        this many replies, it is truncated.
      system_prompt: text to put in front of the task's messages; None: no text.
      history: with strip_thinking, the conversation is rendered again for every reply, without
        earlier thinking. With keep_thinking, new text is only appended to it.
      overflow: how to handle a full context of the model. truncate ends the episode. drop_oldest
        drops the oldest replies, each with the messages after it, until a whole reply fits. The
        task's messages always stay.
      deadline: seconds, > 0, that an episode may wait for its functions in total; then it is
        truncated. None: no limit. Only an async function can be interrupted. A plain function
        always runs to its end.
    Raises: ConfigError for a limit out of range, or for a tool under another name than its
      function's.
    """
    check_counts(max_turns=max_turns)
    if tools:
        base = tool_use(tools=tools, max_turns=max_turns, system_prompt=system_prompt)
    else:
        base = single_turn(system_prompt=system_prompt)._replace(max_steps=max_turns)
    check_seconds(deadline=deadline)
    return base._replace(
        next_prompt=prompt_fn,
        stop=termination_fn,
        history=history,
        overflow=overflow,
        deadline=deadline,
    )


def continue_with_step(rollout: Rollout, step: int) -> str:
    """Return the message "Continue with step n" (an example of a prompt_fn). For the second reply,
    n is 1."""
    return f"Continue with step {step + 1}."


def said_done(rollout: Rollout, step: int) -> bool:
    """Return whether the last reply says DONE (an example of a termination_fn)."""
    return "DONE" in rollout.final_content
