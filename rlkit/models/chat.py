"""Convert chat messages to exact token ids, with the model's own chat template.

Two rules hold for any template and tokenizer:

1. **Text cannot forge a turn.** The template is rendered with a placeholder for every content. The
   tokenizer encodes the scaffolding around the placeholders, the text of the template itself. A
   copy of the tokenizer without added tokens encodes each content. Therefore `<|im_end|>` in a
   question or in a tool's result becomes ordinary tokens, never the control token.
2. **Sampled ids are never tokenised again.** The next context is the previous context + the sampled
   ids + the ids of the template's text after a reply (`continuation`). This text is found by
   rendering the template once with a sentinel as the reply.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlkit.errors import TemplateError
from rlkit.types import THINK_TAGS, Message, Messages, Thinking

# A placeholder is a number between these two marks. A content that contains the marks is encoded
# like any other content.
_OPEN = "\u27e6rlkit:"
_CLOSE = "\u27e7"
LONG = 1 << 16  # characters; a longer text is encoded without blocking other threads
# a question that is rendered before a reply, to find the template's text around the reply
_ASKED: Messages = [{"role": "user", "content": "?"}]

# rlkit's own template for tools, to be put in front of a template without tools
TOOL_PROMPT = Path(__file__).with_name("tool_prompt.jinja").read_text()
# The template that writes tools, calls and results into a prompt. "template": the model's own
# template. "prompt": rlkit's TOOL_PROMPT. "auto": the model's own template if it mentions tools,
# else TOOL_PROMPT.
ToolForm = Literal["auto", "template", "prompt"]


class Renderer(NamedTuple):
    """Hold a tokenizer, its copy without added tokens, its thinking tags, and the settings for
    calling its template."""

    tokenizer: Any  # transformers.PreTrainedTokenizerBase with a chat template
    plain: Any  # tokenizers.Tokenizer without added tokens
    thinking: Thinking
    template_arguments: tuple[tuple[str, Any], ...] = ()  # for example enable_thinking
    # (messages, tools) → text, used in place of the template; None: the template
    render: Callable[[Messages, Sequence[Mapping[str, Any]]], str] | None = None


def make_renderer(
    tokenizer: Any,
    *,
    enable_thinking: bool | None = None,
    interruption: str = "",
    tools: ToolForm = "auto",
    render: Callable[[Messages, Sequence[Mapping[str, Any]]], str] | None = None,
) -> Renderer:
    """Make a renderer for a fast tokenizer with a chat template.

    Args:
      tokenizer: a fast `transformers` tokenizer.
      enable_thinking: passed to the template unless it is None.
      interruption: the text written before the closing tag when a thinking budget is used up.
      tools: "prompt" gives a copy of the tokenizer with TOOL_PROMPT in front of its template.
        "auto" does so if the template never mentions `tools`.
      render: (messages, tools) → text, used in place of the template. The contents given to it are
        placeholders, and it must write them unchanged.
    Raises: TemplateError if the tokenizer has no template or is not a fast tokenizer, or if the
    interruption holds a thinking tag.
    """
    if render is None and not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            f"model.path: the tokenizer of '{tokenizer.name_or_path}' has no chat template. Choose"
            " an instruction-tuned model, or give one with model.chat_template=FILE.jinja"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TemplateError(
            f"model.path: '{tokenizer.name_or_path}' has no fast tokenizer; rlkit needs"
            " tokenizer.json"
        )
    if render is None:
        tokenizer = _with_tools(tokenizer, tools)
    arguments = () if enable_thinking is None else (("enable_thinking", enable_thinking),)
    plain = _drop_added_tokens(backend)
    return Renderer(
        tokenizer,
        plain,
        _thinking(tokenizer, plain, interruption),
        arguments,
        render,
    )


def _with_tools(tokenizer: Any, tools: ToolForm) -> Any:
    """Return the tokenizer, or a copy of it with TOOL_PROMPT in front of its template. The template
    is not run here, because it may be untrusted."""
    known = re.search(r"\btools\b", str(tokenizer.chat_template))
    if tools == "template" or (tools == "auto" and known) or has_tool_prompt(tokenizer):
        return tokenizer
    prompted = copy.copy(tokenizer)
    prompted.chat_template = TOOL_PROMPT + tokenizer.get_chat_template()
    return prompted


def has_tool_prompt(tokenizer: Any) -> bool:
    """Return whether rlkit's TOOL_PROMPT writes the tools. An exported model holds TOOL_PROMPT in
    its template, so the result is also True for an exported model."""
    return str(tokenizer.chat_template).startswith(TOOL_PROMPT)


def _thinking(tokenizer: Any, plain: Any, interruption: str) -> Thinking:
    if any(tag in interruption for tag in THINK_TAGS):
        raise TemplateError(
            f"model.interruption={interruption!r}: the closing tag is written behind it; leave"
            f" {' and '.join(THINK_TAGS)} out"
        )
    added = tokenizer.get_added_vocab()
    first, last = (added.get(tag) for tag in THINK_TAGS)
    ids = None if first is None or last is None else (first, last)
    text = interruption + (THINK_TAGS[1] if ids is None else "")
    close = (*plain.encode(text, add_special_tokens=False).ids, *(ids[1:] if ids else ()))
    return Thinking(ids, close, functools.partial(_decode, tokenizer))


def _drop_added_tokens(backend: Any) -> Any:
    from tokenizers import Tokenizer

    description = json.loads(backend.to_str())
    description["added_tokens"] = []
    description["post_processor"] = None
    return Tokenizer.from_str(json.dumps(description))


def encode_text(renderer: Renderer, text: str) -> list[int]:
    """Encode text from outside, such as a question or a tool's result. The ids never hold an added
    token."""
    # encoding takes seconds, and `encode` would hold the interpreter's lock all the time
    if len(text) > LONG:
        return renderer.plain.encode_batch([text], add_special_tokens=False)[0].ids
    return renderer.plain.encode(text, add_special_tokens=False).ids


def encode_scaffold(renderer: Renderer, text: str) -> list[int]:
    """Encode the text of the template itself, with its control tokens. The tokenizer adds no other
    special tokens."""
    return list(_scaffold(renderer, text))


@functools.lru_cache(maxsize=1024)  # the same few texts surround all contents
def _scaffold(renderer: Renderer, text: str) -> tuple[int, ...]:
    return tuple(renderer.tokenizer.encode(text, add_special_tokens=False)) if text else ()


def _read_text_after_reply(renderer: Renderer, masked: Messages) -> str:
    """Return the text that the template writes after a reply, if the messages `masked` follow the
    reply."""
    # the template is a part of the cache's key, because a user may replace it
    return _read_text_between_replies(
        renderer, renderer.tokenizer.chat_template, json.dumps(masked)
    )


@functools.lru_cache(maxsize=1024)  # the same few texts occur between all replies
def _read_text_between_replies(renderer: Renderer, template: str | None, masked: str) -> str:
    sentinel = f"{_OPEN}0{_CLOSE}"
    dialogue = [*_ASKED, {"role": "assistant", "content": sentinel}, *json.loads(masked)]
    rendered = _render(renderer, dialogue, ())
    if rendered.count(sentinel) != 1:
        raise TemplateError(
            f"the chat template writes an assistant's content {rendered.count(sentinel)} times, not"
            " once"
        )
    return rendered.partition(sentinel)[2]


def encode_prompt(
    renderer: Renderer, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """Return the ids of a conversation up to the assistant's next turn.

    Args:
      messages: the conversation. Assistant messages hold their thinking in `reasoning_content`,
        apart from `content`.
      tools: JSON schemas of the callable functions.
    Raises: TemplateError if the template drops or repeats a content, or if a tool's schema holds a
    control token.
    """
    _check_schemas(renderer, tools)
    masked, contents = _mask_contents(messages)
    return _encode_rendered(renderer, _render(renderer, masked, tools), contents)


def continuation(
    renderer: Renderer, messages: Messages, last_id: int | None, *, cut: bool = False
) -> list[int]:
    """Return the ids written by the template between a reply and the next reply.

    Args:
      messages: the messages to the policy after its reply (tool results, or a user's message).
      last_id: the last sampled id. If this id is the end-of-turn token, the template's own
        end-of-turn token is left out.
      cut: True if the length limit truncated the reply. A truncated reply has no end-of-turn token,
        and none is added.
    """
    masked, contents = _mask_contents(messages, first=1)
    ids = _encode_rendered(renderer, _read_text_after_reply(renderer, masked), contents, first=1)
    if ids and (ids[0] == last_id or cut):
        ids = ids[1:]
    return ids


def encode_reply(renderer: Renderer, reply: Message) -> list[int]:
    """Return the ids that the policy would sample for a given reply: thinking, content and calls in
    the template's form, then the end-of-turn token.

    Args:
      reply: an assistant's message, with its thinking in `reasoning_content`, apart from `content`,
        and its calls in `tool_calls`.
    Raises: TemplateError if the template writes the reply at another position than the policy
    would, or drops a part of the reply.
    """
    masked, contents = _mask_contents([reply])
    before = _render(renderer, _ASKED, ())
    after = _render(renderer, [*_ASKED, *masked], ())
    end = _read_text_after_reply(renderer, [])
    who = name_template(renderer.tokenizer)
    if not after.startswith(before) or not end or not after.endswith(end):
        raise TemplateError(f"{who} writes a reply in another place than the policy would")
    text = after[len(before) : -len(end)]
    lost = [content for i, content in enumerate(contents) if f"{_OPEN}{i}{_CLOSE}" not in text]
    if lost:
        raise TemplateError(f"{who} does not write a part of a reply: '{lost[0][:80]}'")
    return _encode_joined(renderer, text, contents) + encode_scaffold(renderer, end)[:1]


def _encode_joined(renderer: Renderer, rendered: str, contents: Sequence[str]) -> list[int]:
    """Encode a rendered reply. Control tokens come only from the scaffolding, the text of the
    template.

    The text between two control tokens is encoded in one piece, with its scaffolding and contents
    together. A model samples this text in the same way, because it does not know where a content
    begins.
    """
    added = renderer.tokenizer.get_added_vocab()
    control = "|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)"
    ids: list[int] = []
    text = ""
    for i, piece in enumerate(re.split(f"{_OPEN}(\\d+){_CLOSE}", rendered)):
        if i % 2:
            text += contents[int(piece)]
            continue
        for part in re.split(f"({control})", piece):
            if part in added:
                ids += [*encode_text(renderer, text), added[part]]
                text = ""
            else:
                text += part
    return ids + encode_text(renderer, text)


def _render(renderer: Renderer, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> str:
    """Render messages whose texts are placeholders. If the template writes a call's arguments as
    JSON, the quotation marks around their placeholder are removed."""
    if renderer.render is not None:
        text = renderer.render(messages, tools)
    else:
        try:
            text = renderer.tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                **dict(renderer.template_arguments),
            )
        except Exception as error:  # jinja2 raises many kinds; all come from the template
            raise TemplateError(f"{name_template(renderer.tokenizer)} fails: {error}") from error
    for call in (call for message in messages for call in message.get("tool_calls") or ()):
        mark = call["function"]["arguments"]
        text = text.replace(f'"{mark}"', mark)
    return text


def name_template(tokenizer: Any) -> str:
    """Return the name of a chat template for a message: the template's own file, or its model's
    path."""
    file = getattr(tokenizer, "template_file", None)
    return (
        f"model.chat_template={file}"
        if file
        else f"the chat template of '{tokenizer.name_or_path}'"
    )


def _mask_contents(messages: Messages, first: int = 0) -> tuple[list[Message], list[str]]:
    """Replace all text from outside by numbered placeholders. Return the new messages and the list
    of replaced texts."""
    contents: list[str] = []

    def placeholder(text: str) -> str:
        contents.append(text)
        return f"{_OPEN}{first + len(contents) - 1}{_CLOSE}"

    masked: list[Message] = []
    for message in messages:
        copy: Any = {key: value for key, value in message.items() if key in Message.__annotations__}
        for key in ("reasoning_content", "content"):
            if copy.get(key):
                copy[key] = placeholder(copy[key])
        for key in {"name", "tool_call_id"} & copy.keys():
            copy[key] = _clean_name(copy[key])
        calls = message.get("tool_calls")
        if calls:
            copy["tool_calls"] = [_mask_call(call, placeholder) for call in calls]
        masked.append(copy)
    return masked, contents


def _clean_name(name: Any) -> str:
    """Replace characters that could form a control token. A policy chooses the name of an unknown
    tool, a row the name of a speaker, and a template writes names beside tokens."""
    return re.sub(r"[^\w.:/-]", "_", str(name or ""))


def _mask_call(call: Mapping[str, Any], placeholder: Any) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {
        "id": _clean_name(call.get("id")),
        "type": "function",
        "function": {"name": placeholder(function["name"]), "arguments": placeholder(text)},
    }


def _encode_rendered(
    renderer: Renderer, rendered: str, contents: Sequence[str], first: int = 0
) -> list[int]:
    """Encode rendered text: the scaffolding with control tokens, the contents without them."""
    ids: list[int] = []
    position = 0
    for i, content in enumerate(contents, start=first):
        mark = f"{_OPEN}{i}{_CLOSE}"
        at = rendered.find(mark, position)
        if at < 0:
            # A template may drop text on purpose; for example, Qwen3's drops earlier thinking. Then
            # no ids stand for this text.
            continue
        ids += encode_scaffold(renderer, rendered[position:at])
        ids += encode_text(renderer, content)
        position = at + len(mark)
    tail = rendered[position:]
    if _OPEN in tail:
        raise TemplateError(
            "the chat template reorders or repeats the contents of its messages; rlkit cannot"
            " encode it exactly"
        )
    return ids + encode_scaffold(renderer, tail)


def _check_schemas(renderer: Renderer, tools: Sequence[Mapping[str, Any]]) -> None:
    if not tools:
        return
    text = json.dumps(list(tools), ensure_ascii=False)
    for token in renderer.tokenizer.get_added_vocab():
        if token in text:
            raise TemplateError(
                f"a tool's schema holds the control token '{token}'; take it out of the docstring"
            )


def check_template(renderer: Renderer, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise TemplateError if the template leaves out a text that the run needs: a tool's name or a
    tool's result."""
    if not tools:
        return
    result = f"{_OPEN}0{_CLOSE}"
    answer: Message = {
        "role": "tool",
        "tool_call_id": "call_0",
        "name": tools[0]["function"]["name"],
        "content": result,
    }
    rendered = _render(renderer, [*_ASKED, {"role": "assistant", "content": "!"}, answer], tools)
    missing = [t["function"]["name"] for t in tools if t["function"]["name"] not in rendered]
    remedy = (
        "choose another model, or a task without tools"
        if has_tool_prompt(renderer.tokenizer)
        else "use model.tools=prompt, or a model whose template knows tools"
    )
    if missing or result not in rendered:
        lost = f"the tools {missing}" if missing else "a tool's result"
        raise TemplateError(f"{name_template(renderer.tokenizer)} does not write {lost}; {remedy}")


def decode(renderer: Renderer, ids: Sequence[int], *, control_tokens: bool = True) -> str:
    """Return the text of token ids, with all spaces unchanged."""
    return _decode(renderer.tokenizer, ids, control_tokens)


def _decode(tokenizer: Any, ids: Sequence[int], control_tokens: bool = True) -> str:
    return tokenizer.decode(
        list(ids), skip_special_tokens=not control_tokens, clean_up_tokenization_spaces=False
    )
