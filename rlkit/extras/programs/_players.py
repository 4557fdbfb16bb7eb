"""The player of an episode: a user's Python function, or a command."""

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
from rlkit.types import Task


class Launch(NamedTuple):
    """A command that plays an episode."""

    command: Sequence[str]
    awaited: str  # a relative path in it that the files of each task must bring; "" for none
    limits: Limits
    score: bool  # its exit status is the reward
    variables: Mapping[str, str]
    answer: str  # source of the final content
    fields: Sequence[str]  # of the task's metadata, for the program


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
    """Prepare the start of a run's programs. `readable`, `closed`: if they are confined, further
    paths for them to read, and files beside their own code that they do not read. They read the
    folders of PYTHONPATH as well. Raises: ConfigError for a command that cannot be started."""
    words = find_files(command)
    path = variables.get("PATH")
    awaited = check_command("command", words, path)
    if confined:
        folders = [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]
        more = [*folders, *readable]
        limits = confine_limits(limits, words, more, path=path, closed=closed)
    return Launch(words, awaited, limits, score, variables, answer, fields)


class Client(NamedTuple):
    """The means of a Python function to play its episode: an address and a key for any client, and
    one plain request of its own."""

    base_url: str  # ends in /v1
    api_key: str

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        **settings: Any,
    ) -> dict[str, Any]:
        """Return the policy's message to a conversation, in the form of OpenAI's chat completions.
        Raises: OSError if it is refused."""
        body = {"model": "policy", "messages": list(messages), "tools": list(tools), **settings}
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(
            f"{self.base_url}/chat/completions", json.dumps(body).encode(), headers
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked) as reply:
            return json.load(reply)["choices"][0]["message"]


def task_text(task: Task, fields: Sequence[str] = ()) -> str:
    """Write the task for a program: without the answer, and with only these fields of its
    metadata."""
    told = {"id": task.id, "messages": list(task.messages)}
    own = {name: task.metadata[name] for name in fields if name in task.metadata}
    return json.dumps({**told, **({"metadata": own} if fields else {})})


# --------------------------------------------------------------------------------------- a function


async def call_function(function: Callable[..., Any], task: Task, door: Any, address: str) -> Ended:
    """Let a Python function play the episode. A plain one has a thread of its own, because a pool
    could be too small for all to begin."""
    client = Client(f"{address}/v1", door.token)
    loop = asyncio.get_running_loop()
    inner = getattr(function, "func", function)
    done: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def tell(value: Any, error: Exception | None) -> None:
        if not done.done():
            done.set_result((value, error))

    def work() -> None:
        said: tuple[Any, Exception | None] = (None, None)
        try:
            said = function(task, client), None
        except (Exception, SystemExit) as error:
            said = (
                None,
                (
                    error
                    if isinstance(error, Exception)
                    else RuntimeError(f"it asked to exit with {error}")
                ),
            )
        with suppress(RuntimeError):  # the loop is closed: the episode is long over
            loop.call_soon_threadsafe(tell, *said)

    if inspect.iscoroutinefunction(inner):
        try:
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
    """Let a program play the episode in this folder. `left`: see `run_guarded`."""
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
    # 126 and above: it was not started, or a signal ended it
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
