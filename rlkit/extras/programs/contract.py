"""What a program's episode is given, and what it says at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rlkit.errors import RLKitError
from rlkit.types import Messages, Step


class RequestRefused(RLKitError):
    """A request that gets no reply; the program reads the sentence, with status 400."""


class Ask(Protocol):
    """What a program's episode is given: a whole conversation → the policy's reply, sampled and
    recorded. Several may wait at once."""

    async def __call__(
        self, messages: Messages, tools: Sequence[Mapping[str, Any]] = (), limit: int | None = None
    ) -> Step:
        """The reply to a conversation that extends a recorded one, or that starts a row of its own.

        Args:
          messages: from the first to the last; replies of the policy as they came back. tools:
            their schemas.
          limit: tokens of the reply, where fewer than the run's.
        Raises: RequestRefused where the episode is at its limit of replies, or the context leaves
          no room.
        """
        ...


class Ended(NamedTuple):
    """How a program left its episode."""

    truncation: str = ""  # why it did not end by itself: deadline or error
    reward: float | None = None  # what the program says that the episode is worth
    metadata: Mapping[str, Any] = {}
    error: str = ""  # what failed, in words
    # It ended by an error of its own. After a call that could not be read this is the policy's
    # fault, and the episode is scored.
    crashed: bool = False
