"""Open and close the session of an episode. A session is the environment's side of the
conversation. A user may write a session class; otherwise the session is made from the environment's
functions."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from functools import partial
from typing import Any

from rlkit.environments.toolbox import close_instance
from rlkit.environments.tools import execute, has_mark
from rlkit.errors import EnvironmentFailed, RLKitError, describe_definition, describe_error
from rlkit.system.deadline import call_user, run_in_worker
from rlkit.system.loops import await_value, closing, run_together
from rlkit.system.waiting import waiting
from rlkit.types import (
    Environment,
    Messages,
    Rollout,
    Session,
    Task,
    TellsState,
    Tool,
    ToolCall,
    ToolExecutor,
    ToolResult,
)

# a function with the arguments of __exit__; plain or async
Leave = Callable[[type[BaseException] | None, BaseException | None, Any], Any]


@contextmanager
def blame_environment(what: str, task: Task) -> Iterator[None]:
    """Run the block of a `with` statement, and raise EnvironmentFailed for any error in it. The
    message names the environment's function (`what`), the task, the file and the line."""
    try:
        yield
    except RLKitError:
        raise
    except Exception as error:
        raise EnvironmentFailed(
            f"the environment's {what} raised {describe_error(error)}, in an episode of task"
            f" {task.id!r}"
        ) from error


@asynccontextmanager
async def open_session(environment: Environment, task: Task) -> AsyncIterator[Session]:
    """Open the session of an episode, for the block of a `with` statement. The session comes from
    `environment.session`, or else is made from the environment's functions.

    However the block ends, the session is closed once, by its own context manager or by its method
    `close()`. A session with neither is not closed.
    Raises: EnvironmentFailed if opening or closing raises. If the block and the closing both raise,
      the error of the block is raised, with a note on the error of the closing.
    """
    session, leave, closes = await _enter_session(environment, task)
    failed: BaseException | None = None
    try:
        missing = [
            name for name in ("tools", "first_prompt", "answer") if not hasattr(session, name)
        ]
        if missing or not isinstance(session.tools, Mapping):
            wrong = (
                f"has no `{missing[0]}`"
                if missing
                else f"has tools of type {type(session.tools).__name__}"
            )
            raise EnvironmentFailed(
                f"environment.session gave {session!r:.200} for task {task.id!r}, which {wrong}; a"
                " session has tools, a mapping of name → function, first_prompt() and"
                " answer(rollout), as rlkit.types.Session describes them"
            )
        yield session
    except BaseException as error:
        failed = error
        raise
    finally:
        try:
            how = (
                (None, None, None)
                if failed is None
                else (type(failed), failed, failed.__traceback__)
            )
            with closing(), blame_environment("session's close", task):
                await call_user("the environment's close", leave, *how, named=closes, closes=True)
        except RLKitError as error:
            if failed is None:
                raise
            # a context manager may raise the block's own error again
            if failed not in (error, error.__cause__):
                failed.add_note(str(error))


async def _enter_session(environment: Environment, task: Task) -> tuple[Any, Leave, Any]:
    """Enter the session of an episode. Return the session, the function to call at its end, and the
    environment's function to name in messages."""
    if environment.session is None:
        with blame_environment("tools", task):
            tools = (
                await call_user("the environment's tools", environment.tools, task)
                if environment.tools
                else {}
            )
        return (
            FunctionSession(environment, task, tools),
            lambda *_: close_instance(tools),
            close_instance,
        )
    opens = environment.session
    with blame_environment("session", task):
        given = await call_user("the environment's session", opens, task)
        if isinstance(given, AbstractAsyncContextManager):
            entered = await call_user("the environment's session", given.__aenter__, named=opens)
            return entered, given.__aexit__, opens
        if isinstance(given, AbstractContextManager):
            entered = await call_user("the environment's session", given.__enter__, named=opens)
            return entered, given.__exit__, opens
        return given, lambda *_: close_instance(given), close_instance


