"""Run the player of an episode: a user's Python function, or a command."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rlkit.errors import place
from rlkit.extras.programs._commands import check_command, confine_limits, find_files
from rlkit.extras.programs._processes import (
    Limits,
    explain_confinement,
    make_variables,
    run_guarded,
)
from rlkit.extras.programs.contract import Ended
from rlkit.system.deadline import contain_block, contain_call
from rlkit.types import Task


class Launch(NamedTuple):
    """Describe a command that plays an episode."""

    command: Sequence[str]
    # a relative path in the command that must be among the files of each task; "" if there is none
    awaited: str
    limits: Limits
    score: bool  # whether its exit status is the reward
    variables: Mapping[str, str]
    answer: str  # where the final content is found (`answer` of the environment)
    fields: Sequence[str]  # fields of the task's metadata that the program sees


def make_launch(
    command: Sequence[str],
    limits: Limits,
    *,
    score: bool,
    variables: Mapping[str, str],
    answer: str,
    fields: Sequence[str],
    confined: bool,
    readable: Sequence[str],
    closed: Sequence[str],
) -> Launch:
    """Prepare the command that starts a run's programs. If the programs are confined, they may also
    read the paths in `readable` and the folders of PYTHONPATH. They may not read the files of the
    command `closed`, even beside their own code. Raises: ConfigError if the command cannot be
    started."""
    words = find_files(command)
    path = variables.get("PATH")
    awaited = check_command("command", words, path)
    if confined:
        folders = [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]
        more = [*folders, *readable]
        limits = confine_limits(limits, words, more, path=path, closed=closed)
    return Launch(words, awaited, limits, score, variables, answer, fields)


class Client(NamedTuple):
    """Give a Python function access to the policy of its episode. It has an address and a key for
    any client, and a method for a plain request."""

    base_url: str  # address of the endpoint; ends in /v1
    api_key: str

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        **settings: Any,
    ) -> dict[str, Any]:
        """Return the policy's reply to a conversation, as a message in the form of OpenAI's chat
        completions. Raises: OSError if the request is refused."""
        body = {"model": "policy", "messages": list(messages), "tools": list(tools), **settings}
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(
            f"{self.base_url}/chat/completions", json.dumps(body).encode(), headers
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked) as reply:
            return json.load(reply)["choices"][0]["message"]


def task_text(task: Task, fields: Sequence[str] = ()) -> str:
    """Write the task for a program, without the answer and with only these fields of its
    metadata."""
    told = {"id": task.id, "messages": list(task.messages)}
    own = {name: task.metadata[name] for name in fields if name in task.metadata}
    return json.dumps({**told, **({"metadata": own} if fields else {})})


# --------------------------------------------------------------------------------------- a function


async def call_function(function: Callable[..., Any], task: Task, door: Any, address: str) -> Ended:
    """Let a Python function play the episode. A plain function runs in its own thread, because a
    pool of threads could be too small for all episodes to begin."""
    client = Client(f"{address}/v1", door.token)
    loop = asyncio.get_running_loop()
    inner = getattr(function, "func", function)
    done: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def tell(value: Any, error: Exception | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def work() -> None:
        value: Any = None
        failed: Exception | None = None
        try:
            value = contain_call(lambda: function(task, client))
        except Exception as error:
            failed = error
        with suppress(RuntimeError):  # the loop is closed, because the episode ended long ago
            loop.call_soon_threadsafe(tell, value, failed)

    if inspect.iscoroutinefunction(inner):
        try:
            with contain_block(asyncio.CancelledError, GeneratorExit):
                value = await function(task, client)
            failed = None
        except Exception as error:
            value = None
            failed = error
    else:
        threading.Thread(target=work, daemon=True, name="rlkit-program").start()
        value, failed = await done
    if failed is not None:
        why = f"environment.function raised {type(failed).__name__}: {failed} at {place(failed)}"
        return Ended("error", error=why, crashed=True)
    if value is None:
        return Ended()
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return Ended(reward=float(value))
    return Ended(
        "error",
        error=f"environment.function returned {value!r:.200}; give a number, or nothing",
    )


# ---------------------------------------------------------------------------------------- a process


async def run_program(
    launch: Launch, where: str, left: list[bool], task: Task, door: Any, address: str
) -> Ended:
    """Let a program play the episode in the folder `where`. `left`: see `run_guarded`."""
    from rlkit.extras.programs.server import list_addresses

    text = task_text(task, launch.fields)
    variables = {
        **make_variables(where, text),
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        **list_addresses(door, address),
        **launch.variables,
    }
    limits = launch.limits._replace(port=int(address.rpartition(":")[2]))
    done = await run_guarded(launch.command, where, variables, text, limits, left=left)
    if done.flooded:
        most = limits.output >> 10
        return Ended(
            "error", error=f"the program printed more than environment.output_kb={most} kB"
        )
    said: dict[str, Any] = {"exit": done.status}
    if launch.answer == "stdout":
        said["final_content"] = done.printed
    # a status of 126 or above: it was not started, or a signal ended it
    ended_itself = done.status < 126
    if launch.score and ended_itself:
        return Ended(reward=float(done.status == 0), metadata=said)
    if not done.status:
        return Ended(metadata=said)
    printed = (done.complained or done.printed)[-500:]
    tail = f"; its last output: {printed}" if printed else ""
    hint = explain_confinement(done, limits)
    why = f"the program ended with exit status {done.status}{hint}{tail}"
    return Ended("error", metadata=said, error=why, crashed=ended_itself)
