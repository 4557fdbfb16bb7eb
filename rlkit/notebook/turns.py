"""Episodes that stand still between two replies, so that whoever holds them decides when the policy speaks, and which policy.

turns = begin(policy, tasks, environment=environment)
while any(isinstance(turn, Turn) for turn in turns):
    turns = reply(policy, turns, params, engine)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlkit.environments import environment_of
from rlkit.episodes._collect import KEYS, named_limit
from rlkit.episodes.episode import Say, play
from rlkit.episodes.replies import encoder, speaker
from rlkit.functional import mix
from rlkit.system.loops import CLOSING, outside_loops
from rlkit.types import Engine, Environment, Message, Messages, Policy, Rollout, SamplingParams, Session, Step, Task


class Turn:
    """An episode that waits for the policy: `rollout` is how it stands, `prompt` what it is told next.

    The episode is a coroutine that stands still between two calls, with its session open. So a turn is played on once.
    """

    def __init__(self, stage: Stage, task: Task, environment: Environment, group: int, sample: int, seed: int):
        self.stage, self.environment, self.seed, self.key = stage, environment, seed, next(KEYS)
        self.rollout, self.prompt = Rollout(task, (), group=group, sample=sample), list[Message]()
        self.here, self.granted = asyncio.Event(), asyncio.Queue[Say]()
        self.playing = asyncio.create_task(play(task, environment, self.say, group=group, sample=sample))
        self.playing.add_done_callback(lambda _: self.here.set())

    async def say(self, rollout: Rollout, messages: Messages, session: Session) -> Step | None:
        """Stands still until it is told who speaks."""
        self.rollout, self.prompt = rollout, list(messages)
        self.here.set()
        speak = await self.granted.get()
        return await speak(rollout, messages, session)

    @property
    def conversation(self) -> list[Message]:
        """What a reply is asked for."""
        history = self.rollout.history(len(self.rollout.steps), thinking=self.environment.history == "keep_thinking")
        return [*history, *(m for m in self.prompt if not (self.rollout.steps and m["role"] == "tool"))]  # results are part of the history


class Stage:
    """The event loop that episodes live in from one call to the next."""

    def __init__(self) -> None:
        self.runner, self.turns = asyncio.Runner(), list[Turn]()

    def play(self, policy: Policy, turns: list[Turn], start: Callable[[], Awaitable[None]]) -> list[Turn | Rollout]:
        """Starts, then waits until every episode waits for the policy or is over. Each of `turns` as it stands, or its rollout.

        Raises: the first error, after all sessions have been closed.
        """
        with outside_loops():
            try:
                self.runner.run(self._until_all_wait(start))
            finally:
                if all(turn.playing.done() for turn in self.turns):
                    self.runner.close()
        return [named_limit(policy, turn.playing.result()) if turn.playing.done() else turn for turn in turns]

    async def _until_all_wait(self, start: Callable[[], Awaitable[None]]) -> None:
        try:
            await start()
            for turn in self.turns:
                await turn.here.wait()
            for turn in self.turns:
                if turn.playing.done():
                    turn.playing.result()
        except BaseException:
            for turn in self.turns:
                if turn.playing not in CLOSING:
                    turn.playing.cancel()
            await asyncio.gather(*(turn.playing for turn in self.turns), return_exceptions=True)
            raise


def begin(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    environment: Environment | Callable[[Task], Environment],
    group_size: int = 1,
    seed: int = 0,
    step: int = 0,
) -> list[Turn | Rollout]:
    """The first turns of the episodes that `collect` would play with these arguments; a rollout where one is over before any reply."""
    stage = Stage()

    async def start() -> None:
        for i, task in enumerate(tasks):
            for j in range(group_size):
                stage.turns.append(Turn(stage, task, environment_of(environment, task), i, j, mix(seed, step, i, j)))

    return stage.play(policy, stage.turns, start)


def reply(
    policy: Policy,
    turns: Sequence[Turn | Rollout],
    params: SamplingParams,
    engine: Engine,
    instead: Callable[[Turn], Any] | None = None,
) -> list[Turn | Rollout]:
    """One reply in every episode that waits, all of them one batch; each becomes its next turn, or the rollout.

    Args:
      turns: of one call of `begin`; rollouts among them stay as they are.
      instead: (turn) → what generates its reply, in place of `engine`: `generate` and `release` do.
    """
    waiting = [turn for turn in turns if isinstance(turn, Turn)]
    if not waiting:
        return list(turns)
    encode = encoder(policy)

    def granted(turn: Turn) -> Say:
        own: Any = engine if instead is None else instead(turn)
        speak = speaker(policy, turn.environment, own, params, key=turn.key, seed=turn.seed, encode=encode)

        async def say(rollout: Rollout, messages: Messages, session: Session) -> Step | None:
            try:
                return await speak(rollout, messages, session)
            finally:
                own.release(turn.key)  # the next turn may be that of other weights

        return say

    async def start() -> None:
        if instead is None:
            await engine.load(policy, 0)
        for turn in waiting:
            turn.here.clear()
            turn.granted.put_nowait(granted(turn))

    played = iter(waiting[0].stage.play(policy, waiting, start))
    return [next(played) if isinstance(turn, Turn) else turn for turn in turns]
