"""Combine a system prompt from the config with the messages of a row."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.types import Message


def with_system_prompt(
    messages: Sequence[Message], system_prompt: str | None
) -> tuple[Message, ...]:
    """Put a system prompt in front of the messages.

    Chat templates read only one system message. Therefore, if the row has its own system message,
    both are joined into one message, with the config's text first. If the system prompt is None or
    '', nothing is added. The row's messages are not changed in place.
    """
    if not system_prompt:
        return tuple(messages)
    if messages and messages[0].get("role") == "system":
        own, *messages = messages
        system_prompt = f"{system_prompt}\n\n{own.get('content') or ''}"
    return ({"role": "system", "content": system_prompt}, *messages)
