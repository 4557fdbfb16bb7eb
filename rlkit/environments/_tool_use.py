"""Ask one question and answer tool calls. The first reply without a call is the answer."""

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
    """Make an environment with tools. The policy may call them, and a reply without a call ends the
    episode.

    Args:
      tools: tools by name. A tool is a typed function with a docstring, plain or async. Its name
        must be the function's own name, because the schema shows this name to the policy. An entry
        may also be a class, or a partial of a class. Each episode then makes an instance, and its
        documented public methods are tools under their own names. The name of the entry is the key
        of the instance's end state (rlkit.environments.toolbox).
      max_turns: number of replies in an episode, at least 1. If the last allowed reply still has
        calls, the episode is truncated.
      max_calls: number of calls answered in one reply, at least 1. Further calls of the reply are
        answered with an error.
      system_prompt: text to put in front of the task's messages; None: no text.
      parse_calls: function that reads the calls from a reply's content. If it has a keyword
        `tools`, it gets the tools.
      overflow: how to handle a full context of the model. truncate ends the episode. drop_oldest
        drops the oldest replies, each with the results of its calls, until a whole reply fits. The
        task's messages always stay.
      max_chars: longest result for the policy, in characters, at least 1. A longer result is cut,
        with a note for the policy.
      timeout: seconds for one call, > 0; None: no limit. `rlkit.environments.execute` describes how
        a tool is ended.
      deadline: seconds, > 0, for all calls of an episode together; then the episode is truncated.
        None: no limit.
    Raises: ConfigError if there are no tools, for a tool under another name than its function's, or
    for a limit out of range.
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
