"""Read and write three protocols of chat endpoints. Each protocol is read into the same request
type, and written from the same reply type. Nothing in this file waits or samples.

Clients parse leniently: they read a missing field as None, and the program then fails far away from
the cause. So every field of a protocol is written. The file settings.py lists which settings of a
request are honoured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rlkit.extras.programs.settings import CHAT, MESSAGES, RESPONSES, refuse_settings
from rlkit.types import Message, Step

Body = Mapping[str, Any]
Event = tuple[str, Any]  # (name of the event, its data); an empty name is not written


class ChatRequest(NamedTuple):
    """Hold a program's request: a whole conversation, and the tools for its prompt."""

    messages: list[Message]
    tools: list[dict[str, Any]]  # schemas, in the form for chat templates
    limit: int | None = None  # largest number of tokens of the reply
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False  # whether a stream ends with the token counts
    size: int = 0  # size of its body in bytes


class Reply(NamedTuple):
    """Hold a reply to write: the recorded step, its number and its time."""

    number: int
    created: int  # seconds since 1970
    step: Step
    content: str  # content of the step, up to the first stop text
    stopped: str = ""  # this stop text; "" if there is none

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Return (id, name, arguments as JSON text) of each tool call. An unreadable call is not
        listed, because it is part of the content."""
        return [
            (c.id, c.name, json.dumps(dict(c.arguments)))
            for c in self.step.tool_calls
            if not c.error
        ]


class Wire(NamedTuple):
    """Hold the functions of one protocol."""

    read: Callable[[Body], ChatRequest]  # raises ValueError with a sentence naming the field
    write: Callable[[Reply], dict[str, Any]]
    events: Callable[[Reply, ChatRequest], Iterator[Event]]
    error: Callable[[int, str], dict[str, Any]]  # (status, sentence) → body


# ------------------------------------------------------------------------------------------ reading


def _text(content: Any, where: str) -> str:
    """Return the text of a content: a string, null, or a list of parts with one text each."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string, null or a list of parts")
    for part in content:
        if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f"{where} has a part of type {kind!r:.60}; the policy reads text alone"
            )
    return "".join(part["text"] for part in content)


def _items(value: Any, where: str) -> list[Body]:
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{where} must be a list of objects")
    return value


def _tool(function: Body, parameters: str) -> dict[str, Any]:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a tool in tools has no name")
    schema = {
        "name": name,
        "description": function.get("description") or "",
        "parameters": function.get(parameters) or {},
    }
    # only tools of /v1/responses have an output schema
    result = {"return": function["output_schema"]} if function.get("output_schema") else {}
    return {"type": "function", "function": schema | result}


def _arguments(text: Any) -> Any:
    """Read the arguments of a call sent by the client. Return an object, or the text itself if it
    is no object."""
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else str(text)


def _call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise ValueError("a tool call has no name")
    return {
        "id": str(id),
        "type": "function",
        "function": {"name": name, "arguments": _arguments(arguments)},
    }


def _limit(body: Body, *names: str) -> int | None:
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1")
            return value
    return None


def _stops(value: Any, where: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"{where} must be a string or a list of strings")
    return tuple(filter(None, stops))


def read_chat(body: Body) -> ChatRequest:
    """Read a request to /v1/chat/completions. Raises: ValueError."""
    messages: list[Message] = []
    for i, given in enumerate(_items(body.get("messages"), "messages")):
        role = {"developer": "system"}.get(given.get("role", ""), given.get("role"))
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(
                f"messages[{i}].role is {role!r:.60}; it must be system, developer, user, assistant"
                " or tool"
            )
        message: Message = {
            "role": role,
            "content": _text(given.get("content"), f"messages[{i}].content"),
        }
        if role == "assistant":
            thinking = _text(given.get("reasoning_content"), f"messages[{i}].reasoning_content")
            if thinking:
                message["reasoning_content"] = thinking
            calls = [
                c.get("function") or {}
                for c in _items(given.get("tool_calls") or [], f"messages[{i}].tool_calls")
            ]
            if calls:
                ids = [c.get("id") for c in given["tool_calls"]]
                message["tool_calls"] = [
                    _call(id, c.get("name"), c.get("arguments"))
                    for id, c in zip(ids, calls, strict=True)
                ]
        if role == "tool":
            message["tool_call_id"] = str(given.get("tool_call_id"))
        messages.append(message)
    tools = []
    for tool in _items(body.get("tools") or [], "tools"):
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("tools has an entry without function.name")
        tools.append(dict(tool))
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    limit = _limit(body, "max_completion_tokens", "max_tokens")
    return _check_request(
        ChatRequest(
            messages,
            tools,
            limit,
            _stops(body.get("stop"), "stop"),
            bool(body.get("stream")),
            usage,
        )
    )


