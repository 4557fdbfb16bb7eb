"""Gymnasium's vector environments: the samples of a task are the sub-environments of one instance, and act together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from rlkit.environments._gymnasium import gymnasium
from rlkit.system.loops import awaited
from rlkit.types import Environment, Task, reaches, safe


@reaches(settings="import")
@safe("make")
def gymnasium_vector(*, make: Callable[..., Any], **settings: Any) -> Environment:
    """`gymnasium` for an environment that steps many episodes in one call.

    The samples of a task share an instance, whose sub-environments are all reset with the task's seed. It steps once every episode
    that goes on has an action, so the episodes of a task wait for each other, and join the decoding as soon as they can
    (`generation.admission` is "free" for them). A sub-environment whose episode is over is given its last action; what it makes of that
    is not looked at. An error of `step` ends all its episodes.

    Args:
      make: (num_envs=…) → an object with `reset(seed=[…])` → (observations, infos), `step(actions)` → (observations, rewards,
        terminated, truncated, infos), each with an entry for each sub-environment, and perhaps `close()`; plain or async.
      settings: of `gymnasium`, for each episode: parse_action, render, max_turns, system_prompt, history.
    Raises: as `gymnasium`.
    """

    def table(task: Task, count: int) -> Vector:
        return Vector(task, count, make, settings)

    base = gymnasium(make=make, **settings)
    return base._replace(session=lambda task: table(task, 1).player(0), table=table, players=0)


class Vector:
    """An instance and the actions that it waits for."""

    def __init__(self, task: Task, count: int, make: Callable[..., Any], settings: Mapping[str, Any]):
        self.task, self.count, self.make, self.settings = task, count, make, settings
        self.starting, self.instance, self.first = asyncio.Lock(), None, None
        self.live = set(range(count))
        self.actions: dict[int, Any] = {}  # the last one of each sub-environment
        self.waiting: dict[int, asyncio.Future[tuple[Any, ...]]] = {}

    def player(self, number: int) -> AbstractAsyncContextManager[Any]:
        """The session of a sub-environment's episode."""
        made: Any = gymnasium(make=lambda: Lane(self, number), **self.settings).session
        return made(self.task)

    async def step(self) -> None:
        """Steps the instance, if no episode that goes on is without an action."""
        if not self.waiting or self.live - self.waiting.keys():
            return
        waiting, self.waiting = self.waiting, {}
        filler = next(iter(self.actions.values()))
        try:
            given = await awaited(self.instance.step(tuple(self.actions.get(i, filler) for i in range(self.count))))  # type: ignore[attr-defined]
            for number, answer in waiting.items():
                if not answer.done():
                    answer.set_result((*(entry(part, number) for part in given[:4]), {}))
        except Exception as error:
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(error)


class Lane:
    """A sub-environment, as an environment of its own."""

    def __init__(self, vector: Vector, number: int):
        self.vector, self.number = vector, number

    async def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """The first observation; the first one who asks makes and resets the instance."""
        vector = self.vector
        async with vector.starting:
            if vector.first is None:
                vector.instance = await awaited(vector.make(num_envs=vector.count))
                vector.first, _ = await awaited(vector.instance.reset(seed=[seed] * vector.count))  # type: ignore[attr-defined]
        return entry(vector.first, self.number), {}

    async def step(self, action: Any) -> tuple[Any, ...]:
        """What the action led to, once the others have theirs."""
        self.vector.actions[self.number] = action
        answer = self.vector.waiting[self.number] = asyncio.get_running_loop().create_future()
        await self.vector.step()
        return await answer

    async def close(self) -> None:
        """The episode is over, and the others no longer wait for it."""
        vector = self.vector
        vector.live.discard(self.number)
        vector.waiting.pop(self.number, None)
        await vector.step()
        if not vector.live:
            await awaited(getattr(vector.instance, "close", lambda: None)())


def entry(batch: Any, number: int) -> Any:
    """What a batch holds for one sub-environment: of a mapping of batches, a mapping."""
    return {key: entry(value, number) for key, value in batch.items()} if isinstance(batch, Mapping) else batch[number]
