"""The record of an episode's replies: their rows, and their conversations as a tree."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.types import Message, Messages, Step

Schemas = Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """A recorded reply."""

    number: int  # in the order of recording
    parent: Call | None  # the reply before it in its row
    after: int | None  # number of the last reply before its request
    step: Step  # its prompt_ids are the part of its context behind the parent's reply
    dropped: bool  # its row begins because the client dropped the thinking of a reply
    depth: int  # replies before it in its row
    context: int  # hash of the ids of its context
    places: tuple[int, int]  # its conversation, in the trees with and without thinking

    @property
    def path(self) -> list[Call]:
        """The replies from the root to this one."""
        calls = [self]
        while calls[-1].parent is not None:
            calls.append(calls[-1].parent)
        return calls[::-1]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The whole context of the reply."""
        return self.ids[: self.step.prompt_length]

    @property
    def ids(self) -> tuple[int, ...]:
        """Its whole context and the reply itself."""
        ids: list[int] = []
        for call in self.path:
            ids += call.step.prompt_ids
            ids += call.step.response_ids
        return tuple(ids)

    @property
    def length(self) -> int:
        """The number of `ids`."""
        return self.step.prompt_length + len(self.step.response_ids)


class Tree:
    """Recorded conversations: a place after each message, and the replies that end there.

    White space in a call's arguments and the order of its keys make no difference. Looking up a
    conversation costs one step a message.

    Args:
      thinking: whether conversations differ by the thinking of a reply.
    """

    def __init__(self, *, thinking: bool):
        self.thinking = thinking
        self.next: dict[tuple[int, Hashable], int] = {}  # a place and what follows it → a place
        self.ends: defaultdict[int, list[Call]] = defaultdict(list)

    def replies(self, tools: Schemas, messages: Messages) -> Sequence[Call]:
        """The recorded replies at the end of a conversation."""
        place = self.next.get((0, _written(tools)))
        for message in messages:
            if place is None:
                return ()
            place = self.next.get((place, self._said(message)))
        return () if place is None else self.ends.get(place, ())

    def begin(self, tools: Schemas) -> int:
        """The place of these tools, before the first message."""
        return self._follow(0, _written(tools))

    def extend(self, place: int, messages: Iterable[Message]) -> int:
        """The place behind these messages."""
        for message in messages:
            place = self._follow(place, self._said(message))
        return place

    def _follow(self, place: int, said: Hashable) -> int:
        return self.next.setdefault((place, said), len(self.next) + 1)

    def _said(self, message: Message) -> Hashable:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        return (
            message["role"],
            message.get("content", ""),
            message.get("reasoning_content", "") if self.thinking else "",
            _written(calls) if calls else "",
            message.get("tool_call_id", ""),
        )


def _written(value: Iterable[Any]) -> str:
    return json.dumps(list(value), sort_keys=True)
