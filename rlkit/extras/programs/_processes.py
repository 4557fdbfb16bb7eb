"""A command in a folder of its own. A guard starts it, its output is read, and it is ended with all
its processes."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlkit.errors import ConfigError
from rlkit.extras.programs._confinement import Root, confinement
from rlkit.system.loops import closing

GUARD = Path(__file__).with_name("_guard_child.py")
GRACE = 10.0  # seconds for the guard to end a program and all its processes
LOST = 137  # status of a program after its guard was killed
# variables passed to every program
PASSED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV")
LONGEST_VARIABLE = 1 << 16  # characters of RLKIT_TASK; a longer task is on standard input alone
LANDLOCK = 6  # the version that bars TCP, abstract sockets and signals
# what a program that confinement stopped may print
STOPPED = re.compile(
    "Permission denied|Operation not permitted|EACCES|EPERM|No module named|Cannot find module"
    "|name resolution|EAI_AGAIN"
)


class Limits(NamedTuple):
    """Limits of a command."""

    output: int  # bytes of its output
    memory_mb: int | None = None  # address space of each process
    readable: Sequence[str] | None = None  # if it is confined; None: it has the user's rights
    port: int | None = None  # a confined one may connect to it
    listed: Sequence[str] = ()  # a confined one may list their names
    root: Root | None = None  # file tree of a confined one; None: this machine's


class Finished(NamedTuple):
    """Result of a command."""

    status: int  # a signal is 128 + its number
    printed: str  # on standard output
    complained: str  # on standard error
    flooded: bool = False  # it printed too much


def find_landlock_version() -> int:
    """Version of Landlock on this machine; 0 if there is none, or no filter of system calls for
    it."""
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))


def settle_confinement(wanted: bool | Literal["auto"]) -> bool:
    """Decide whether commands are confined. auto: where this machine can do it; elsewhere a line
    says that they are not. Raises: ConfigError if confinement is wanted and there is none."""
    if wanted is False:
        return False
    version = find_landlock_version()
    if version >= LANDLOCK:
        return True
    if wanted == "auto":
        say_unconfined(version)
        return False
    raise ConfigError(
        f"environment.confined needs Landlock in version {LANDLOCK} (Linux 6.12) on x86-64 or"
        f" aarch64, and this machine has {version or 'none'}; set it to false for programs that"
        " you trust"
    )


@functools.cache
def say_unconfined(version: int) -> None:
    """Say once that programs have the rights of the user."""
    has = f"Landlock {version}" if version else "no Landlock"
    print(
        "rlkit: environment.confined=auto: programs are not confined and can read one another's"
        f" keys; confinement needs Landlock {LANDLOCK} (Linux 6.12), and this machine has {has}",
        file=sys.stderr,
        flush=True,
    )


def make_variables(where: str, task: str) -> dict[str, str]:
    """Make an environment from scratch for a command in this folder: the run's path and language,
    and the task, if there is one."""
    own = {name: os.environ[name] for name in PASSED if name in os.environ}
    own |= {"HOME": where, "TMPDIR": where, "PYTHONUNBUFFERED": "1"}
    return own | ({"RLKIT_TASK": task} if 0 < len(task) < LONGEST_VARIABLE else {})


async def run_guarded(
    command: Sequence[str],
    where: str,
    variables: Mapping[str, str],
    task: str,
    limits: Limits,
    *,
    left: list[bool],
    reward_fd: int | None = None,
) -> Finished:
    """Run a command until it ends, and end all its processes, even if this call is cancelled.

    Args:
      where: its working folder.
      task: text on its standard input.
      left: gets one entry at the end: whether processes of the command may be left, because its
        guard was killed.
      reward_fd: a descriptor of this process, passed to the command as 3.
    """
    guard = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        "-B",
        str(GUARD),
        cwd=where,
        env=dict(variables),
        start_new_session=True,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=() if reward_fd is None else (reward_fd,),
    )
    try:
        assert guard.stdin is not None
        guard.stdin.write(make_job(command, task, limits, reward_fd))
        with suppress(ConnectionError):
            await guard.stdin.drain()
        return await _read(guard, limits.output)
    finally:
        with closing():
            await _end(guard)
        left.append(guard.returncode != 0)


def make_job(
    command: Sequence[str], task: str, limits: Limits, reward_fd: int | None = None
) -> bytes:
    """Write what the guard reads: the arguments of its `begin`."""
    job: dict[str, Any] = {
        "command": list(command),
        "task": task,
        "memory_mb": limits.memory_mb,
        "reward_fd": reward_fd,
    }
    if limits.readable is not None:
        job["confine"] = confinement(limits.readable, limits.port, limits.listed, limits.root)
    return json.dumps(job).encode() + b"\n"


async def _read(guard: asyncio.subprocess.Process, most: int) -> Finished:
    """Read a command's output until it ends, and its status as last reported by the guard."""
    assert guard.stdin is not None and guard.stdout is not None and guard.stderr is not None
    stdin = guard.stdin
    room = most

    async def read(stream: asyncio.StreamReader) -> bytes:
        nonlocal room
        kept = bytearray()
        while chunk := await stream.read(1 << 16):
            room -= len(chunk)
            if room >= 0:
                kept += chunk
            else:
                stdin.close()  # the guard ends the program
        return bytes(kept)

    printed, complained = await asyncio.gather(read(guard.stdout), read(guard.stderr))
    # a program that killed its guard may have spoken for it
    killed = await guard.wait() != 0
    before, _, told = complained.rstrip().rpartition(b"\nexit ")
    status = int(told) if told.isdigit() and not killed else LOST
    return Finished(status, _text(printed), _text(before), room < 0)


def explain_confinement(done: Finished, limits: Limits) -> str:
    """The keys that would open more to a confined command, if it may have been stopped; else ""."""
    if limits.readable is None or not STOPPED.search(f"{done.complained}{done.printed}"):
        return ""
    return (
        " (it is confined: environment.readable=[PATH] opens files to it,"
        " environment.confined=false everything)"
    )


def _text(printed: bytes) -> str:
    return printed.decode(errors="replace").strip()


async def _end(guard: asyncio.subprocess.Process) -> None:
    """Let the guard end the command if it still runs, and then itself."""
    assert guard.stdin is not None and guard.stdout is not None and guard.stderr is not None
    guard.stdin.close()
    try:
        async with asyncio.timeout(GRACE):
            # a full pipe would hold the guard up
            await asyncio.gather(_drain(guard.stdout), _drain(guard.stderr))
            await guard.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            guard.kill()
        await guard.wait()
    # close its pipes here; otherwise the garbage collector closes them, with a warning
    transport = getattr(guard, "_transport", None)
    if transport is not None:
        transport.close()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
