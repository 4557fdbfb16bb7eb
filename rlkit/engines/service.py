"""Run an engine of this process as a service. Many callers await their completions, and one decoder
samples all of these completions together.

    episodes ── generate ──▶ waiting ── admit ──▶ decoder: advance, … ──▶ replies ──▶ episodes
                                          ▲
             an episode that waited for its environment resumes decoding a fixed number of
             rounds after its last reply

The decoder is plain and synchronous, and knows nothing of episodes. The service is one asyncio
task. It advances the decoder, hands out the replies, and then gives every episode one turn of the
event loop to request its next completion. An episode without a new request after this turn counts
as waiting for its environment, for example for a tool or a program. Wall-clock time never decides
this.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

from rlkit.errors import EngineError, name_function
from rlkit.system.waiting import decoding, waiting
from rlkit.types import Generation, Policy, SamplingParams

Complete = Callable[[Policy, list[Sequence[int]], list[int], SamplingParams], list[Generation]]


YIELD = 0.01  # seconds of decoding, until the other tasks of the event loop get a turn


class Decoder(Protocol):
    """Define the decoder of a service. Between two calls of `advance`, a decoder does nothing."""

    # The decoder's clock. Each `advance` adds the number of tokens sampled in each slot. While
    # nothing decodes, the service moves the clock forward.
    rounds: int

    @property
    def idle(self) -> bool:
        """Return whether the decoder has no completion left to sample."""

    def accepts(self, params: SamplingParams) -> bool:
        """Return whether a completion with these parameters can be sampled together with the
        running completions."""

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        """Accept a completion; later calls of `advance` sample it."""

    def release(self, key: int) -> None:
        """Forget everything about this episode, including its running completion."""

    def advance(self) -> list[tuple[int, Generation]]:
        """Sample more tokens of every completion, and return the finished completions with their
        keys."""


class Request(NamedTuple):
    """Hold a request of an episode for a completion."""

    prompt_ids: Sequence[int]
    seed: int
    params: SamplingParams
    reply: asyncio.Future[Generation]


class Service:
    """Implement the contract `Engine` with a decoder from `make_decoder`. A service serves one
    event loop at a time."""

    def __init__(self) -> None:
        self.busy_s = 0.0  # seconds spent in the decoder, and in giving it new weights
        self.late_s = 0.0  # seconds during which decoding waited for the episodes due in a round
        self.decoder: Decoder | None = None
        self.version = 0
        self.failure: BaseException | None = None  # an error of the decoder; `load` clears it
        self._forget()

    def _forget(self) -> None:
        self.waiting: dict[int, Request] = {}  # requests not yet given to the decoder
        self.running: dict[int, Request] = {}
        # an episode waiting for its environment → the round at which the decoder waits for the
        # episode's next request; inf: the decoder never waits for this request
        self.due: dict[int, float] = {}
        self.over: set[int] = set()  # episodes in `due` already released by their callers
        self.answered: dict[int, SamplingParams] = {}  # episodes with a reply from this round
        self.driver: asyncio.Task[None] | None = None
        self.news = asyncio.Event()  # set by every call of `generate` or `release`

    def make_decoder(self, policy: Policy) -> Decoder:
        """Make the decoder for these weights, or return the present decoder if it can use them."""
        raise NotImplementedError(
            f"{type(self).__name__} makes no decoder; define make_decoder(policy)"
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Return the context manager in which the service uses the decoder."""
        yield

    async def load(self, weights: Policy, version: int) -> None:
        """Use these weights, in place, for sampling from now on.

        Raises: EngineError while episodes still use the engine.
        """
        if (
            self.driver is not None
            and self.driver.get_loop() is asyncio.get_running_loop()
            and not self._count_in_play()
        ):
            await asyncio.wait([self.driver])  # it ends when no episode requests a completion
        if self._count_in_play():
            raise EngineError(
                f"{type(self).__name__}.load: {self._count_in_play()} episodes are in play, and"
                " weights"
                " change only between episodes; await their completions, and call release(key) for"
                " each episode that is over"
            )
        begun = time.perf_counter()
        self.decoder = self.make_decoder(weights)
        self.busy_s += time.perf_counter() - begun
        self.version = version
        self.failure = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this engine; see `rlkit.types.MeasuredEngine`."""
        return {"late_s": self.late_s}

    def _count_in_play(self) -> int:
        return len({*self.running, *self.waiting, *self.answered, *self.due} - self.over)

    async def generate(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> Generation:
        """Sample one completion; see `rlkit.types.Engine`.

        Raises: ValueError for sampling parameters out of range. EngineError if no weights are
        loaded yet.
        """
        problems = find_out_of_range(params)
        if problems:
            raise ValueError("; ".join(problems))
        if self.decoder is None:
            raise EngineError(
                f"{type(self).__name__}.generate: there are no weights yet; await load(policy,"
                " version) first"
            )
        if self.failure is not None:
            raise self.failure
        loop = asyncio.get_running_loop()
        if self.driver is None or self.driver.get_loop() is not loop:
            self._forget()
            self.driver = loop.create_task(self._drive(self.decoder))
            # retrieves the exception, so that asyncio does not log it; the episodes raise it
            self.driver.add_done_callback(lambda task: task.cancelled() or task.exception())
        request = self.waiting[key] = Request(prompt_ids, seed, params, loop.create_future())
        self.news.set()
        return await request.reply

    def release(self, key: int) -> None:
        """Mark the episode as over.

        The service forgets the episode at once, with one exception. If the decoder is to wait for
        the episode's next request in a fixed round, the service forgets the episode in that round.
        Therefore the wall-clock time of this call does not change which completions decode
        together.
        """
        if key in self.due and key not in self.waiting and self.due[key] < math.inf:
            self.over.add(key)
        else:
            self._drop(key)
        self.news.set()

    def _drop(self, key: int) -> None:
        for kept in (self.waiting, self.running, self.due, self.answered):
            kept.pop(key, None)
        self.over.discard(key)
        if self.decoder is not None:
            self.decoder.release(key)

    # ----------------------------------------------------------------------------------- the driver

    async def _drive(self, decoder: Decoder) -> None:
        """Decode round by round until no episode requests a completion."""
        try:
            with self.serving():
                yielded = time.perf_counter()
                while await self._admit(decoder):
                    begun = time.perf_counter()
                    with decoding():
                        replies = decoder.advance()
                    now = time.perf_counter()
                    self.busy_s += now - begun
                    # A turn of the event loop costs as much as several kernels of a small model.
                    # No episode needs a turn while all of them decode.
                    if replies or self.due or now - yielded > YIELD:
                        await self._hand_out(decoder, replies)
                        yielded = time.perf_counter()
        except BaseException as error:
            # CancelledError: the event loop is cancelling this task; the decoder has not failed
            ended = isinstance(error, asyncio.CancelledError)
            self.failure = None if ended else error
            for request in (*self.waiting.values(), *self.running.values()):
                if not request.reply.done():
                    request.reply.cancel() if ended else request.reply.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            for key in (*self.waiting, *self.running, *self.due):
                decoder.release(key)
            self._forget()

    async def _hand_out(self, decoder: Decoder, replies: list[tuple[int, Generation]]) -> None:
        """Give replies to their episodes, and then give every episode one turn of the event loop.
        An episode without a new request after this turn counts as waiting for its environment."""
        for key, reply in replies:
            request = self.running.pop(key)
            if not request.reply.done():  # done: the caller has cancelled it
                # a reply of another type is passed on; the code reading it raises the error
                known = isinstance(reply, Generation)
                request.reply.set_result(
                    reply._replace(versions=((0, self.version),)) if known else reply
                )
                self.answered[key] = request.params
        await asyncio.sleep(0)
        for key, params in self.answered.items():
            if key not in self.waiting:
                rules = {
                    "rounds": decoder.rounds + params.admission_rounds,
                    "barrier": decoder.rounds,
                    "free": math.inf,
                }
                self.due[key] = rules[params.admission]
        self.answered.clear()

    async def _admit(self, decoder: Decoder) -> bool:
        """Wait for the episodes that must resume decoding in this round. Then give the waiting
        requests to the decoder. Return False if no episode requests a completion."""
        while self.waiting or self.due or decoder.idle:
            here = [key for key, due in self.due.items() if due <= decoder.rounds]
            if any(key not in self.waiting and key not in self.over for key in here):
                begun = time.perf_counter()
                await self._wait_for_news()
                self.late_s += time.perf_counter() - begun
                continue
            for key in self.over.intersection(here):
                self._drop(key)
            for key in sorted(self.waiting):
                request = self.waiting[key]
                if not decoder.rounds < self.due.get(key, 0) < math.inf and decoder.accepts(
                    request.params
                ):
                    self.running[key] = self.waiting.pop(key)
                    self.due.pop(key, None)
                    decoder.submit(key, request.prompt_ids, request.seed, request.params)
            if not decoder.idle:
                return True
            counted = [due for due in self.due.values() if due < math.inf]
            if counted:
                # nothing decodes, so move the clock to the round of the next due episode
                decoder.rounds = int(min(counted))
            elif self.due:
                await self._wait_for_news()
            else:
                return False
        return True

    async def _wait_for_news(self) -> None:
        """Wait for the next call of `generate` or `release`."""
        self.news.clear()
        await self.news.wait()


def find_out_of_range(params: Any) -> list[str]:
    """List the sampling settings out of range, in one sentence each. The limits are the same for
    every engine.

    Args:
      params: SamplingParams, or any value with the same fields.
    """
    least = {"max_new_tokens": 1, "temperature": 0, "top_k": 0, "admission_rounds": 1}
    values = {name: getattr(params, name) for name in least}
    problems = [
        f"generation.{name}={value}: must be at least {least[name]}"
        for name, value in values.items()
        if value < least[name]
    ]
    if not 0 < params.top_p <= 1:
        problems.append(
            f"generation.top_p={params.top_p}: must be greater than 0 and at most 1; 1 cuts nothing"
        )
    return problems


class Batched(Service):
    """Make an engine from a plain function. The function completes a list of prompts in one call.

    Args:
      function: (policy, prompts as token ids, one seed per prompt, SamplingParams) → one Generation
        per prompt, in the same order.
    """

    def __init__(self, function: Complete):
        super().__init__()
        self.function = function

    def make_decoder(self, policy: Policy) -> Batches:
        return Batches(partial(self.function, policy))


class Batches:
    """Complete all waiting requests in one call of a function."""

    def __init__(self, complete: Callable[..., list[Generation]]):
        self.complete = complete
        self.rounds = 0
        self.waiting: dict[int, tuple[Sequence[int], int, SamplingParams]] = {}

    @property
    def idle(self) -> bool:
        return not self.waiting

    def accepts(self, params: SamplingParams) -> bool:
        return all(params == own for _, _, own in self.waiting.values())

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        self.waiting[key] = prompt_ids, seed, params

    def release(self, key: int) -> None:
        self.waiting.pop(key, None)

    def advance(self) -> list[tuple[int, Generation]]:
        given = self.waiting
        self.waiting = {}
        prompts, seeds, params = zip(*given.values(), strict=True)
        with waiting("generation.engine", self.complete, count=len(prompts)):
            replies = self.complete(list(prompts), list(seeds), params[0])
        if not isinstance(replies, list | tuple) or len(replies) != len(prompts):
            what = (
                f"{len(replies)} completions"
                if isinstance(replies, list | tuple)
                else f"{replies!r:.200}"
            )
            name = name_function(self.complete)
            raise EngineError(
                f"generation.engine ({name}) gave {what} for {len(prompts)} prompts; give one each,"
                " in their order"
            )
        self.rounds += max(
            len(reply.token_ids) if isinstance(reply, Generation) else 0 for reply in replies
        )
        return list(zip(given, replies, strict=True))
