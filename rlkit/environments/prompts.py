"""How a system prompt from the config meets the messages of a row."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.types import Message


def with_system_prompt(
    messages: Sequence[Message], system_prompt: str | None
) -> tuple[Message, ...]:
    """The messages with a system prompt in front.

    A row that brings its own system message keeps it: chat templates read one only, so the two
    become one message, the given text first. None or '' adds nothing. The row's messages are not
    changed.
    """
    if not system_prompt:
        return tuple(messages)
    if messages and messages[0].get("role") == "system":
        own, *messages = messages
        system_prompt = f"{system_prompt}\n\n{own.get('content', '')}"
    return ({"role": "system", "content": system_prompt}, *messages)
