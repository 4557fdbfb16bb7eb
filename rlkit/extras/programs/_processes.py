"""Run a command in its own working folder. A guard process starts the command, and ends it with all
its processes. Its output is read."""

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
GRACE = 10.0  # seconds in which the guard must end a program and all its processes
LOST = 137  # status reported for a program if its guard was killed
# variables passed to every program
PASSED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "VIRTUAL_ENV")
LONGEST_VARIABLE = 1 << 16  # characters of RLKIT_TASK; a longer task is only on standard input
LANDLOCK = 6  # the version of Landlock that can bar TCP, abstract sockets and signals
# what a program may print after its confinement has stopped it
STOPPED = re.compile(
    "Permission denied|Operation not permitted|EACCES|EPERM|No module named|Cannot find module"
    "|name resolution|EAI_AGAIN"
)


class Limits(NamedTuple):
    """Hold the limits of a command."""

    output: int  # largest output in bytes
    memory_mb: int | None = None  # address space of each process, in MB
    # paths that a confined command may read; None: it is not confined and has the user's rights
    readable: Sequence[str] | None = None
    port: int | None = None  # TCP port that a confined command may connect to
    listed: Sequence[str] = ()  # folders with names that a confined command may list
    root: Root | None = None  # file tree of a confined command; None: this machine's


class Finished(NamedTuple):
    """Hold the result of a command."""

    status: int  # exit status; 128 + the number of a signal
    printed: str  # its standard output
    complained: str  # its standard error
    flooded: bool = False  # whether it printed too much


def find_landlock_version() -> int:
    """Return the version of Landlock on this machine. Return 0 if Landlock is missing, or if rlkit
    has no filter of system calls for this kind of machine."""
    if sys.platform != "linux" or os.uname().machine not in ("x86_64", "aarch64"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))


def settle_confinement(wanted: bool | Literal["auto"]) -> bool:
    """Decide whether commands are confined. With "auto", they are confined if this machine can do
    it; otherwise a printed line says that they are not. Raises: ConfigError if confinement is
    wanted, but this machine cannot do it."""
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
    """Print once that programs are not confined."""
    has = f"Landlock {version}" if version else "no Landlock"
    print(
        "rlkit: environment.confined=auto: programs are not confined and can read one another's"
        f" keys; confinement needs Landlock {LANDLOCK} (Linux 6.12), and this machine has {has}",
        file=sys.stderr,
        flush=True,
    )


def make_variables(where: str, task: str) -> dict[str, str]:
    """Make new environment variables for a command in the folder `where`. They hold the run's PATH
    and language, and the task, if there is one."""
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
    """Run a command until it ends, and then end all its processes, even if this call is cancelled.

    Args:
      where: working folder of the command.
      task: text for its standard input.
      left: list that gets one entry at the end. It is True if processes of the command may still be
        alive, because the guard was killed.
      reward_fd: a descriptor of this process, passed to the command as descriptor 3.
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
    """Write the job that the guard reads: the arguments of its function `begin`."""
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
    """Read a command's output until it ends, and its exit status as reported by the guard."""
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
                stdin.close()  # then the guard ends the program
        return bytes(kept)

    printed, complained = await asyncio.gather(read(guard.stdout), read(guard.stderr))
    # a program that killed its guard may have written the line with the status itself
    killed = await guard.wait() != 0
    before, _, told = complained.rstrip().rpartition(b"\nexit ")
    status = int(told) if told.isdigit() and not killed else LOST
    return Finished(status, _text(printed), _text(before), room < 0)


def explain_confinement(done: Finished, limits: Limits) -> str:
    """Return a hint on the settings of confinement, if it may have stopped the command; else ""."""
    if limits.readable is None or not STOPPED.search(f"{done.complained}{done.printed}"):
        return ""
    return (
        " (it is confined: environment.readable=[PATH] opens files to it,"
        " environment.confined=false everything)"
    )


def _text(printed: bytes) -> str:
    return printed.decode(errors="replace").strip()


async def _end(guard: asyncio.subprocess.Process) -> None:
    """Let the guard end the command, if it still runs, and then end itself."""
    assert guard.stdin is not None and guard.stdout is not None and guard.stderr is not None
    guard.stdin.close()
    try:
        async with asyncio.timeout(GRACE):
            # the guard would block on a full pipe
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
