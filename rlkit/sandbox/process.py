"""Run each program in one child process. The parent starts, reads, times and kills the child, and
never runs a line of the program. The parent also chooses the program's readable files and its
working folder."""

from __future__ import annotations

import contextlib
import functools
import marshal
import os
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from rlkit.errors import ConfigError, RLKitError
from rlkit.sandbox.values import Malformed, decode_value, split_records
from rlkit.system.deadline import end_when_left
from rlkit.system.processors import count_cores
from rlkit.types import ranges, reaches

CHILD = Path(__file__).with_name("_child.py")
# seconds for the interpreter to start, not counted as the program's time
START_LIMIT = 30.0
DISK_MB = 16  # size of the program's folder in memory, used with namespaces only
# folders of installed packages; they are for the trainer and not readable for programs
PACKAGES = ("site-packages", "dist-packages")

# Run once, in an interpreter of its own: find the shared libraries loaded by the standard library's
# extension modules. The C library loads libgcc_s when a thread ends.
LIBRARIES = """
import ctypes, importlib, os, sys
for folder in [path for path in sys.path if path.endswith("lib-dynload") and os.path.isdir(path)]:
    for name in {entry.partition(".")[0] for entry in os.listdir(folder)}:
        if not name.startswith(("_test", "_xx", "xx", "_tkinter", "readline")):
            try:
                importlib.import_module(name)
            except Exception:
                pass
try:
    ctypes.CDLL("libgcc_s.so.1")
except OSError:
    pass
with open("/proc/self/maps") as maps:
    names = {line.split(None, 5)[5].rstrip("\\n") for line in maps if ".so" in line}
sys.stdout.buffer.write(b"\\0".join(os.fsencode(name) for name in names))
"""

Status = Literal["ok", "error", "timeout", "flood", "died"]
Ending = Literal["end", "timeout", "flood"]


class SandboxError(RLKitError, RuntimeError):
    """Raised if a child could not be started under its limits. The program did not run."""


@reaches(min_level="outside", allow_weak="outside")
@ranges(time_limit=(0.01, None), memory_mb=(64, None), output_kb=(1, None), workers=(1, None))
class Sandbox(NamedTuple):
    """Settings for running untrusted programs."""

    time_limit: float = 5.0  # seconds for one program, without the start of its interpreter
    memory_mb: int = 512  # most address space of one program
    output_kb: int = 64  # most output of one program
    # a machine with a weaker level is refused
    min_level: Literal["basic", "kernel", "kernel+ns"] = "kernel"
    allow_weak: bool = False  # run even if min_level cannot be reached
    workers: int | None = None  # programs at the same time; None: one for each core, at most 8


@runtime_checkable
class Sandboxed(Protocol):
    """A tool that runs programs, or an object with a method that does. The isolation on this
    machine is checked before a run begins."""

    sandbox: Sandbox


class Job(NamedTuple):
    """A program, and expressions to evaluate after it has run. A job never contains expected
    values."""

    code: str
    calls: tuple[str, ...] = ()
    interactive: bool = False  # capture the prints and the last expression's repr


class Result(NamedTuple):
    """The result of one call: a value, or the reason for its absence."""

    value: Any = None
    error: str = ""


class Outcome(NamedTuple):
    """How a program ended, judged by the parent's clock and the child's output.

    `status` is

        ok        the program ran to its end, and every call returned a value or raised
        error     the program raised an exception, see `error`
        timeout   its time was up
        flood     it wrote more output than allowed
        died      it exited, was killed by a signal, or ran out of memory
    """

    status: Status
    results: tuple[Result, ...] = ()
    printed: str = ""
    error: str = ""
    seconds: float = 0.0


def check_settings(sandbox: Sandbox) -> None:
    """Raise ConfigError if a number of the settings is out of range."""
    for name, (least, _) in Sandbox.__ranges__.items():  # type: ignore[attr-defined]
        value = getattr(sandbox, name)
        if value is not None and not least <= value:
            raise ConfigError(f"sandbox.{name} is {value}; it must be at least {least}")


