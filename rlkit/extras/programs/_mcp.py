"""Let the policy call tools of servers with the Model Context Protocol (MCP)."""

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
    """Make an environment like `tool_use` with the tools of MCP servers. It needs the package
    `mcp`.

    Each server is asked for its tools once. If a server is given as a command, each episode has a
    separate process of it. The episode's first call starts the process. It ends with the episode,
    together with all processes that it started. The process finds the task as JSON (`id`,
    `metadata`) in its variable RLKIT_TASK. With `shared: true`, and over HTTP, all episodes share
    one connection. The server must then keep no state between calls.

    If a tool fails, a call does not fit its schema, or a call takes too long, the policy gets the
    error as the result of the call. If a server dies, or cannot be started for an episode, the
    episode ends as truncated by "error" and is not scored. `rollout.error` has the server's name
    and the last line that it printed. A shared server is started again for the next call.

    Args:
      servers: servers by name. A server is a command as a list, a URL, or a mapping with `command`
        or `url`. The mapping may also have env, cwd, shared, and `tools`, the names of the tools to
        use. A process inherits only HOME, LOGNAME, PATH, SHELL, TERM and USER, beside its `env`.
        With `cwd: episode`, or {folder} in the command or env, each process has its own folder,
        removed when the process ends. {sample} in the command or env is the number of the episode
        among the samples of its task.
      timeout: seconds for one call, > 0; None: no limit. The start of the server is not counted.
      start_timeout: seconds for a new server to answer, > 0.
      max_servers: largest number of server processes alive at the same time, at least one for each
        server that is not shared; None: no limit. If an episode would exceed it, the episode begins
        when another is over. The last bits of its log-probs then depend on this moment.
      The other arguments are those of `tool_use`.
    Raises: ConfigError for an invalid server, or for a limit out of range. The first episode raises
      it if the package is missing, if a server's tools cannot be listed, or if two tools have the
      same name.
    """
    if not servers:
        raise ConfigError(
            "environment.servers is empty; name one:"
            " environment.servers={mine:[python,my_server.py]}"
        )
    check_seconds(timeout=timeout, start_timeout=start_timeout)
    pool = Pool({name: read_server(name, given) for name, given in servers.items()}, start_timeout)
    slots = _limit_episodes(pool, max_servers)
    # filled when the tools have been listed, before any call is parsed
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
        deadline=deadline,  # the pool limits the time of a call, without the start of its server
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
    """Return the slots that limit the number of episodes with server processes; None: no limit.
    Raises: ConfigError if not even one episode fits into the limit."""
    # number of processes of an episode
    needs = sum(not server.shared for server in pool.servers.values())
    if max_servers is not None and max_servers < max(needs, 1):
        raise ConfigError(
            f"environment.max_servers is {max_servers}; an episode needs {max(needs, 1)}, one for"
            " each server that is not shared"
        )
    # A slot is taken before the session begins, never inside it. With admission=rounds, the decoder
    # would otherwise wait for an episode that waits for a slot.
    return AtMost(max_servers // needs) if max_servers and needs else None


async def _play_in_turn(slots: AtMost, at: Playing) -> Rollout:
    async with slots.held(at.give_way):
        return await at.converse()


class ServedSession(FunctionSession):
    """Hold the session of an episode. Its tools are functions that call servers. If a server dies,
    the session ends the episode with an error."""

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
            # after a server has died, the episode is over, and no further call is made
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
        # The schema has the form that tool_schema gives to a function with a text result. So the
        # prompt does not show whether a tool runs here or on a server.
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
        """Return the results of the calls. If a server has failed, end the episode instead."""
        self.sample = rollout.sample
        rollout, messages = await super().answer(rollout)
        if not self.failure:
            return rollout, messages
        return rollout._replace(status="truncated", truncation="error", error=self.failure), None


def simplify_schema(schema: Any) -> Any:
    """Return a JSON schema with `type` as its first key, and without titles and dialect. The
    libraries of servers add titles and dialect, but they carry no information."""
    if isinstance(schema, list):
        return [simplify_schema(entry) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    named = {"properties", "$defs", "definitions"}  # the keys of these mappings are names
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
    """Make the signature of a tool from its schema. So a call with unfit arguments gets the same
    answer as a call of any other tool."""
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
        except ValueError:  # a name that is a keyword of Python
            return anything
    if schema.get("additionalProperties"):
        parameters += anything.parameters.values()
    return inspect.Signature(parameters)
