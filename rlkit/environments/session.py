"""Opening an episode's session: its own, or one made of the environment's functions."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rlkit.environments.tools import execute
from rlkit.errors import EnvironmentFailed, RLKitError, place
from rlkit.types import Environment, Messages, Rollout, Session, Task, Tool, ToolResult


async def awaited(value: Any) -> Any:
    """The value, or what it gives where it has to be awaited."""
    return await value if inspect.isawaitable(value) else value


@contextmanager
def blamed(what: str, task: Task) -> Iterator[None]:
    """Says of an error in the environment's own code which part raised it, for which task, and in which file and line."""
    try:
        yield
    except RLKitError:
        raise
    except Exception as error:
        raise EnvironmentFailed(
            f"the environment's {what} raised {type(error).__name__}: {error} at {place(error)}, in an episode of task {task.id!r}"
        ) from error


@asynccontextmanager
async def opened(environment: Environment, task: Task) -> AsyncIterator[Session]:
    """The session of an episode; closed once, however the episode ends."""
    if environment.session is None:
        yield FunctionSession(environment, task)
        return
    with blamed("session", task):
        session = environment.session(task)
    if hasattr(session, "__aenter__"):
        async with session as entered:
            yield entered
    elif hasattr(session, "__enter__"):
        with session as entered:
            yield entered
    else:
        try:
            yield session
        finally:
            if hasattr(session, "close"):
                await awaited(session.close())


class FunctionSession:
    """A session made of an environment's functions; what its tools keep is the episode's own."""

    def __init__(self, environment: Environment, task: Task):
        self.environment, self.task = environment, task
        with blamed("tools", task):
            self.tools: Mapping[str, Tool] = environment.tools(task) if environment.tools else {}

    async def first_prompt(self) -> Messages:
        make = self.environment.first_prompt
        return self.task.messages if make is None else await awaited(make(self.task))

    async def answer(self, rollout: Rollout) -> tuple[Rollout, Messages | None]:
        environment, index, step = self.environment, len(rollout.steps) - 1, rollout.steps[-1]
        with blamed("stop", rollout.task):
            if environment.stop is not None and environment.stop(rollout, index):
                return rollout, None
        if step.tool_calls:
            results = await self.results(step.tool_calls)
            rollout = rollout._replace(steps=(*rollout.steps[:-1], step._replace(tool_results=results)))
            return rollout, [{"role": "tool", "tool_call_id": r.id, "name": r.name, "content": r.content} for r in results]
        with blamed("next prompt", rollout.task):
            said = None if environment.next_prompt is None else await awaited(environment.next_prompt(rollout, index))
        return rollout, [{"role": "user", "content": said}] if isinstance(said, str) else said

    async def results(self, calls: Any) -> tuple[ToolResult, ...]:
        limit, run = self.environment.max_calls, self.environment.execute or execute
        refusal = f"Error: at most {limit} calls in one reply; this one was not run."
        return tuple(
            [
                await awaited(run(call, self.tools)) if i < limit else ToolResult(call.id, call.name, refusal, ok=False)
                for i, call in enumerate(calls)
            ]
        )
