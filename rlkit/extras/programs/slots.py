"""Limit the amount of simultaneous work with slots, across event loops."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager


class AtMost:
    """Let at most `n` blocks run at the same time, in any event loops and threads. Waiting blocks
    get a slot in the order of their calls."""

    def __init__(self, n: int):
        self.free = n
        self.lock = threading.Lock()
        self.queue = deque[Future[None]]()

    @asynccontextmanager
    async def held(self, late: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Hold a slot during the block. If no slot is free, `late` is called before the wait."""
        turn: Future[None] = Future()
        self.queue.append(turn)
        self._give(0)
        if not turn.done():
            late()
        try:
            await asyncio.wrap_future(turn)
        except asyncio.CancelledError:
            if not turn.cancel():  # the slot was given at the same moment
                self._give(1)
            raise
        try:
            yield
        finally:
            self._give(1)

    def _give(self, back: int) -> None:
        with self.lock:
            self.free += back
            while self.free and self.queue:
                turn = self.queue.popleft()
                if turn.set_running_or_notify_cancel():
                    self.free -= 1
                    turn.set_result(None)
