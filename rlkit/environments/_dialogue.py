"""A conversation with a function as the user: it writes the next message and ends the episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlkit.environments._single_turn import single_turn
from rlkit.environments._tool_use import tool_use
from rlkit.environments.calling import check_seconds
from rlkit.errors import ConfigError
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
    """The task's messages, then a message of `prompt_fn` after each reply. Both functions may be
    plain or async.

    Args:
      prompt_fn: (rollout, step) → the next user message, or messages; None ends the episode as
        terminated. `rollout` holds the replies so far, `step` is the number of the last one, from
        0. Without a prompt_fn, a reply without a call ends the episode.
      termination_fn: (rollout, step) → True ends the episode as terminated. It is called before
        prompt_fn, and before any tool runs.
      tools: of `tool_use`. Calls in a reply are answered before prompt_fn is called.
      max_turns: replies of an episode, at least 1. An episode that has not ended after the last
        reply is truncated. system_prompt: put in front of the task's messages; None adds none.
      history: strip_thinking renders the conversation again for every reply, without earlier
        thinking. keep_thinking only appends.
      overflow: of the model's context. truncate ends the episode. drop_oldest drops the oldest
        replies, each with the messages after it, until a whole reply fits. The task's messages
        always stay.
      deadline: seconds, > 0, for all waiting of an episode for its functions; then it is truncated.
        None: no limit. Only an async function can be cut short, not a plain one.
    Raises: ConfigError for a limit below 1, or a tool under another name than its function's.
    """
    if max_turns < 1:
        raise ConfigError(f"environment.max_turns is {max_turns}; it must be at least 1")
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
    """The example prompt_fn: "Continue with step n", n counted from 1 for the second reply."""
    return f"Continue with step {step + 1}."


def said_done(rollout: Rollout, step: int) -> bool:
    """The example termination_fn: the last reply says DONE."""
    return "DONE" in rollout.final_content
