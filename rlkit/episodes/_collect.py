"""Many episodes at once: tasks in, whole episodes out. The same function serves training, evaluation and plain rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from rlkit.engines import Cached
from rlkit.environments import environment_of
from rlkit.episodes.episode import play
from rlkit.episodes.programs import Conversations, play_program
from rlkit.episodes.replies import check_engine, encoder, speaker
from rlkit.functional import mix
from rlkit.system import rng
from rlkit.system.loops import awaited, blocking, together
from rlkit.types import Engine, Environment, Messages, Policy, Rollout, SamplingParams, Session, Step, Task

KEYS = count()  # of episodes, for engines


class Start:
    """Where episodes wait for each other before their first replies, so that what decodes together does not depend on whose first
    prompt was there first."""

    def __init__(self, *, waits: bool):
        self.waits, self.missing, self.all_here = waits, 0, asyncio.Event()

    def place(self) -> Place:
        """One more episode that the others wait for."""
        self.missing += 1
        return Place(self)


class Place:
    """An episode's place at the start."""

    def __init__(self, start: Start):
        self.start, self.here = start, False

    def arrive(self) -> None:
        """The episode is ready for its first reply, or over."""
        self.start.missing -= not self.here
        self.here = True
        if not self.start.missing:
            self.start.all_here.set()

    async def ready(self) -> None:
        """Waits until every episode has arrived."""
        self.arrive()
        if self.start.waits:
            await self.start.all_here.wait()


async def collected(
    policy: Policy,
    tasks: Sequence[Task],
    environment: Environment | Callable[[Task], Environment],
    *,
    engine: Engine | None = None,
    group_size: int = 1,
    seed: int = 0,
    step: int = 0,
    first: int = 0,
    version: int = 0,
    on_done: Callable[[Rollout], None] | None = None,
    spent: Callable[[float], None] = lambda seconds: None,
    **params: Any,
) -> list[Rollout]:
    """Play `group_size` independent episodes of each task, all of them at the same time.

    `collect` is the plain function, which also works inside a running event loop; `await collected(…)` is the same as a coroutine.

    Args:
      policy: what is sampled from, with its weights as they are now.
      tasks: the prompts, one group each.
      environment: one for all tasks, or a function that gives each task its own.
      engine: what samples the completions; None is a new `rlkit.engines.Cached()`. Keep one of your own to play many times: its cache
        and what it has compiled outlive the call.
      group_size: samples per task, > 0.
      seed, step: of the run and of the RL step. With the position of the task and the sample they are all the randomness
        there is (rlkit.functional.mix), so the same call gives the same rollouts in any batch, on any rank. What a session draws
        from the generators of python, numpy and torch follows from them too; a plain tool runs in a thread, which has none of its own.
      first: position of the first task, where these are further prompts of the same step.
      version: RL steps that the weights have done.
      on_done: called with each episode once it is over.
      spent: called with the seconds that each episode spent in its session.
      params: of SamplingParams (temperature, max_new_tokens, …).
    Returns: unscored rollouts, task by task, samples of a task side by side.
    Raises: the first error of any episode, as it was raised, after every session has been closed.
    """
    engine = Cached() if engine is None else engine
    sampling, encode = SamplingParams(**params), encoder(policy)
    check_engine(engine)
    await awaited(engine.load(policy, version))
    start = Start(waits=sampling.admission != "free")

    async def programmed(task: Task, own: Environment, place: Place, draws: int) -> Rollout:
        conversations = Conversations(policy, own, engine, sampling, task, seed=draws, keys=KEYS, ready=place.ready)
        rollout = await play_program(conversations)
        return rollout._replace(steps=tuple(step._replace(versions=step.versions or ((0, version),)) for step in rollout.steps))

    async def episode(task: Task, group: int, sample: int, place: Place) -> Rollout:
        own, key, draws = environment_of(environment, task), next(KEYS), mix(seed, step, group, sample)
        speak = speaker(policy, own, engine, sampling, key=key, seed=draws, encode=encode)

        async def say(rollout: Rollout, messages: Messages, session: Session) -> Step | None:
            await place.ready()
            said = await speak(rollout, messages, session)
            return said and said._replace(versions=said.versions or ((0, version),))  # of an engine that does not say

        held = [key]

        def over() -> None:
            while held:
                engine.release(held.pop())

        try:
            if own.program is not None:
                rollout = await programmed(task, own, place, draws)
                rollout = rollout._replace(group=group, sample=sample)
            else:
                rollout = await play(task, own, say, group=group, sample=sample, seed=draws, said=over, spent=spent)
        finally:
            over()
            place.arrive()
        rollout = named_limit(policy, rollout)
        if on_done is not None:
            on_done(rollout)
        return rollout

    with rng.kept():
        return await together(
            [episode(task, i, j, start.place()) for i, task in enumerate(tasks, first) for j in range(group_size)],
        )


collect = blocking(collected, name="collect")


def named_limit(policy: Policy, rollout: Rollout) -> Rollout:
    """The episode, truncated by "context" instead of "length" where its last reply was cut by the end of the context."""
    if rollout.truncation != "length":
        return rollout
    last = rollout.steps[-1]
    full = last.prompt_length + len(last.response_ids) >= policy.context_length
    return rollout._replace(truncation="context") if full else rollout
