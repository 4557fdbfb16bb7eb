"""asynchrony=in_flight: the weights change in the middle of episodes, at counted rounds of decoding.

    rounds  ──────────────────┬───────────────┬────────────────────────┬───────────────┬──────▶
            groups of step s complete    weights s + 1    groups of s + 1 complete  weights s + 2
                              ◀ switch_every ▶                         ◀ switch_every ▶

The groups of several steps are decoded side by side. An update counts as `switch_every` rounds: so much longer the old weights go on
to sample, then those that the update made take over, and completions that have begun go on with them, on the cache that they have. Time is
counted in rounds and never read from a clock, so a run repeats itself without a record of when the weights changed. Between the
rounds in which the weights change everything stands still while the trainer updates.

A checkpoint holds what stands still: the caches, what each reply has so far, and the replies of episodes that are not over. Where a
run is resumed, their sessions are opened again and answer the same replies again, and then the decoding goes on, bit for bit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch

from rlkit.engines import Cached
from rlkit.engines.cached.scheduler import Row, Scheduler
from rlkit.engines.cached.suspended import go_on, suspended
from rlkit.episodes._collect import collected
from rlkit.episodes.record import from_bytes, to_bytes
from rlkit.episodes.stream import StreamState, take
from rlkit.errors import EngineError
from rlkit.functional import mix
from rlkit.system import rng
from rlkit.system.loops import outside_loops
from rlkit.training.experiment import Experiment
from rlkit.training.flight import Asked, Dispatched, Flight
from rlkit.training.groups import judged
from rlkit.training.memory import named
from rlkit.training.metrics import Clock
from rlkit.training.schedules.progress import foreseen
from rlkit.types import Generation, Policy, Rollout, SamplingParams, Task


@dataclass
class StepGroups:
    """The groups of a step, on their way."""

    request: Asked
    x: Experiment  # of that step
    tasks: Sequence[Task]
    before: StreamState
    after: StreamState
    keys: set[int] = field(default_factory=set)  # of its episodes that have asked for something, or are over
    played: dict[tuple[int, int], Rollout] = field(default_factory=dict)  # position of the prompt and sample → episode that is over
    task: asyncio.Task[list[Rollout]] | None = None

    @property
    def here(self) -> bool:
        """Whether all of its episodes wait for tokens, or are over: then it is no matter of time with whom they decode."""
        left = len(self.tasks) * self.x.batch.group_size - len(self.played)
        return self.task is not None and (self.task.done() or len(self.keys) >= left)

    def seeds(self, group: int, sample: int) -> Any:
        """Of the completions of an episode, without end."""
        return (mix(mix(self.x.seed, self.request.step, group, sample), turn) for turn in count())


class Joined:
    """The engine of the episodes of one part: the one that all share, and replies that it gave before the run was resumed."""

    def __init__(self, flight: InFlight, part: StepGroups):
        self.flight, self.part = flight, part
        self.busy_s = 0.0  # that of the shared engine counts

    async def load(self, weights: Policy, version: int) -> None:
        """Its owner does that, for all parts at once."""

    async def generate(self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> Generation:
        flight, engine = self.flight, self.flight.engine
        self.part.keys.add(key)
        flight.asked.discard(seed)
        flight.news.set()
        row = flight.rows.pop(seed, None)
        if row is not None:
            row.key = key
        if seed in flight.due:
            engine.due[key] = flight.due.pop(seed)
        if seed not in flight.known:
            if row is None:
                reply = await engine.generate(key, prompt_ids, seed, params)
            elif row.prompt == tuple(prompt_ids):
                reply = await engine.attach(key, prompt_ids, seed, params)
            else:
                raise EngineError(
                    f"asynchrony=in_flight: an episode of step {self.part.request.step + 1} was half-way when the run was saved, and its "
                    "environment has given it another prompt now; make it a function of its draws and the replies, or choose asynchrony=lag"
                )
            flight.known[seed] = reply
        flight.told[key] = seed
        return flight.known[seed]

    def release(self, key: int) -> None:
        self.part.keys.add(key)
        self.flight.engine.release(key)
        self.flight.news.set()


class InFlight:
    """What samples ahead with asynchrony=in_flight, as the trainer sees it: in its own process, and only while it waits for groups.

    Args:
      x: the experiment. tasks: the prompts of the run.
    """

    slots = None  # of weights: there is one version at a time
    kernel = None  # of an engine elsewhere
    engine: Cached

    def __init__(self, x: Experiment, tasks: Sequence[Task]):
        self.x, self.tasks, self.runner = x, tasks, asyncio.Runner()
        self.policy: Policy | None = None
        self.parts: dict[int, StepGroups] = {}  # step → its groups
        self.last = StreamState()  # behind the newest of them
        self.known: dict[int, Generation] = {}  # seed → reply, of episodes that are not over
        self.told: dict[int, int] = {}  # key → seed of the newest reply that the episode was given
        self.rows: dict[int, Row] = {}  # after a resume, seed → a slot whose episode has not come back yet
        self.due: dict[int, float] = {}  # after a resume, seed → the round in which what follows that reply is due
        self.asked: set[int] = set()  # after a resume, seeds of the completions that have still to be asked for again
        self.leaving: dict[int, set[int]] = {}  # after a resume, step → keys of its episodes that are over and whose slots are not free yet
        self.saved: Mapping[str, Any] | None = None  # what a resumed run begins with
        self.sessions: list[float] = []  # seconds that each episode spent in its session since the last groups
        self.figures: dict[str, float] = {}
        self.news = asyncio.Event()

    def publish(self, policy: Policy, version: int, staleness: int) -> float:
        """The policy's weights, which have changed in place, are this version. Raises: EngineError where that cannot be."""
        if self.policy is None:
            self.policy, self.engine = policy, self.x.generation.engine.by_hand()  # type: ignore[attr-defined]
        before, decoder = self.engine.decoder, self.engine.make_decoder(policy)
        if not isinstance(decoder, Scheduler) or decoder.shares:
            where = "on a CPU" if isinstance(decoder, Scheduler) else "a model whose layers all see the whole context"
            raise EngineError(f"asynchrony=in_flight: weights change in the middle of episodes only {where}; choose asynchrony=overlap")
        if before is not None and decoder is not before:
            raise EngineError(
                "asynchrony=in_flight: the weights have moved in memory under episodes that are half-way; choose asynchrony=lag"
            )
        self.engine.decoder, self.engine.version = decoder, version
        if self.saved is not None:
            self._revive(decoder, self.saved)
        decoder.switch(version)
        return 0.0

    def ask(self, request: Asked) -> Asked:
        """Begins the groups of a step, beside those that are on their way."""
        before = self.last if request.before is None else request.before
        x = foreseen(self.x, request.progress, request.step)
        drawn, self.last = take(self.tasks, before, x.batch.prompts, seed=x.seed)
        part = self.parts[request.step] = StepGroups(request, x, drawn, before, self.last)
        if self.saved and (data := self.saved["played"].get(request.step)) is not None:
            for rollout in from_bytes(data.numpy().tobytes()):
                part.played[rollout.group, rollout.sample] = rollout._replace(task=drawn[rollout.group])
        return request

    def receive(self, request: Asked) -> Dispatched:
        """The groups of a step, once the round has come in which the weights change. Raises what an episode raised."""
        part, self.sessions = self.parts[request.step], []
        begun = self.decoder.rounds
        with rng.kept(), outside_loops(), named("generation", "lower generation.engine.max_cached_tokens or batch.prompts"):
            rollouts = self.runner.run(self._received(part))
        del self.parts[request.step]
        self.figures = {"rounds": self.decoder.rounds - begun}
        scored = judged(part.x, rollouts, step=request.step, first=0, clock=Clock())
        return Dispatched(request.step, request.version, scored, scored, part.before, part.after, request.settings)

    def arrived(self, ahead: Sequence[Any]) -> tuple[Any, ...]:
        """What is in flight; groups are given away only once their step has come."""
        return tuple(ahead)

    def timed(self, clock: Clock) -> Any:
        """Context manager: groups are sampled."""
        return clock.sampling(self.engine)

    def measured(self, **seconds: float) -> dict[str, float]:
        """Figures of the last groups."""
        return self.figures

    def close(self) -> None:
        """Every session is closed."""
        with rng.kept(), outside_loops():
            self.runner.close()

    @property
    def decoder(self) -> Scheduler:
        """What decodes, once there are weights."""
        assert isinstance(self.engine.decoder, Scheduler)
        return self.engine.decoder

    # ------------------------------------------------------------------------------------------------ sampling

    async def _received(self, part: StepGroups) -> list[Rollout]:
        for own in self.parts.values():
            own.task = own.task or asyncio.create_task(self._played(own))
            own.task.add_done_callback(lambda _: self.news.set())
        while not (self._failed() or (all(own.here for own in self.parts.values()) and not self.asked and not self.due)):
            self.news.clear()
            await self.news.wait()
        await self._decode(lambda: not self.engine.holds(self._keys(part)))
        assert part.task is not None
        rollouts = await part.task
        decoder = self.decoder
        self.engine.until = until = decoder.rounds + self.x.asynchrony.switch_every
        await self._decode(lambda: decoder.rounds >= until)
        self.engine.until, decoder.rounds = float("inf"), max(decoder.rounds, until)
        return rollouts

    async def _played(self, part: StepGroups) -> list[Rollout]:
        def done(rollout: Rollout) -> None:
            part.played[rollout.group, rollout.sample] = rollout
            for _, seed in zip(rollout.steps, part.seeds(rollout.group, rollout.sample), strict=False):
                self.known.pop(seed, None)

        x, request = part.x, part.request
        assert self.policy is not None
        return await collected(
            self.policy, part.tasks, x.environment, engine=Joined(self, part), group_size=x.batch.group_size, seed=x.seed,
            step=request.step, version=request.version, on_done=done, spent=self._spent, over=dict(part.played), **x.generation.params,
        )  # fmt: skip

    def _keys(self, part: StepGroups) -> set[int]:
        """Of the episodes of a step, those from before a resume among them."""
        return part.keys | self.leaving.get(part.request.step, set())

    def _spent(self, seconds: float) -> None:
        self.sessions.append(seconds)

    async def _decode(self, enough: Callable[[], bool]) -> None:
        await self.engine.decode(self.decoder, lambda: self._failed() or enough())
        for part in self.parts.values():
            if part.task is not None and part.task.done():
                part.task.result()  # raises what an episode raised

    def _failed(self) -> bool:
        return any(part.task is not None and part.task.done() and part.task.exception() is not None for part in self.parts.values())

    # ---------------------------------------------------------------------------------------------- in a checkpoint

    def suspended(self) -> dict[str, Any]:
        """What stands still while the trainer updates, as tensors."""
        engine, slots = self.engine, suspended(self.decoder)
        running = {key: request.seed for key, request in (engine.running | engine.waiting).items() if key not in engine.due}
        plain = {
            "decoder": slots["plain"], "asked": [*running.values()], "known": [*self.known.items()],
            "due": [(self.told[key], due) for key, due in engine.due.items()],
            "over": [(step, self.told[key]) for step, part in self.parts.items() for key in engine.over & self._keys(part)],
        }  # fmt: skip
        played = {step: _bytes(to_bytes([_untold(r) for r in part.played.values()])) for step, part in self.parts.items() if part.played}
        self.told = {key: seed for key, seed in self.told.items() if key in engine.due or key in engine.running or key in engine.waiting}
        return {"plain": _bytes(json.dumps(plain).encode()), "played": played, "tensors": slots["tensors"]}

    def knows(self, flight: Flight) -> bool:
        """Whether requests of a checkpoint may be made again here."""
        return flight.suspended is not None

    def prepare(self, policy: Policy, staleness: int, flight: Flight, asked: Sequence[Asked]) -> None:
        """These requests of a checkpoint will be made again: they go on where they stood still."""
        self.saved = flight.suspended

    def _revive(self, decoder: Scheduler, saved: Mapping[str, Any]) -> None:
        plain = json.loads(saved["plain"].numpy().tobytes())
        self.saved, self.rows = None, go_on(decoder, plain["decoder"], saved["tensors"])
        self.known = {seed: _generation(*own) for seed, own in plain["known"]}
        self.asked, self.due = set(plain["asked"]), dict(plain["due"])
        unfinished = {*self.known, *self.asked}
        for number, (step, seed) in enumerate(plain["over"]):  # an episode that is over, whose slot is free from a round to come on
            if seed not in unfinished:
                key = -2 - number
                self.leaving.setdefault(step, set()).add(key)
                self.engine.due[key], self.told[key] = self.due.pop(seed), seed
                self.engine.over.add(key)
                if seed in self.rows:
                    self.rows.pop(seed).key = key


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _untold(rollout: Rollout) -> Rollout:
    return rollout._replace(task=Task(rollout.task.id, ()))


def _generation(token_ids: Any, logprobs: Any, finish_reason: Any, forced: Any, versions: Any) -> Generation:
    return Generation(tuple(token_ids), tuple(logprobs), finish_reason, tuple(forced), tuple((a, b) for a, b in versions))
