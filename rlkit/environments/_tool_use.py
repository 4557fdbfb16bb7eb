"""One question, as many tool calls as needed, then the answer: the first reply without a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlkit.environments.calling import make_calling
from rlkit.environments.tool_parsers import hermes
from rlkit.environments.toolbox import list_signatures, make_tools_function
from rlkit.environments.tools import MAX_CHARS, TIMEOUT
from rlkit.errors import ConfigError
from rlkit.types import Environment, Tool, ToolParser, reaches, safe


@reaches(tools="calls")
@safe("system_prompt")
def tool_use(
    *,
    tools: Mapping[str, Tool],
    max_turns: int = 4,
    max_calls: int = 8,
    system_prompt: str | None = None,
    parse_calls: ToolParser = hermes,
    overflow: Literal["truncate", "drop_oldest"] = "truncate",
    max_chars: int = MAX_CHARS,
    timeout: float | None = TIMEOUT,
    deadline: float | None = None,
) -> Environment:
    """The policy may call tools; a reply without a call ends the episode.

    Args:
      tools: name → typed function with a docstring, plain or async. The name must be the function's
        own name, because the schema shows that name to the policy. Or name → class (or partial of
        one): each episode makes an instance; its documented public methods are tools under their
        own names, and the name is the key of its end state (rlkit.environments.toolbox).
      max_turns: replies in an episode, at least 1. An episode with calls in its last reply is
        truncated.
      max_calls: calls answered in one reply, at least 1; further calls come back as errors.
      system_prompt: put in front of the task's messages; None adds none.
      parse_calls: reads the calls from a reply's content. If it has a keyword `tools`, it gets the
        tools.
      overflow: of the model's context. truncate ends the episode. drop_oldest drops the oldest
        replies, each with its calls' results, until a whole reply fits. The task's messages always
        stay.
      max_chars: characters of a result for the policy, at least 1. The rest is cut, and the result
        says so.
      timeout: seconds of a call, > 0; None: no limit. `execute` describes how a tool is ended.
      deadline: seconds, > 0, for all calls of an episode; then it is truncated. None: no limit.
    Raises: ConfigError without tools, or for a name other than the function's, or a limit out of
    range.
    """
    if not tools:
        raise ConfigError("environment.tools is empty; name a tool, or use environment=single_turn")
    return make_calling(
        make_tools_function(tools),
        list_signatures(tools),
        parse_calls,
        overflow=overflow,
        system_prompt=system_prompt,
        max_turns=max_turns,
        max_calls=max_calls,
        max_chars=max_chars,
        timeout=timeout,
        deadline=deadline,
    )
