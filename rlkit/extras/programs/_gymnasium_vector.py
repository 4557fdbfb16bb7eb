"""Play Gymnasium's vector environments. The samples of a task are the sub-environments of one
instance, and they act together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from rlkit.environments import gymnasium
from rlkit.environments.games import unpack
from rlkit.environments.toolbox import close_instance
from rlkit.errors import Hung
from rlkit.system.deadline import call_user
from rlkit.types import Environment, Table, Task, reaches, safe


@reaches(settings="import")
@safe("make")
def gymnasium_vector(*, make: Callable[..., Any], **settings: Any) -> Environment:
    """Make an environment like `gymnasium`, for an instance that steps many episodes in one call.

    The samples of a task share one instance. All its sub-environments are reset with the task's
    seed. The instance is stepped when every running episode has an action. So the episodes of a
    task wait for each other, and each joins the decoding as soon as it can (`generation.admission`
    is "free" for them). When the episode of a sub-environment is over, its last action is repeated
    and its results are ignored. If `step` raises, all episodes of the instance end.

    Args:
      make: function with the keyword num_envs that returns an instance. An instance has
        `reset(seed=[…])` → (observations, infos), `step(actions)` → (observations, rewards,
        terminated, truncated, infos), and perhaps `close()`. Each value has an entry for each
        sub-environment. All functions may be plain or async.
      settings: settings of `gymnasium` for each episode: parse_action, render, max_turns,
        system_prompt, history.
    Raises: the errors of `gymnasium`.
    """

    def table(task: Task, count: int) -> Vector:
        return Vector(task, count, make, settings)

    base = gymnasium(make=lambda: None, **settings)  # its own check of `make` knows no num_envs
    return base._replace(
        session=lambda task: table(task, 1).player(0), table=Table(table, players=0)
    )


class Vector:
    """Hold an instance and the actions that its next step needs."""

    def __init__(
        self, task: Task, count: int, make: Callable[..., Any], settings: Mapping[str, Any]
    ):
        self.task = task
        self.count = count
        self.make = make
        self.settings = settings
        self.starting = False
        self.changed = asyncio.Event()
        self.instance: Any = None
        self.first: Any = None
        self.live = set(range(count))
        self.actions: dict[int, Any] = {}  # last action of each sub-environment
        self.waiting: dict[int, asyncio.Future[tuple[Any, ...]]] = {}
        # sub-environments of the step in progress
        self.stepping: dict[int, asyncio.Future[tuple[Any, ...]]] = {}
        self.hung: BaseException | None = None

    def player(self, number: int) -> AbstractAsyncContextManager[Any]:
        """Return the session of a sub-environment's episode."""
        made: Any = gymnasium(make=lambda: Lane(self, number), **self.settings).session
        return made(self.task)

    async def start(self, seed: int) -> None:
        """Make and reset the instance once. The first caller does this, and all others wait.
        Raises: Hung if the instance hangs."""
        while self.first is None:
            if self.hung is not None:
                raise Hung(str(self.hung))
            if self.starting:
                await self.changed.wait()
                continue
            self.starting = True
            self.changed.clear()
            try:
                self.instance = await call_user(
                    "the environment's make", self.make, num_envs=self.count
                )
                reset = self.instance.reset
                given = await call_user(
                    "the environment's reset", reset, seed=[seed] * self.count, count=self.count
                )
                self.first, _ = unpack(given, "observations, infos")
            except Hung as error:
                self.hung = error
                raise
            finally:
                self.starting = False
                self.changed.set()

    async def step(self) -> None:
        """Step the instance if every running episode has an action. Otherwise do nothing."""
        if not self.waiting or self.live - self.waiting.keys():
            return
        waiting = self.waiting
        self.waiting = {}
        self.stepping = waiting
        filler = next(iter(self.actions.values()))
        try:
            actions = tuple(self.actions.get(i, filler) for i in range(self.count))
            given = await call_user(
                "the environment's step", self.instance.step, actions, count=len(waiting)
            )
            parts = unpack(given, "observations, rewards, terminated, truncated, infos")[:4]
            for number, answer in waiting.items():
                if not answer.done():
                    answer.set_result((*(entry(part, number) for part in parts), {}))
        except Exception as error:
            for answer in waiting.values():
                if not answer.done():
                    answer.set_exception(error)

    def lost(self, number: int, error: BaseException) -> None:
        """Record that an episode has failed while it stepped or reset the instance. No other
        episode can use the instance any more."""
        self.hung = error
        self.changed.set()
        for answer in (*self.stepping.values(), *self.waiting.values()):
            if not answer.done():
                answer.set_exception(Hung(str(error)))


class Lane:
    """Present one sub-environment as a separate game."""

    def __init__(self, vector: Vector, number: int):
        self.vector = vector
        self.number = number

    async def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Return the first observation. The first caller makes and resets the instance."""
        vector = self.vector
        await vector.start(seed)
        return entry(vector.first, self.number), {}

    async def step(self, action: Any) -> tuple[Any, ...]:
        """Return the result of the action, once all running episodes have acted."""
        if self.vector.hung is not None:
            raise Hung(str(self.vector.hung))
        self.vector.actions[self.number] = action
        answer = self.vector.waiting[self.number] = asyncio.get_running_loop().create_future()
        await self.vector.step()
        return await answer

    async def close(self) -> None:
        """End the episode, so the others no longer wait for it."""
        vector = self.vector
        vector.live.discard(self.number)
        vector.waiting.pop(self.number, None)
        await vector.step()
        if not vector.live:
            await close_instance(vector.instance)


def entry(batch: Any, number: int) -> Any:
    """Return a batch's entry for one sub-environment. A mapping of batches gives a mapping of
    entries."""
    return (
        {key: entry(value, number) for key, value in batch.items()}
        if isinstance(batch, Mapping)
        else batch[number]
    )
