"""Make tools with state from a user's class. Each episode has its own instance, and the documented
public methods of the class are the tools.

If the constructor has an argument `task`, it receives the episode's Task. A method `state()`
returns the instance's state at the end of the episode. A reward reads this end state as
rollout.state[NAME], and NAME is the name of the tool's entry in the config. A method `close()` is
called once, however the episode ends. All methods may be async. docs/own_parts.md has an example
with its config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from rlkit.environments.tools import tool_name
from rlkit.errors import ConfigError
from rlkit.system.deadline import call_user
from rlkit.system.waiting import waiting
from rlkit.types import Closes, Task, TellsState, Tool, bound, plain

NOT_TOOLS = ("close", "state")


class Toolbox(dict[str, Tool]):
    """Hold the tools of one episode, by name, and the instances that the tools with state belong
    to."""

    def __init__(self) -> None:
        super().__init__()
        self.instances: dict[str, Any] = {}

    async def state(self) -> dict[str, Any]:
        """Return the end state of each instance with a method `state()`, by the instance's name."""
        tells = {
            name: instance.state
            for name, instance in self.instances.items()
            if isinstance(instance, TellsState) and callable(instance.state)
        }
        return {name: await call_user("a tool's state", tell) for name, tell in tells.items()}

    async def close(self) -> None:
        """Close every instance with a method `close()`. Raises: if calls of `close()` raise, one of
        their errors, after all calls have been made."""
        async with AsyncExitStack() as stack:
            for instance in self.instances.values():
                stack.push_async_callback(close_instance, instance)


async def close_instance(instance: Any) -> None:
    """Call the instance's method `close()`, plain or async, if it has one. Raises: Hung if an async
    `close()` does not end in time."""
    if isinstance(instance, Closes):
        await call_user("the close of", instance.close, closes=True)


def make_tools_function(tools: Mapping[str, Any]) -> Callable[[Task], Any]:
    """Make the function for `Environment.tools`. The returned function is called once per episode
    and returns the episode's tools.

    Args:
      tools: functions and classes by name, or partials of them.
    Raises: ConfigError for a function under another name than its own, for a class without a
      documented public method, or for two tools with the same name.
    """
    givers: dict[str, str] = {}  # name of a tool → name of its entry
    for name, tool in tools.items():
        for found in list_names(name, tool):
            if found in givers:
                raise ConfigError(
                    f"environment.tools.{givers[found]} and environment.tools.{name} both give a"
                    f" tool of the name '{found}'; rename one of the functions or methods, or leave"
                    f" an entry out, as in '~environment.tools.{givers[found]}'"
                )
            givers[found] = name
    if not any(map(tool_class, tools.values())):
        return lambda task: dict(tools)  # a copy, because the user's executor may change it

    async def made(task: Task) -> Toolbox:
        box = Toolbox()
        try:
            for name, tool in tools.items():
                if tool_class(tool) is None:
                    box[name] = tool
                    continue
                asks = "task" in inspect.signature(tool).parameters and "task" not in bound(tool)
                with waiting("a tool's start", tool):
                    box.instances[name] = instance = tool(task=task) if asks else tool()
                box.update({method: getattr(instance, method) for method in list_names(name, tool)})
        except BaseException:
            with suppress(Exception):  # the first error is reported
                await box.close()
            raise
        return box

    return made


def list_signatures(tools: Mapping[str, Any]) -> dict[str, Tool]:
    """Return the tools by name for code that only reads their signatures, for example a parser. A
    method is listed without an instance."""
    out: dict[str, Tool] = {}
    for name, tool in tools.items():
        cls = tool_class(tool)
        if cls is None:
            out[name] = tool
            continue
        for method in list_names(name, cls):
            own = inspect.getattr_static(cls, method)
            out[method] = partial(own, None) if inspect.isfunction(own) else getattr(cls, method)
    return out


def tool_class(tool: Any) -> type | None:
    """Return the class of an entry that is a class or a partial of a class; None for a function."""
    inner = plain(tool)
    return inner if isinstance(inner, type) else None


def list_names(name: str, tool: Any) -> list[str]:
    """Return the names of an entry's tools. A function has its own name. A class has the names of
    its public documented methods, with those of its base classes first."""
    cls = tool_class(tool)
    if cls is None:
        if callable(tool) and name == tool_name(tool):
            return [name]
        raise ConfigError(
            f"environment.tools.{name} is {tool!r}; it must be a class with tools as methods, or a"
            " function of that name, because the schema shows the function's own name"
        )
    seen = dict.fromkeys(
        n
        for base in reversed(cls.__mro__[:-1])
        for n in vars(base)
        if n[0] != "_" and n not in NOT_TOOLS
    )
    names = [n for n in seen if inspect.isroutine(getattr(cls, n)) and getattr(cls, n).__doc__]
    if names:
        return names
    raise ConfigError(
        f"environment.tools.{name} is the class {cls.__name__}, which has no public method with a"
        " docstring to be a tool"
    )
