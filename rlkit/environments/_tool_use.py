"""One question, as many tool calls as needed, and the answer in the first reply without a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rlkit.environments.calling import calling
from rlkit.environments.tool_parsers import hermes
from rlkit.environments.toolbox import maker, signatures
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
      tools: name → typed function with a docstring, plain or async. The name is the function's own,
        since the schema gives that one. Or name → class (or partial of one) of which each episode
        makes an instance: its documented public methods are tools by their own names, and the name
        is that of its end state (rlkit.environments.toolbox).
      max_turns: replies in an episode, at least 1; an episode that still calls in the last one is
        truncated.
      max_calls: calls answered in one reply, at least 1; the others come back as errors.
      system_prompt: put in front of the task's messages; None adds none.
      parse_calls: reads the calls out of a reply's content; one with a keyword `tools` is given the
        tools.
      overflow: of the model's context. truncate ends the episode; drop_oldest drops the oldest
        replies, each with its calls' results, until a whole reply fits; the task's messages always
        stay.
      max_chars: of a result that the policy reads, at least 1; the rest is cut and said to be.
      timeout: seconds that a call may take, > 0; None: no limit. See `execute` for what becomes of
        the tool then.
      deadline: seconds, > 0, that an episode may spend on its calls, all together; then it is
        truncated. None: no limit.
    Raises: ConfigError for no tools, a name that is not the function's, or a limit out of range.
    """
    if not tools:
        raise ConfigError("environment.tools is empty; name a tool, or use environment=single_turn")
    return calling(
        maker(tools),
        signatures(tools),
        parse_calls,
        overflow=overflow,
        system_prompt=system_prompt,
        max_turns=max_turns,
        max_calls=max_calls,
        max_chars=max_chars,
        timeout=timeout,
        deadline=deadline,
    )