class FunctionSession:
    """Run a session with an environment's functions. Tools with state belong to this episode
    alone."""

    def __init__(self, environment: Environment, task: Task, tools: Mapping[str, Tool]):
        self.environment = environment
        self.task = task
        self.tools = tools

    async def first_prompt(self) -> Messages:
        """Return the environment's first prompt, or else the task's messages."""
        make = self.environment.first_prompt
        if make is None:
            return self.task.messages
        return await call_user("the environment's first prompt", make, self.task)

    async def answer(self, rollout: Rollout) -> tuple[Rollout, Messages | None]:
        """Answer the last reply. First `stop` may end the episode. If the reply has tool calls,
        return their results. Otherwise return the environment's next prompt; without a next prompt,
        the episode ends."""
        environment = self.environment
        index = len(rollout.steps) - 1
        with blame_environment("stop", self.task):
            if environment.stop is not None and await call_user(
                "the environment's stop", environment.stop, rollout, index
            ):
                return rollout, None
        if rollout.steps[-1].tool_calls:
            return await answer_calls(
                rollout,
                self.tools,
                execute=environment.execute or execute,
                max_calls=environment.max_calls,
            )
        with blame_environment("next prompt", self.task):
            follow = environment.next_prompt
            said = (
                None
                if follow is None
                else await call_user("the environment's next prompt", follow, rollout, index)
            )
        return rollout, said

    async def state(self) -> Mapping[str, Any]:
        """Return the state of the tools (rlkit.environments.toolbox). The result is empty for tools
        without state."""
        if not isinstance(self.tools, TellsState):
            return {}
        return await call_user("the state of the tools", self.tools.state)


async def answer_calls(
    rollout: Rollout,
    tools: Mapping[str, Tool],
    *,
    execute: ToolExecutor = execute,
    max_calls: int = 8,
) -> tuple[Rollout, Messages]:
    """Run the tool calls of the last reply. Return the rollout with the results, and the messages
    for the policy. A user's own session may call this function too.

    Calls run one after another, in their order. If every called tool is marked `tool.independent =
    True`, they run at the same time, unless all of them are also marked `bounded`. Bounded tools
    always return quickly, so they run in order.

    Args:
      execute: function that runs a call. If it is not async, it runs in a thread, unless it is
        marked `bounded`.
      max_calls: number of calls to run. Further calls are answered with a sentence for the policy.
    """
    step = rollout.steps[-1]
    refusal = f"Error: at most {max_calls} call(s) in one reply; this one was not run."

    async def answered(i: int, asked: ToolCall) -> ToolResult:
        if i >= max_calls:
            return ToolResult(asked.id, asked.name, refusal, ok=False)
        with (
            blame_environment("executor of tool calls", rollout.task),
            waiting("the executor of tool calls", execute),
        ):
            if inspect.iscoroutinefunction(execute) or has_mark(execute, "bounded"):
                return await await_value(execute(asked, tools))
            return await await_value(
                await run_in_worker(
                    partial(execute, asked, tools), None, f"the executor of the call {asked.name}"
                )
            )

    named = {
        call.name
        for call in step.tool_calls[:max_calls]
        if not call.error and isinstance(call.name, str)
    }
    known = [tools[name] for name in named if name in tools]
    if all(has_mark(tool, "independent") for tool in known) and not all(
        has_mark(tool, "bounded") for tool in known
    ):
        results = await run_together(answered(i, asked) for i, asked in enumerate(step.tool_calls))
    else:
        results = [await answered(i, asked) for i, asked in enumerate(step.tool_calls)]
    step = step._replace(tool_results=tuple(results))
    return (
        rollout._replace(steps=(*rollout.steps[:-1], step)),
        [result.message for result in results],
    )


async def with_state(rollout: Rollout, session: Session) -> Rollout:
    """Return the rollout with the session's end state in `rollout.state`, if the session has
    `state()`.

    Raises: EnvironmentFailed if the state is not a mapping of names to JSON values.
    """
    if not isinstance(session, TellsState) or not callable(session.state):
        return rollout
    tell = session.state
    with blame_environment("state", rollout.task):
        state = await call_user("the environment's state", tell)
    if type(state) is dict and not state:
        return rollout
    try:
        # a copy, because the session may change its state later
        plain = json.loads(json.dumps(state))
        if not isinstance(plain, dict):
            raise TypeError("it is no mapping")
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(
            f"{describe_definition(tell)}: a session's state is {state!r:.200} ({error}); give a"
            " mapping of names to text, numbers, true, false, None, and lists and mappings of them"
        ) from None
    return rollout._replace(state=plain)
