"""Define the contract of a program's episode: how the program asks the policy, and how the episode
ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.errors import RLKitError
from rlkit.types import Messages, Step


class RequestRefused(RLKitError):
    """Say why a request gets no reply. The program gets this sentence with status 400."""


class Ask(NamedTuple):
    """Let a program ask the policy. A call takes a whole conversation and returns the policy's
    reply, which is sampled and recorded. Several calls may wait at the same time."""

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
        """Return the policy's reply to a conversation. The conversation extends a recorded
        conversation, or starts a new training row.

        Args:
          messages: all messages of the conversation. The policy's replies are in the client's form.
          tools: schemas of the tools.
          limit: largest number of tokens of the reply, if it is below the run's limit.
          stop: stop texts. The first stop text in the content ends the reply. The content of the
            returned step still contains it. The content of the recorded step ends before it, and
            the client's form of the reply must end there too.
          size: bytes of the request. A large request is rendered in a thread.
        Raises: RequestRefused if the episode has reached its limit of replies, if the context has
          no room for a reply, or if the chat template cannot write the conversation.
        """
        return await self.reply(messages, tools, limit, stop=stop, size=size)

    async def count_tokens(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), *, size: int = 0
    ) -> int:
        """Return the number of tokens in the context of the next reply. Nothing is sampled or
        recorded. Raises: RequestRefused."""
        return await self.tokens(messages, tools, size=size)


class Ended(NamedTuple):
    """Describe how a program's episode ended."""

    truncation: str = ""  # why the episode did not end by itself: deadline or error
    reward: float | None = None  # the program's own score of the episode
    metadata: Mapping[str, Any] = {}
    error: str = ""  # what failed, in words
    # Whether the program itself ended with an error. If the policy's last reply had an unreadable
    # call, the error is the policy's fault, and the episode is still scored.
    crashed: bool = False
