"""Record an episode's replies: their training rows, and their conversations as a tree."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.types import Message, Messages, Step

Schemas = Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """Hold a recorded reply."""

    number: int  # position in the order of recording
    parent: Call | None  # the previous reply in its row
    after: int | None  # number of the last reply recorded before its request
    step: Step  # its prompt_ids are the part of the context after the parent's reply
    dropped: bool  # whether its row begins because the client dropped the thinking of a reply
    depth: int  # number of replies before it in its row
    context: int  # hash of its context's token ids
    places: tuple[int, int]  # place of its conversation in the trees with and without thinking

    @property
    def path(self) -> list[Call]:
        """Return the replies from the root to this reply."""
        calls = [self]
        while calls[-1].parent is not None:
            calls.append(calls[-1].parent)
        return calls[::-1]

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Return the token ids of the whole context of the reply."""
        return self.ids[: self.step.prompt_length]

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the token ids of the whole context and of the reply itself."""
        ids: list[int] = []
        for call in self.path:
            ids += call.step.prompt_ids
            ids += call.step.response_ids
        return tuple(ids)

    @property
    def length(self) -> int:
        """Return the number of `ids`."""
        return self.step.prompt_length + len(self.step.response_ids)


class Tree:
    """Hold recorded conversations as a tree. There is a place after each message, and a place lists
    the replies that end at it.

    White space in a call's arguments, the order of their keys, and 1.0 instead of 1 make no
    difference. Looking up a conversation takes one step per message.

    Args:
      thinking: whether two conversations are different if only the thinking of a reply differs.
    """

    def __init__(self, *, thinking: bool):
        self.thinking = thinking
        # (place, next message or tools) → next place
        self.next: dict[tuple[int, Hashable], int] = {}
        self.ends: defaultdict[int, list[Call]] = defaultdict(list)

    def replies(self, tools: Schemas, messages: Messages) -> Sequence[Call]:
        """Return the recorded replies that end this conversation."""
        place = self.next.get((0, _written(tools)))
        for message in messages:
            if place is None:
                return ()
            place = self.next.get((place, self._said(message)))
        return () if place is None else self.ends.get(place, ())

    def begin(self, tools: Schemas) -> int:
        """Return the place after these tools, before the first message."""
        return self._follow(0, _written(tools))

    def extend(self, place: int, messages: Iterable[Message]) -> int:
        """Return the place after these messages."""
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
    read = json.loads(json.dumps(list(value)), parse_float=_read_number)
    return json.dumps(read, sort_keys=True)


def _read_number(text: str) -> float:
    """Read 1.0 as 1, because JavaScript writes it so."""
    number = float(text)
    return int(number) if number.is_integer() else number
