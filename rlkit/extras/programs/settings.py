"""List the settings of requests, and how each is treated. This is the table of docs/programs.md.

A setting without a row here has no effect on a reply (`user`, `metadata`, `store`, …).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

Treatment = Literal["honoured", "of the run", "unsupported", "refused"]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ALL = (CHAT, RESPONSES, MESSAGES)

MEANINGS: dict[Treatment, str] = {
    "honoured": "applied",
    "of the run": "ignored; the run's own setting applies",
    "unsupported": "refused, or ignored with `environment.unsupported=ignore`",
    "refused": "refused",
}


def is_given(value: Any) -> bool:
    """Return whether the value of a setting asks for anything."""
    return value not in (None, False, "", [], {})


def _asks_for_json(shape: Any) -> bool:
    return not isinstance(shape, Mapping) or shape.get("type", "text") != "text"


def _chooses(choice: Any) -> bool:
    """Return whether a tool_choice does more than permit any number of tool calls."""
    if isinstance(choice, Mapping):
        return choice.get("type") != "auto" or bool(choice.get("disable_parallel_tool_use"))
    return choice != "auto"


def _has_other_tools(tools: Any, *known: str) -> bool:
    given = tools if isinstance(tools, list) else []
    kinds = [tool.get("type") for tool in given if isinstance(tool, Mapping)]
    return any(kind not in (None, "function", *known) for kind in kinds)


def _ends_in_a_reply(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


class Setting(NamedTuple):
    """Describe a setting of some routes, and how it is treated."""

    name: str  # name of the setting; dots name a part of an object
    paths: tuple[str, ...]
    treatment: Treatment
    example: Any  # a value for which this row holds
    why: str = ""  # why it is not honoured, and what to do instead
    asks: Callable[[Any], bool] = is_given  # returns whether a value asks for the setting
    shown: str = ""  # text for the table, instead of the name


NO_GRAMMAR = "the policy is sampled without a grammar"
FREE = "the policy chooses whether it calls tools, which, and how many"
WHOLE = "send the whole conversation"
NO_TOOL = "rlkit runs no tools of a vendor; give the program tools of its own"

SETTINGS = (
    Setting("messages", (CHAT, MESSAGES), "honoured", [{"role": "user", "content": "b"}]),
    Setting("input", (RESPONSES,), "honoured", "b"),
    Setting("system", (MESSAGES,), "honoured", "Be brief."),
    Setting("instructions", (RESPONSES,), "honoured", "Be brief."),
    Setting("tools", (CHAT,), "honoured", [{"type": "function", "function": {"name": "f"}}]),
    Setting("tools", (RESPONSES,), "honoured", [{"type": "function", "name": "f"}]),
    Setting("tools", (MESSAGES,), "honoured", [{"name": "f", "input_schema": {}}]),
    Setting("max_tokens", (CHAT, MESSAGES), "honoured", 7),
    Setting("max_completion_tokens", (CHAT,), "honoured", 7),
    Setting("max_output_tokens", (RESPONSES,), "honoured", 7),
    Setting("stop", (CHAT,), "honoured", ["b"]),
    Setting("stop_sequences", (MESSAGES,), "honoured", ["b"]),
    Setting("stream", ALL, "honoured", True),
    Setting("stream_options.include_usage", (CHAT,), "honoured", True),
    Setting("temperature", ALL, "of the run", 0.5),
    Setting("top_p", ALL, "of the run", 0.5),
    Setting("top_k", (MESSAGES,), "of the run", 5),
    Setting("seed", (CHAT,), "of the run", 5),
    Setting("presence_penalty", (CHAT,), "of the run", 0.5),
    Setting("frequency_penalty", (CHAT,), "of the run", 0.5),
    Setting("reasoning_effort", (CHAT,), "of the run", "low"),
    Setting("reasoning", (RESPONSES,), "of the run", {"effort": "low"}),
    Setting("thinking", (MESSAGES,), "of the run", {"type": "enabled", "budget_tokens": 1024}),
    Setting("output_config.effort", (MESSAGES,), "of the run", "low"),
    Setting("verbosity", (CHAT,), "of the run", "low"),
    Setting("text.verbosity", (RESPONSES,), "of the run", "low"),
    Setting(
        "response_format",
        ALL,
        "unsupported",
        {"type": "json_object"},
        NO_GRAMMAR,
        _asks_for_json,
    ),
    Setting(
        "text.format",
        (RESPONSES,),
        "unsupported",
        {"type": "json_schema"},
        NO_GRAMMAR,
        _asks_for_json,
    ),
    Setting(
        "output_config.format", (MESSAGES,), "unsupported", {"type": "json_schema"}, NO_GRAMMAR
    ),
    Setting("output_format", (MESSAGES,), "unsupported", {"type": "json_schema"}, NO_GRAMMAR),
    Setting("tool_choice", (CHAT, RESPONSES), "unsupported", "required", FREE, _chooses),
    Setting("tool_choice", (MESSAGES,), "unsupported", {"type": "any"}, FREE, _chooses),
    Setting(
        "parallel_tool_calls",
        (CHAT, RESPONSES),
        "unsupported",
        False,
        FREE,
        lambda value: value is False,
    ),
    Setting("logit_bias", (CHAT,), "unsupported", {"50256": -100}, "tokens are drawn as they are"),
    Setting("max_tool_calls", (RESPONSES,), "unsupported", 1, FREE),
    Setting(
        "truncation",
        (RESPONSES,),
        "unsupported",
        "auto",
        "a conversation beyond the context is refused",
        lambda value: value != "disabled",
    ),
    Setting(
        "context_management",
        (MESSAGES,),
        "unsupported",
        {"edits": []},
        "the policy reads the conversation as it was sent",
    ),
    Setting("n", ALL, "refused", 2, "ask once for each reply", lambda value: value != 1),
    Setting("logprobs", ALL, "refused", True, "they are recorded, and not told"),
    Setting("top_logprobs", ALL, "refused", 5, "they are recorded, and not told"),
    Setting("functions", (CHAT,), "refused", [{"name": "f"}], "send `tools`"),
    Setting("function_call", (CHAT,), "refused", "auto", "send `tools`"),
    Setting(
        "modalities",
        (CHAT,),
        "refused",
        ["text", "audio"],
        "the policy writes text alone",
        lambda value: value != ["text"],
    ),
    Setting("audio", (CHAT,), "refused", {"voice": "alloy"}, "the policy writes text alone"),
    Setting("web_search_options", (CHAT,), "refused", {"user_location": None}, NO_TOOL),
    Setting(
        "tools",
        (CHAT, RESPONSES),
        "refused",
        [{"type": "web_search"}],
        NO_TOOL,
        _has_other_tools,
        "a tool of another type than function",
    ),
    Setting(
        "tools",
        (MESSAGES,),
        "refused",
        [{"type": "web_search_20250305", "name": "web_search"}],
        NO_TOOL,
        lambda tools: _has_other_tools(tools, "custom"),
        "a tool of another type than function",
    ),
    Setting("previous_response_id", ALL, "refused", "resp_0", WHOLE),
    Setting("conversation", (RESPONSES,), "refused", "conv_0", WHOLE),
    Setting("prompt", (RESPONSES,), "refused", {"id": "pmpt_0"}, WHOLE),
    Setting("background", (RESPONSES,), "refused", True, "wait for the reply, or stream it"),
    Setting("mcp_servers", (MESSAGES,), "refused", [{"type": "url", "name": "a"}], NO_TOOL),
    Setting("container", (MESSAGES,), "refused", "container_0", NO_TOOL),
    Setting(
        "messages",
        (MESSAGES,),
        "refused",
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "the policy begins each reply; end with a user's message",
        _ends_in_a_reply,
        "a reply at the end of the messages (prefill)",
    ),
)


def read_value(body: Mapping[str, Any], name: str) -> Any:
    """Return the value of a setting in a request; None if it is missing."""
    value: Any = body
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def refuse_settings(body: Mapping[str, Any], path: str, *, ignore: bool) -> None:
    """Raise ValueError for the first setting that is refused. With `ignore`, unsupported settings
    are not refused and have no effect."""
    for row in SETTINGS:
        passes = ("honoured", "of the run", "unsupported" if ignore else "")
        if row.treatment in passes or path not in row.paths:
            continue
        value = read_value(body, row.name)
        if value is not None and row.asks(value):
            hint = "; environment.unsupported=ignore accepts it without effect"
            hint = hint if row.treatment == "unsupported" else ""
            said = row.shown or f"{row.name}={value!r:.60}"
            raise ValueError(f"{said} is not supported: {row.why}{hint}")


def write_table() -> str:
    """Write the table of docs/programs.md. Settings of the same routes with the same treatment
    share a row."""
    rows: dict[tuple[Treatment, tuple[str, ...]], list[str]] = {}
    for setting in SETTINGS:
        name = setting.shown or f"`{setting.name}`"
        rows.setdefault((setting.treatment, setting.paths), []).append(name)
    lines = ["| settings | routes | what becomes of them |", "|---|---|---|"]
    for (treatment, paths), names in rows.items():
        routes = ", ".join(f"`{path.removeprefix('/v1')}`" for path in paths)
        lines.append(f"| {', '.join(names)} | {routes} | {MEANINGS[treatment]} |")
    return "\n".join(lines)
