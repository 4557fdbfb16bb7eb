"""`environment=program`: somebody else's program plays the episode, and speaks to the policy
through an endpoint on loopback."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import math
import os
import shlex
import shutil
import sys
import threading
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlkit.environments import hermes
from rlkit.errors import ConfigError, place
from rlkit.extras.programs._confinement import confinement
from rlkit.extras.programs.contract import Ask, Ended
from rlkit.extras.programs.conversations import asking
from rlkit.extras.programs.slots import AtMost
from rlkit.sandbox.process import folder
from rlkit.system.deadline import Countdown, DeadlinePassed
from rlkit.system.loops import closing
from rlkit.system.plain_files import read_plain_file
from rlkit.system.waiting import Wait, waiting
from rlkit.types import (
    Environment,
    Messages,
    Step,
    Task,
    ToolParser,
    reaches,
    safe,
    writes_reward,
)

GUARD = Path(__file__).with_name("_guard_child.py")
KEPT = 2000  # last bytes of a program's output, for the reason of a failure
GRACE = 10.0  # seconds that the guard has to end a program and all that it started
# variables that every program gets
PASSED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV")
LANDLOCK = 6  # the version that bars TCP, abstract sockets and signals
# What a confined program reads and runs: programs and libraries, and what the C library and TLS
# look at
SYSTEM = (
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc/ld.so.cache",
    "/etc/ssl",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/group",
    "/etc/localtime",
    "/etc/os-release",
    "/etc/mime.types",
)
SCORE = "reward.txt"  # in the program's folder
LONGEST_SCORE = 64  # bytes of it
Score = Literal["file", "exit"]


class Client(NamedTuple):
    """What a Python function plays its episode with: an address and a key for any client, and one
    plain request of its own."""

    base_url: str  # ends in /v1
    api_key: str

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        **settings: Any,
    ) -> dict[str, Any]:
        """The policy's message to a conversation, in the form of OpenAI's chat completions. Raises:
        OSError where it is refused."""
        body = {"model": "policy", "messages": list(messages), "tools": list(tools), **settings}
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(
            f"{self.base_url}/chat/completions", json.dumps(body).encode(), headers
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(asked) as reply:
            return json.load(reply)["choices"][0]["message"]


@reaches(command="program", variables="variable", readable="path")
@safe("function")
@writes_reward(score="file")
def program(
    *,
    command: Sequence[str] = (),
    function: Callable[..., Any] | None = None,
    max_turns: int = 8,
    time_limit: float = 300.0,
    output_kb: int = 1024,
    memory_mb: int | None = None,
    score: Score | None = None,
    dropped_thinking: Literal["new_row", "continue"] = "new_row",
    variables: Mapping[str, str] | None = None,
    confined: bool = False,
    readable: Sequence[str] = (),
    max_programs: int | None = None,
    parse_calls: ToolParser = hermes,
) -> Environment:
    """A program, or a Python function, plays each episode; all that it asks the policy is recorded
    and trained on.

    A program has a process and a working folder of its own, the task as JSON ({"id", "messages"})
    in `RLKIT_TASK` and on standard input, and its endpoint in OPENAI_BASE_URL and OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. It has none of the run's other variables but PATH and
    the language, and ends with its episode, with all that it started. It is not confined otherwise,
    unless `confined`: it has the rights of the run's user.

    Args:
      command: the program and its arguments; those that name a file are found from where the run
        was started.
      function: (task, client) in the place of a command, plain or async; a plain one runs in a
        thread. A number that it returns is added to the reward. An error that it raises ends its
        episode.
      max_turns: replies of an episode, at least 1; further requests are refused, and the episode is
        truncated.
      time_limit: seconds, > 0, of an episode, decoding not counted; then it is truncated by
        "deadline".
      output_kb: that a program may print, at least 1; more ends it.
      memory_mb: address space of each process of the program, at least 1; one that asks for more is
        refused it. None: no limit.
      score: `exit`: an exit status of 0 gives the reward 1, any other 0. `file`: the number in
        reward.txt in the program's folder, a regular file of at most 64 bytes, read when all
        processes of the program are dead; the command line has to say trust=true. Either is added
        to the reward (reward `environment` is 0). None: nothing is added, and a status other than 0
        is a failure.
      dropped_thinking: a conversation that comes back without the thinking of a reply is another
        one, and begins a new row (new_row), or it continues the row, in which the thinking stays
        (continue).
      variables: further variables of the program.
      confined: the program, and what it starts, writes its own folder and nothing else, reads the
        system's programs and libraries, Python, the files of its command, the folders of PYTHONPATH
        in `variables` and `readable`, connects to the port of its endpoint over TCP and has no
        other network, and signals nothing outside. Needs Landlock in version 6 (Linux 6.12) and
        seccomp.
      readable: further files and folders that a confined program reads and runs.
      max_programs: programs alive at the same time, at least 1; None: all episodes of a step begin
        together. An episode that waits for its place spends none of its time. The last bits of its
        log-probs then depend on when another was over.
      parse_calls: reads the calls out of a reply's content.
    Raises: ConfigError for no or two programs, one that is not there, a limit out of range, a
      parser that needs the tools' functions.
    """
    if bool(command) == (function is not None):
        raise ConfigError(
            "environment: set one of environment.command=[PROGRAM, …] and"
            " environment.function._target_=MODULE.NAME"
        )
    require_positive(
        max_turns=max_turns,
        output_kb=output_kb,
        memory_mb=memory_mb,
        max_programs=max_programs,
    )
    if not time_limit > 0:
        raise ConfigError(f"environment.time_limit is {time_limit}; it must be > 0 seconds")
    if score == "file" and sys.platform != "linux":
        raise ConfigError(
            "environment.score=file needs Linux, where all that a program started is ended before"
            " its file is read"
        )
    if confined:
        _check_confinable(function)
    lost = [path for path in readable if not os.path.exists(path)]
    if lost:
        raise ConfigError(f"environment.readable: there is no {lost[0]!r}")
    if "tools" in inspect.signature(parse_calls).parameters:
        raise ConfigError(
            "environment.parse_calls needs the tools' functions, which the program has; choose"
            " hermes"
        )
    if function is not None:
        play: Callable[..., Awaitable[Ended]] = partial(_called, function)
    else:
        words = _found(command)
        own = dict(variables or {})
        paths = _readable(words, own.get("PYTHONPATH", ""), readable) if confined else None
        play = partial(_executed, words, output_kb << 10, memory_mb, paths, score, own)
    return Environment(
        parse_calls=parse_calls,
        max_steps=max_turns,
        play=asking(
            partial(_played, play, time_limit, function or shlex.join(words)),
            strict_thinking=dropped_thinking == "new_row",
            slots=AtMost(max_programs) if max_programs else None,
        ),
    )


def require_positive(**limits: int | None) -> None:
    """Raise ConfigError naming the first limit that is below 1; None is no limit."""
    for key, limit in limits.items():
        if limit is not None and limit < 1:
            raise ConfigError(f"environment.{key} is {limit}; it must be at least 1")


def _found(command: Sequence[str]) -> list[str]:
    """The command with the paths of its files made absolute; `python` is the one of this
    process."""
    out = [str(Path(word).absolute()) if os.path.isfile(word) else str(word) for word in command]
    return [sys.executable if out[0] == "python" else out[0], *out[1:]]


def landlock_version() -> int:
    """Of Landlock on this machine; 0 where there is none, or no filter of system calls for it."""
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))


def _readable(command: Sequence[str], python_path: str, more: Sequence[str]) -> list[str]:
    """What a confined program reads and runs, beside its own folder."""
    started = [shutil.which(command[0]) or command[0], *command[1:]]
    files = [os.path.realpath(word) for word in started if os.path.isfile(word)]
    folders = [path for path in python_path.split(os.pathsep) if path]
    return [
        *SYSTEM,
        sys.prefix,
        sys.base_prefix,
        *files,
        *(os.path.abspath(path) for path in (*folders, *more)),
    ]


async def _played(
    play: Callable[..., Awaitable[Ended]], time_limit: float, named: Any, task: Task, ask: Ask
) -> Ended:
    """An episode with an endpoint of its own, within its time. `named`: the program, for
    messages."""
    from rlkit.extras.programs.server import opened_door

    wait = Wait("the program", named)

    async def answer(
        messages: Messages, tools: Sequence[Mapping[str, Any]] = (), limit: int | None = None
    ) -> Step:
        with wait.paused():  # meanwhile the program waits for the policy
            return await ask(messages, tools, limit)

    try:
        async with Countdown(time_limit).running(), opened_door(answer) as (door, address):
            with waiting(wait):
                ended = await play(task, door, address)
            counts = {"retries": door.retries, "refused": door.refused}
            return ended._replace(
                metadata={**ended.metadata, **{k: n for k, n in counts.items() if n}}
            )
    except DeadlinePassed:
        return Ended(
            "deadline",
            error=f"the program ran for more than environment.time_limit={time_limit} s",
        )


def task_text(task: Task) -> str:
    """What a program is told of its task. The answer is not."""
    return json.dumps({"id": task.id, "messages": list(task.messages)})


# --------------------------------------------------------------------------------------- a function


async def _called(function: Callable[..., Any], task: Task, door: Any, address: str) -> Ended:
    """A Python function plays the episode. A plain one has a thread of its own: a pool could be too
    small for all to begin."""
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
        return Ended(
            "error",
            error=(
                f"environment.function raised {type(failed).__name__}: {failed} at {place(failed)}"
            ),
        )
    if value is None:
        return Ended()
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return Ended(reward=float(value))
    return Ended(
        "error",
        error=f"environment.function returned {value!r:.200}; give a number, or nothing",
    )


# ---------------------------------------------------------------------------------------- a process


def _check_confinable(function: Callable[..., Any] | None) -> None:
    """Raises: ConfigError where a function is given, and where this machine cannot confine."""
    if function is not None:
        raise ConfigError(
            "environment.confined: a function runs in this process and cannot be confined; give"
            " environment.command"
        )
    version = landlock_version()
    if version < LANDLOCK:
        raise ConfigError(
            f"environment.confined needs Landlock in version {LANDLOCK} (Linux 6.12) on x86-64 or"
            f" aarch64, and this machine has {version or 'none'}; set it to false for programs that"
            " you trust"
        )


async def _start_guard(
    where: str, variables: Mapping[str, str], endpoint: Mapping[str, str], text: str
) -> asyncio.subprocess.Process:
    """The process that starts a program in its folder and ends all that it leaves."""
    own = {name: os.environ[name] for name in PASSED if name in os.environ}
    own |= {
        "HOME": where,
        "TMPDIR": where,
        "PYTHONUNBUFFERED": "1",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        **endpoint,
    }
    own |= {"RLKIT_TASK": text} if len(text) < 1 << 16 else {}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-B",
        str(GUARD),
        cwd=where,
        env={**own, **variables},
        start_new_session=True,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def _executed(
    command: list[str],
    output: int,
    memory_mb: int | None,
    readable: Sequence[str] | None,
    score: Score | None,
    variables: Mapping[str, str],
    task: Task,
    door: Any,
    address: str,
) -> Ended:
    """A program plays the episode, in a folder that is removed afterwards."""
    from rlkit.extras.programs.server import addresses

    with folder() as where, opened_folder(where) as place:
        text = task_text(task)
        guard = await _start_guard(where, variables, addresses(door, address), text)
        try:
            assert guard.stdin is not None
            job: dict[str, Any] = {"command": command, "task": text, "memory_mb": memory_mb}
            if readable is not None:
                job["confine"] = confinement(readable, int(address.rpartition(":")[2]))
            guard.stdin.write(json.dumps(job).encode() + b"\n")
            with suppress(ConnectionError):
                await guard.stdin.drain()
            printed, flooded = await _printed(guard, output)
            if flooded:
                return Ended(
                    "error",
                    error=f"the program printed more than environment.output_kb={output >> 10} kB",
                )
            return _result(await _status(guard), printed, score, place)
        finally:
            with closing():
                await _ended(guard)


async def _printed(guard: asyncio.subprocess.Process, limit: int) -> tuple[str, bool]:
    """The end of what the program prints until it has ended; and whether it was more than
    allowed."""
    assert guard.stdout is not None
    last = b""
    count = 0
    while chunk := await guard.stdout.read(1 << 16):
        last = (last + chunk)[-KEPT:]
        count += len(chunk)
        if count > limit:
            return "", True
    return last.decode(errors="replace").strip(), False


async def _status(guard: asyncio.subprocess.Process) -> int:
    """The exit status as the guard tells it, which has ended all processes of the program before;
    137 where something killed the guard."""
    assert guard.stderr is not None
    said = (await guard.stderr.read(KEPT)).decode(errors="replace").split()
    if await guard.wait():  # a program that ended it may have spoken for it
        return 137
    return int(said[1]) if len(said) == 2 and said[0] == "exit" and said[1].isdigit() else 137


def _result(status: int, printed: str, score: Score | None, place: int) -> Ended:
    """How the program left its episode; `place` is its folder, held open."""
    said = {"exit": status}
    if score == "exit" and status < 126:
        return Ended(reward=float(status == 0), metadata=said)
    if status:
        tail = f"; its last output: {printed[-500:]}" if printed else ""
        return Ended(
            "error", metadata=said, error=f"the program ended with exit status {status}{tail}"
        )
    if score == "file":
        reward = read_score(place)
        if isinstance(reward, str):
            return Ended("error", metadata=said, error=reward)
        return Ended(reward=reward, metadata=said)
    return Ended(metadata=said)


@contextmanager
def opened_folder(path: str) -> Iterator[int]:
    """A descriptor of a folder: the same one, whatever a program puts in its place."""
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield place
    finally:
        os.close(place)


def read_score(place: int) -> float | str:
    """The number that a program left in its folder; else why there is none, without a word of what
    the file holds."""
    where = f"{SCORE} in the program's folder"
    try:
        reward = float(read_plain_file(SCORE, most=LONGEST_SCORE, folder=place).decode("ascii"))
    except OSError as error:
        return f"{where} cannot be read: {error.strerror}"
    except ValueError:
        return f"{where} holds no number"
    return reward if math.isfinite(reward) else f"{where} holds {reward}, which is no finite number"


async def _ended(guard: asyncio.subprocess.Process) -> None:
    """The guard ends the program where it still runs, and then itself."""
    assert guard.stdin is not None and guard.stdout is not None
    guard.stdin.close()
    try:
        async with asyncio.timeout(GRACE):
            while await guard.stdout.read(1 << 16):
                pass
            await guard.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            guard.kill()
        await guard.wait()
    # its pipes; else they are closed by the garbage collector, with a warning
    transport = getattr(guard, "_transport", None)
    if transport is not None:
        transport.close()