def read_responses(body: Body) -> ChatRequest:
    """Read a request to /v1/responses. Consecutive items of reasoning, text and calls become one
    reply. Raises: ValueError."""
    given = body.get("input")
    items = (
        [{"role": "user", "content": given}] if isinstance(given, str) else _items(given, "input")
    )
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": _text(body["instructions"], "instructions")})
    opened = False  # whether the last message is a reply that may still grow
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        where = f"input[{i}]"
        role = {"developer": "system"}.get(item.get("role", ""), item.get("role", ""))
        grows = kind in ("function_call", "reasoning") or role == "assistant"
        spoken = opened and bool(messages[-1]["content"] or messages[-1].get("tool_calls"))
        if grows and (not opened or (spoken and kind != "function_call")):
            messages.append({"role": "assistant", "content": ""})
        opened = grows
        if kind == "function_call":
            messages[-1].setdefault("tool_calls", []).append(
                _call(item.get("call_id"), item.get("name"), item.get("arguments"))
            )
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "content": output, "tool_call_id": str(item.get("call_id"))}
            )
        elif kind == "reasoning":
            messages[-1]["reasoning_content"] = _text(item.get("content"), f"{where}.content")
        elif kind == "message" and role in ("system", "user", "assistant"):
            text = _text(item.get("content"), f"{where}.content")
            if role == "assistant":
                messages[-1]["content"] = text
            else:
                messages.append({"role": role, "content": text})
        else:
            raise ValueError(
                f"{where} is of type {kind!r:.60} and role {role!r:.60}; text, function calls and"
                " their outputs are read"
            )
    tools = [_tool(t, "parameters") for t in _items(body.get("tools") or [], "tools")]
    return _check_request(
        ChatRequest(
            messages, tools, _limit(body, "max_output_tokens"), (), bool(body.get("stream"))
        )
    )


def read_messages(body: Body) -> ChatRequest:
    """Read a request to /v1/messages. Tool results in a user's message become separate messages.
    Raises: ValueError."""
    messages: list[Message] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _text(body["system"], "system")})
    for i, given in enumerate(_items(body.get("messages"), "messages")):
        role = given.get("role")
        content = given.get("content")
        if role not in ("user", "assistant"):
            raise ValueError(f"messages[{i}].role is {role!r:.60}; it must be user or assistant")
        blocks = (
            [{"type": "text", "text": content}]
            if isinstance(content, str)
            else _items(content, f"messages[{i}].content")
        )
        known = {"text", "tool_result", "tool_use", "thinking", "redacted_thinking"}
        strange = [b.get("type") for b in blocks if b.get("type") not in known]
        if strange:
            raise ValueError(
                f"messages[{i}].content has a block of type {strange[0]!r:.60}; the policy reads"
                " text alone"
            )
        of = {kind: [b for b in blocks if b.get("type") == kind] for kind in known}
        for block in of["tool_result"]:
            text = _text(block.get("content"), f"messages[{i}].content")
            messages.append(
                {"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id"))}
            )
        text = _text(of["text"], f"messages[{i}].content")
        if role == "assistant":
            message: Message = {"role": role, "content": text}
            thinking = "".join(str(b.get("thinking", "")) for b in of["thinking"])
            if thinking:
                message["reasoning_content"] = thinking
            if of["tool_use"]:
                message["tool_calls"] = [
                    _call(b.get("id"), b.get("name"), b.get("input") or {}) for b in of["tool_use"]
                ]
            messages.append(message)
        elif of["text"] or not of["tool_result"]:
            messages.append({"role": role, "content": text})
    tools = [_tool(t, "input_schema") for t in _items(body.get("tools") or [], "tools")]
    stops = _stops(body.get("stop_sequences"), "stop_sequences")
    return _check_request(
        ChatRequest(messages, tools, _limit(body, "max_tokens"), stops, bool(body.get("stream")))
    )