def count_workers(sandbox: Sandbox) -> int:
    """Return the number of programs to run at the same time: the setting, or one for each core up
    to 8. It is never more than fit into half of the memory."""
    asked = sandbox.workers or min(count_cores(), 8)
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return asked
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(1, min(asked, memory // (sandbox.memory_mb << 20)))


def run_with(
    job: Job, sandbox: Sandbox, features: Sequence[str], landlock_abi: int | None = None
) -> Outcome:
    """Run one program under given features of the kernel, without checking the level. Call `run`
    instead unless you test features.

    Args:
      landlock_abi: the highest version of Landlock to use. A low version imitates an older kernel.
        None uses the kernel's own version.
    Raises: SandboxError if the limits cannot be set or this machine cannot start the child.
    """
    check_settings(sandbox)
    try:
        data, how, seconds = _run_child(
            marshal.dumps(_job(job, sandbox, features, landlock_abi)), sandbox
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"no child could be started or read, and the program did not run: {error}"
        ) from error
    return _outcome(split_records(data), job, how, seconds)


def _run_child(job: bytes, sandbox: Sandbox) -> tuple[bytes, Ending, float]:
    """Start a child in a folder of its own, and read its output until it ends (`_read`)."""
    with make_folder() as path, tempfile.TemporaryFile() as given:
        given.write(job)
        given.seek(0)
        with start_child(path, given) as (child, kill), end_when_left(kill):
            assert child.stdout is not None
            return _read(child.stdout.fileno(), sandbox)


@contextlib.contextmanager
def start_child(
    path: str, stdin: Any, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """Start a child in a folder. Yield the child, and a function to kill it with all of its own
    children. The child is killed at the end of the block."""
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(CHILD), *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=path,
        env={},
        start_new_session=True,
    )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()

    try:
        yield child, kill
    finally:
        kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        child.wait()


def _job(
    job: Job, sandbox: Sandbox, features: Sequence[str], landlock_abi: int | None = None
) -> dict[str, Any]:
    return {
        "code": job.code,
        "calls": list(job.calls),
        "interactive": job.interactive,
        "name": "__main__" if job.interactive else "solution",
        "features": list(features),
        "cpu_s": sandbox.time_limit,
        "memory_mb": sandbox.memory_mb,
        "output_kb": sandbox.output_kb,
        "disk_mb": DISK_MB,
        "readable": list(list_readable()) if "landlock" in features else [],
        "landlock_abi": landlock_abi,
    }


def _read(fd: int, sandbox: Sandbox) -> tuple[bytes, Ending, float]:
    """Read the child's output until the child ends, its time is up, or its output is too long. Also
    return the seconds since the program started."""
    data = bytearray()
    start = monotonic()
    how = read_output(fd, data, START_LIMIT, sandbox, "RX")
    if how == "said":  # the child sent its first record; the program runs now
        start = monotonic()
        how = read_output(fd, data, sandbox.time_limit, sandbox)
    return (
        bytes(data[: sandbox.output_kb << 10]),
        "end" if how == "said" else how,
        monotonic() - start,
    )


def read_output(
    fd: int, data: bytearray, seconds: float, sandbox: Sandbox, last: str = ""
) -> Ending | Literal["said"]:
    """Append a child's output to `data`. Stop at a record with one of the tags in `last` ("said"),
    at the end of the output, or at the limit of time or size."""
    end = monotonic() + seconds
    poller = select.poll()
    poller.register(fd, select.POLLIN | select.POLLHUP)
    while True:
        # check all records, because several may have arrived together
        if last and any(tag in last for tag, _ in split_records(bytes(data))):
            return "said"
        if len(data) > sandbox.output_kb << 10:
            return "flood"
        left = end - monotonic()
        if left <= 0:
            return "timeout"
        if poller.poll(left * 1000):
            chunk = os.read(fd, 65536)
            if not chunk:
                return "end"
            data += chunk


def require_start(said: list[tuple[str, bytes]], how: str = "no answer") -> None:
    """Raise a SandboxError unless the child has reported that its limits are set."""
    if not said or said[0][0] != "R":
        why = said[0][1].decode("utf-8", "replace") if said else f"the child said nothing ({how})"
        raise SandboxError(
            f"the sandbox could not be set up, and the program did not run: {why}; see"
            " `rlkit.sandbox.find_level()`"
        )


def _outcome(said: list[tuple[str, bytes]], job: Job, how: str, seconds: float) -> Outcome:
    require_start(said, how)
    first = {
        tag: payload.decode("utf-8", "replace")
        for tag, payload in reversed(said[1:])
        if tag in ("P", "E", "D")
    }
    results = tuple(_result(tag, payload) for tag, payload in said[1:] if tag in ("V", "F"))[
        : len(job.calls)
    ]
    if how != "end":
        status: Status = "flood" if how == "flood" else "timeout"
    elif "E" in first:
        status = "error"
    else:
        status = "ok" if "D" in first and len(results) == len(job.calls) else "died"
    return Outcome(status, results, first.get("P", ""), first.get("E", ""), seconds)


def _result(tag: str, payload: bytes) -> Result:
    if tag == "F":
        return Result(error=payload.decode("utf-8", "replace") or "failed")
    try:
        return Result(decode_value(payload))
    except Malformed as error:
        return Result(error=f"no value: {error}")


# -------------------------------------------------------------------------------- files and folders


@functools.cache
def list_readable() -> tuple[str, ...]:
    """List the files and folders a program can read besides its own folder: the standard library
    and the shared libraries it loads.

    Landlock allows a whole folder tree and cannot exclude a part of it. So the entries of the
    standard library's folders are listed one by one, without the folders of installed packages.
    Only the system libraries that the standard library loads are listed.
    """
    found = {sysconfig.get_config_var("DESTSHARED"), "/usr/share/zoneinfo", "/usr/lib/locale"}
    for name in ("stdlib", "platstdlib"):
        with (
            contextlib.suppress(FileNotFoundError),
            os.scandir(sysconfig.get_path(name)) as entries,
        ):
            found |= {entry.path for entry in entries if entry.name not in PACKAGES}
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", LIBRARIES],
        env={},
        stdout=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    found |= {os.fsdecode(name) for name in loaded.stdout.split(b"\0")}
    return tuple(
        sorted(str(Path(path).resolve()) for path in found if path and os.path.exists(path))
    )


@contextlib.contextmanager
def make_folder() -> Iterator[str]:
    """Make an empty folder for this block, and remove it afterwards with everything a program left
    in it."""
    path = tempfile.mkdtemp(prefix="rlkit-program-")
    try:
        yield path
    finally:
        _remove(path)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError, RecursionError):
        shutil.rmtree(path)
    if os.path.exists(path):  # nested too deeply, or made unreadable (basic level only)
        subprocess.run(["chmod", "-R", "u+rwx", path], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", path], check=False, stderr=subprocess.DEVNULL)
