"""The contract of a program's episode: its means, and its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.errors import RLKitError
from rlkit.types import Messages, Step


class RequestRefused(RLKitError):
    """A request that gets no reply; the program reads the sentence, with status 400."""


class Ask(NamedTuple):
    """The means of a program's episode: a whole conversation → the policy's reply, sampled and
    recorded. Several calls may wait at once."""

    reply: Callable[..., Awaitable[Step]]
    tokens: Callable[..., Awaitable[int]]

    async def __call__(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] = (),
        limit: int | None = None,
        *,
        stop: Sequence[str] = (),
        size: int = 0,
    ) -> Step:
        """Reply to a conversation. It extends a recorded one, or starts a row of its own.

        Args:
          messages: from the first to the last; the policy's replies in the client's form. tools:
            their schemas.
          limit: tokens of the reply, if fewer than the run's.
          stop: texts of which the first in the content ends the reply. The given step holds it; the
            content of the recorded one ends before it, and the client's form of the reply must too.
          size: bytes of the request. A large one is rendered in a thread.
        Raises: RequestRefused if the episode is at its limit of replies, or the context leaves no
          room.
        """
        return await self.reply(messages, tools, limit, stop=stop, size=size)

    async def count_tokens(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, size: int = 0
    ) -> int:
        """Tokens of the context that the reply would have; nothing is sampled or recorded. Raises:
        RequestRefused."""
        return await self.tokens(messages, tools, size=size)


class Ended(NamedTuple):
    """The end of a program's episode."""

    truncation: str = ""  # why it did not end by itself: deadline or error
    reward: float | None = None  # the program's own score of the episode
    metadata: Mapping[str, Any] = {}
    error: str = ""  # what failed, in words
    # It ended by an error of its own. After an unreadable call the error is the policy's fault, and
    # the episode is scored.
    crashed: bool = False