def read_request(path: str, raw: bytes, *, ignore: bool = False) -> ChatRequest:
    """Read the body of a request to a route. `ignore`: see `refuse_settings`. Raises: ValueError
    with a sentence. For JSON of an unexpected shape, it may also raise RecursionError, TypeError or
    AttributeError."""
    body = json.loads(raw)
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    refuse_settings(body, path, ignore=ignore)
    return WIRES[path].read(body)._replace(size=len(raw))


def _check_request(request: ChatRequest) -> ChatRequest:
    """Return the request. Raises: ValueError if the policy cannot answer the conversation."""
    if not request.messages:
        raise ValueError("there are no messages")
    try:
        json.dumps([request.messages, request.tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(
            "a text holds half of a surrogate pair, which no tokenizer reads"
        ) from None
    return request


# ------------------------------------------------------------------------------------------ writing


def _usage(reply: Reply, before: str, after: str) -> dict[str, Any]:
    read = reply.step.prompt_length
    said = len(reply.step.response_ids)
    return {before: read, after: said}


def _chat_usage(reply: Reply) -> dict[str, Any]:
    counts = _usage(reply, "prompt_tokens", "completion_tokens")
    return counts | {"total_tokens": sum(counts.values())}


def _finish(reply: Reply) -> str:
    if reply.step.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _named(reply: Reply, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.number}",
        "object": kind,
        "created": reply.created,
        "model": "policy",
    }


def write_chat(reply: Reply) -> dict[str, Any]:
    """Write a reply as a chat.completion."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.content or (None if reply.calls else ""),
        "refusal": None,
    }
    if reply.step.thinking:
        message["reasoning_content"] = reply.step.thinking
    if reply.calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
            for i, n, a in reply.calls
        ]
    choice = {"index": 0, "message": message, "finish_reason": _finish(reply), "logprobs": None}
    return _named(reply, "chat.completion") | {"choices": [choice], "usage": _chat_usage(reply)}


def write_chat_events(reply: Reply, request: ChatRequest) -> Iterator[Event]:
    """Yield the chunks of a chat.completion: one for the role, chunks for each part of the reply,
    and the end."""

    def chunk(delta: dict[str, Any], finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}
        return "", _named(reply, "chat.completion.chunk") | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    if reply.step.thinking:
        yield chunk({"reasoning_content": reply.step.thinking})
    if reply.content:
        yield chunk({"content": reply.content})
    for index, (id, name, arguments) in enumerate(reply.calls):
        yield chunk(
            {
                "tool_calls": [
                    {
                        "index": index,
                        "id": id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                ]
            }
        )
        yield chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    yield chunk({}, _finish(reply))
    if request.usage:
        yield (
            "",
            _named(reply, "chat.completion.chunk") | {"choices": [], "usage": _chat_usage(reply)},
        )
    yield "", "[DONE]"


def write_responses(reply: Reply) -> dict[str, Any]:
    """Write a reply as a response with its output items."""
    output: list[dict[str, Any]] = []
    if reply.step.thinking:
        parts: list[dict[str, Any]] = [{"type": "reasoning_text", "text": reply.step.thinking}]
        output.append(
            {"type": "reasoning", "id": f"rs_{reply.number}", "summary": [], "content": parts}
        )
    if reply.content or not reply.calls:
        parts = [{"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}]
        output.append(
            {
                "type": "message",
                "id": f"msg_{reply.number}",
                "role": "assistant",
                "status": "completed",
                "content": parts,
            }
        )
    for i, (id, name, arguments) in enumerate(reply.calls):
        named = {"call_id": id, "name": name, "arguments": arguments, "status": "completed"}
        output.append({"type": "function_call", "id": f"fc_{reply.number}_{i}", **named})
    counts = _usage(reply, "input_tokens", "output_tokens")
    counts |= {"total_tokens": sum(counts.values()), "input_tokens_details": {"cached_tokens": 0}}
    cut = reply.step.finish_reason == "length"
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "created_at": reply.created,
        "status": "incomplete" if cut else "completed",
        "model": "policy",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "usage": counts | {"output_tokens_details": {"reasoning_tokens": 0}},
    }


def write_responses_events(reply: Reply, request: ChatRequest) -> Iterator[Event]:
    """Yield the events of a response, each with its number."""
    whole = write_responses(reply)
    begun: dict[str, Any] = {**whole, "status": "in_progress", "output": []}
    events: list[tuple[str, dict[str, Any]]] = [("response.created", {"response": begun})]
    for index, item in enumerate(whole["output"]):
        at: dict[str, Any] = {"output_index": index}
        empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        events.append(("response.output_item.added", at | {"item": {**item, **empty}}))
        at = at | {"item_id": item["id"]}
        if item["type"] == "function_call":
            events.append(
                ("response.function_call_arguments.delta", at | {"delta": item["arguments"]})
            )
            events.append(
                (
                    "response.function_call_arguments.done",
                    at | {"arguments": item["arguments"], "name": item["name"]},
                )
            )
        if item["type"] == "message":
            part = item["content"][0]
            at = at | {"content_index": 0}
            events.append(("response.content_part.added", at | {"part": {**part, "text": ""}}))
            events.append(
                ("response.output_text.delta", at | {"delta": part["text"], "logprobs": []})
            )
            events.append(
                ("response.output_text.done", at | {"text": part["text"], "logprobs": []})
            )
            events.append(("response.content_part.done", at | {"part": part}))
        events.append(("response.output_item.done", {"output_index": index, "item": item}))
    events.append((f"response.{whole['status']}", {"response": whole}))
    for number, (name, data) in enumerate(events):
        yield name, {"type": name, "sequence_number": number, **data}


def write_messages(reply: Reply) -> dict[str, Any]:
    """Write a reply as a message of Anthropic's protocol."""
    blocks: list[dict[str, Any]] = []
    if reply.step.thinking:
        blocks.append({"type": "thinking", "thinking": reply.step.thinking, "signature": ""})
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for id, name, arguments in reply.calls:
        given = {"id": id, "name": name, "input": json.loads(arguments)}
        blocks.append({"type": "tool_use", **given})
    end = "stop_sequence" if reply.stopped else "end_turn"
    why = {"length": "max_tokens", "tool_calls": "tool_use", "stop": end}[_finish(reply)]
    return {
        "id": f"msg_{reply.number}",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": blocks,
        "stop_reason": why,
        "stop_sequence": reply.stopped if why == "stop_sequence" else None,
        "usage": _usage(reply, "input_tokens", "output_tokens"),
    }


def write_messages_events(reply: Reply, request: ChatRequest) -> Iterator[Event]:
    """Yield the events of a message: its head, then each block (opened, filled and closed), and the
    end."""
    whole = write_messages(reply)
    begun: dict[str, Any] = {**whole, "content": [], "stop_reason": None}
    events: list[tuple[str, dict[str, Any]]] = [("message_start", {"message": begun})]
    for index, block in enumerate(whole["content"]):
        key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        events.append(
            (
                "content_block_start",
                {"index": index, "content_block": {**block, key: {} if key == "input" else ""}},
            )
        )
        delta = (
            {"type": "input_json_delta", "partial_json": json.dumps(block[key])}
            if key == "input"
            else {"type": f"{key}_delta", key: block[key]}
        )
        events.append(("content_block_delta", {"index": index, "delta": delta}))
        events.append(("content_block_stop", {"index": index}))
    end = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    events += [("message_delta", {"delta": end, "usage": whole["usage"]}), ("message_stop", {})]
    yield from ((name, {"type": name, **data}) for name, data in events)


def write_openai_error(status: int, sentence: str) -> dict[str, Any]:
    """Return the body of a refusal for OpenAI's clients."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": sentence, "type": kind, "param": None, "code": None}}


def write_anthropic_error(status: int, sentence: str) -> dict[str, Any]:
    """Return the body of a refusal for Anthropic's clients."""
    names = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = names.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": sentence}}


WIRES = {
    CHAT: Wire(read_chat, write_chat, write_chat_events, write_openai_error),
    RESPONSES: Wire(read_responses, write_responses, write_responses_events, write_openai_error),
    MESSAGES: Wire(read_messages, write_messages, write_messages_events, write_anthropic_error),
}


def reply_message(step: Step, content: str) -> Message:
    """Return a reply as the message that a client sends back if it does not change the reply."""
    message: Message = {"role": "assistant", "content": content}
    if step.thinking:
        message["reasoning_content"] = step.thinking
    calls = [_call(c.id, c.name, dict(c.arguments)) for c in step.tool_calls if not c.error]
    if calls:
        message["tool_calls"] = calls
    return message
