"""Tools of servers with the Model Context Protocol."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, Literal

from rlkit.environments import hermes
from rlkit.environments.calling import check_seconds, make_calling
from rlkit.environments.session import FunctionSession
from rlkit.environments.tools import MAX_CHARS, TIMEOUT
from rlkit.errors import ConfigError
from rlkit.extras.programs.slots import AtMost
from rlkit.extras.programs.tool_servers import (
    ListedTool,
    Pool,
    ServerFailed,
    await_in_background,
    read_server,
    require_package,
)
from rlkit.system.waiting import waiting
from rlkit.types import (
    Environment,
    Messages,
    Playing,
    Rollout,
    Task,
    Tool,
    ToolParser,
    reaches,
    safe,
)

EPISODES = count()
TYPES = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


@reaches(servers="program")
@safe("system_prompt")
def mcp(
    *,
    servers: Mapping[str, Any],
    max_turns: int = 4,
    max_calls: int = 8,
    system_prompt: str | None = None,
    parse_calls: ToolParser = hermes,
    overflow: Literal["truncate", "drop_oldest"] = "truncate",
    max_chars: int = MAX_CHARS,
    timeout: float | None = TIMEOUT,
    start_timeout: float = 60.0,
    deadline: float | None = None,
    max_servers: int | None = None,
) -> Environment:
    """`tool_use` with the tools of MCP servers. Needs the package `mcp`.

    The servers are asked for their tools once. If a server is given as a command, each episode that
    calls it has a process of its own. The first call starts the process, and it ends with the
    episode, together with all that it started. It finds the task as JSON (`id`, `metadata`) in its
    environment, under RLKIT_TASK. With `shared: true`, and over HTTP, all episodes share one
    connection, so the server must then keep nothing between calls.

    The policy reads a tool's own failure, a call that does not fit its schema, and a call that
    takes too long, as results. If a server dies, or cannot be started for an episode, the episode
    ends as truncated by "error", with the server's name and its last words in `rollout.error`; it
    is not scored. A shared server is started again for the next call.

    Args:
      servers: name → a command as a list, a URL, or a mapping with `command` or `url` and perhaps
        env, cwd, shared, and `tools`, the names of the tools to use. A process inherits only HOME,
        LOGNAME, PATH, SHELL, TERM and USER, beside its `env`. With `cwd: episode`, or {folder} in
        its command or env, each process has a folder of its own, which is removed after it.
        {sample} is the number of the episode among those of its task.
      timeout: seconds of a call, > 0, its server's start not counted; None: no limit.
      start_timeout: seconds, > 0, for a new server to answer.
      max_servers: processes of servers alive at the same time, at least one for each server that is
        not shared; None: no limit. An episode that would need more begins when another is over. The
        last bits of its log-probs then depend on this time.
      The rest is as for `tool_use`.
    Raises: ConfigError for an invalid server, or a limit out of range. The first episode raises it
      if the package is missing, a server's tools cannot be listed, or two tools have one name.
    """
    if not servers:
        raise ConfigError(
            "environment.servers is empty; name one:"
            " environment.servers={mine:[python,my_server.py]}"
        )
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    pool = Pool({name: read_server(name, given) for name, given in servers.items()}, start_timeout)
    slots = _limit_episodes(pool, max_servers)
    # filled when the tools are listed, before any call is parsed
    known: dict[str, Tool] = {}
    base = make_calling(
        lambda task: known,
        known,
        parse_calls,
        overflow=overflow,
        system_prompt=system_prompt,
        max_turns=max_turns,
        max_calls=max_calls,
        max_chars=max_chars,
        timeout=None,
        deadline=deadline,  # the pool limits a call, without the start of its server
    )

    named = ", ".join(pool.servers)

    @asynccontextmanager
    async def session(task: Task) -> AsyncIterator[ServedSession]:
        require_package()
        with waiting("the tool servers", named):
            listed = await await_in_background(pool.tools())
        opened = ServedSession(base, task, pool, listed, timeout)
        known.update(opened.tools)
        try:
            yield opened
        finally:
            with waiting("the end of the tool servers", named):
                await await_in_background(pool.leave(opened.episode))

    return base._replace(
        first_prompt=None,
        tools=None,
        session=session,
        play=None if slots is None else partial(_play_in_turn, slots),
    )


def _limit_episodes(pool: Pool, max_servers: int | None) -> AtMost | None:
    """Most episodes with processes of servers at the same time; None: no limit. Raises: ConfigError
    if not even one fits."""
    needs = sum(not server.shared for server in pool.servers.values())  # processes of an episode
    if max_servers is not None and max_servers < max(needs, 1):
        raise ConfigError(
            f"environment.max_servers is {max_servers}; an episode needs {max(needs, 1)}, one for"
            " each server that is not shared"
        )
    # Taken before the session, never inside it: with counted rounds the decoder waits for an
    # episode in the middle of an answer.
    return AtMost(max_servers // needs) if max_servers and needs else None


async def _play_in_turn(slots: AtMost, at: Playing) -> Rollout:
    async with slots.held(at.give_way):
        return await at.converse()


class ServedSession(FunctionSession):
    """The session of an episode: functions that call servers, and the error of a dead one."""

    def __init__(
        self,
        base: Environment,
        task: Task,
        pool: Pool,
        listed: Mapping[str, list[ListedTool]],
        timeout: float | None,
    ):
        self.pool = pool
        self.timeout = timeout
        self.episode = next(EPISODES)
        self.failure = ""
        self.sample = 0
        self.env = {
            "RLKIT_TASK": json.dumps({"id": task.id, "metadata": task.metadata}, default=str)
        }
        tools: dict[str, Tool] = {}
        owners: dict[str, str] = {}
        for server, found in listed.items():
            for tool in found:
                if tool.name in tools:
                    raise ConfigError(
                        f"environment.servers.{server} and environment.servers.{owners[tool.name]}"
                        f" both have a tool {tool.name!r}; name those that are used of one of them:"
                        f" environment.servers.{server}.tools=[…]"
                    )
                tools[tool.name] = self._function(server, tool)
                owners[tool.name] = server
        super().__init__(base, task, tools)

    def _function(self, server: str, tool: ListedTool) -> Tool:
        async def call(**arguments: Any) -> str:
            # after a server's death the episode is over, and its other calls are not made
            if self.failure:
                raise ValueError(self.failure)
            try:
                return await await_in_background(
                    self.pool.call(
                        server,
                        self.episode,
                        self.sample,
                        self.env,
                        tool.name,
                        arguments,
                        self.timeout,
                    )
                )
            except ServerFailed as error:
                self.failure = str(error)
                raise
            except TimeoutError:
                raise ValueError(
                    f"{tool.name} took longer than {self.timeout or 0:g} s and was given up"
                ) from None

        call.__name__ = tool.name
        # In the form of tool_schema for a function with a text result. So a tool's prompt does not
        # tell where the tool runs.
        described = {
            "name": tool.name,
            "description": tool.description,
            "parameters": simplify_schema(tool.parameters),
        }
        schema = {"type": "function", "function": {**described, "return": {"type": "string"}}}
        vars(call).update(
            shown=f"{tool.name} of the server {server!r}",
            schema=schema,
            __signature__=make_signature(tool.parameters),
        )
        return call

    async def answer(self, rollout: Rollout) -> tuple[Rollout, Messages | None]:
        """Return the results of the calls; or the end of the episode, if a server failed."""
        self.sample = rollout.sample
        rollout, messages = await super().answer(rollout)
        if not self.failure:
            return rollout, messages
        return rollout._replace(status="truncated", truncation="error", error=self.failure), None


def simplify_schema(schema: Any) -> Any:
    """A JSON schema with its type first, without titles and dialect. Servers' libraries add them,
    and they say nothing."""
    if isinstance(schema, list):
        return [simplify_schema(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    named = {"properties", "$defs", "definitions"}  # their keys are names
    return {
        key: (
            {name: simplify_schema(entry) for name, entry in value.items()}
            if key in named
            else simplify_schema(value)
        )
        for key, value in sorted(schema.items(), key=lambda entry: entry[0] != "type")
        if not (key == "$schema" or (key == "title" and isinstance(value, str)))
    }


def make_signature(schema: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a tool by its schema. So a call that does not fit gets the same answer as
    for any other tool."""
    properties = schema.get("properties") or {}
    required = schema.get("required") or ()
    anything = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])
    if not all(name.isidentifier() for name in properties):
        return anything
    parameters = []
    for name, entry in properties.items():
        kind = entry.get("type") if isinstance(entry, Mapping) else None
        annotation = TYPES.get(kind, Any) if isinstance(kind, str) else Any
        default = entry.get("default") if isinstance(entry, Mapping) else None
        if name in required:
            default = inspect.Parameter.empty
        try:
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
            )
        except ValueError:  # a keyword of Python
            return anything
    if schema.get("additionalProperties"):
        parameters += anything.parameters.values()
    return inspect.Signature(parameters)
