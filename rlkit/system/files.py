"""Write a run's files whole or not at all, and handle failed writes: one place for all of them.

Before the first step, a file that cannot be written refuses the run (`refuse_unwritable`). From
then on no failed write ends the run: each loss is reported at once, and the end of the run names
the missing files (`report_write_errors`, `LOST`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rlkit.errors import ConfigError, Refusal, warn


def cache_folder() -> Path | None:
    """The folder for files rlkit may make again at any time: $XDG_CACHE_HOME/rlkit, else
    ~/.cache/rlkit. None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    cache = given if os.path.isabs(given) else os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "rlkit" if os.path.isabs(cache) else None


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write into. It takes its place, on the disk, when the block ends. If the block
    fails, the old file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".tmp")
    try:
        part.unlink(missing_ok=True)  # a killed process may have left anything here
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    sync(path.parent)


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file to read it. A plain `open` of a FIFO waits for a writer, possibly
    forever.

    Raises: OSError, also if the path is anything but a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """All bytes of a regular file. Raises: OSError, as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside the target, flush to the disk, rename. A reader never sees half a file."""
    with open_atomically(path) as file:
        file.write(data)


def append_whole(path: Path, data: bytes) -> None:
    """Append to a file, created if missing. Raises: OSError if there is no room for all of the
    data; then nothing was appended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):  # a folder made read-only in between
                os.truncate(path, size)
            raise


def append_once(path: Path, data: bytes) -> None:
    """Append to a file; the data are on the disk when this returns. If the file already ends with
    the data, they were appended before a kill, and nothing is appended. Raises: OSError."""
    if not data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - len(data)))
        there = file.read() == data
    if not there:
        append_whole(path, data)
        sync(path)


# name of an output that could not be written, and has not been written since → the reason
LOST: dict[str, str] = {}


@contextmanager
def report_write_errors(what: str, kind: str = "") -> Iterator[None]:
    """Run a block whose output the run can do without. A full disk or a read-only folder is
    reported, not raised.

    The loss is kept in `LOST` until a later block of the same kind succeeds, so the end of the run
    can name it.

    Args:
      what: the file, as the user knows it.
      kind: the key in LOST; `what` by default.
    """
    try:
        yield
    except Exception as error:
        why = explain_write_error(error)
        if why is None:
            raise
        lose(what, why, kind, quiet=getattr(error, "elsewhere", False))
    else:
        LOST.pop(kind or what, None)


def lose(what: str, why: str, kind: str = "", *, quiet: bool = False) -> None:
    """Report an unwritten file once, and remember it for the end of the run; `quiet` if another
    rank reports it."""
    again = LOST.get(what) == why
    LOST[kind or what] = why
    if not quiet and not again:
        with suppress(OSError):  # standard error may go into a file on the same disk
            warn(f"{what} not written ({why}); the run goes on")


@contextmanager
def refuse_unwritable(place: Path | str) -> Iterator[None]:
    """Run a block that writes before anything is computed. If it cannot write, the command is
    refused in one sentence.

    Raises: ConfigError naming the place and the reason.
    """
    try:
        yield
    except Exception as error:
        why = explain_write_error(error)
        if why is None or isinstance(error, Refusal):
            raise
        raise ConfigError(
            f"{place}: cannot be written ({why}); make room or choose another folder"
        ) from error


# Errors besides OSError with which libraries report that a file cannot grow or be made. Rust
# libraries (safetensors, tokenizers) give the system's error number; the message of torch's zip
# writer in C++ has only its own name.
RUST = re.compile(r"\(os error (\d+)\)")
TORCH = re.compile(
    r"PytorchStreamWriter|unexpected pos \d+|Parent directory .* does not exist|cannot be"
    r" opened|iostream error"
)


def explain_write_error(error: BaseException) -> str | None:
    """Say why a file could not be written, in a few words; None for any other error."""
    if isinstance(error, OSError):
        return reason(error)
    if isinstance(error, MemoryError):
        return "memory ran out"
    found = RUST.search(str(error))
    if found:
        return os.strerror(int(found[1]))
    if isinstance(error, RuntimeError) and TORCH.search(str(error)):
        behind = error.__cause__ or error.__context__
        return reason(behind) if isinstance(behind, OSError) else "the disk took only a part of it"
    return None


@contextmanager
def convert_write_errors() -> Iterator[None]:
    """Run a library's writer. Its own errors about the disk become OSErrors, on all ranks alike."""
    try:
        yield
    except Exception as error:
        why = None if isinstance(error, OSError) else explain_write_error(error)
        if why is None:
            raise
        raise OSError(errno.EIO, why) from error


def reason(error: BaseException) -> str:
    """An error in a few words: No space left on device."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON; nan and infinity become null, as JSON knows neither."""
    write_atomic(path, _json_text(value))


def is_json(path: Path, value: Any) -> bool:
    """Whether a file holds exactly the output of `write_json`."""
    try:
        return read_regular(path) == _json_text(value)
    except OSError:
        return False


def _json_text(value: Any) -> bytes:
    return (json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False) + "\n").encode()


def replace_nonfinite(value: Any) -> Any:
    """The value with None for every number unknown to JSON, and a NamedTuple as a mapping."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {k: replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def put_aside(path: Path, suffix: str) -> Path:
    """Rename a file to its name with a suffix, plus a number if this name is taken. Nothing is
    overwritten. Returns the new path."""
    target = path.with_name(path.name + suffix)
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}{suffix}_{number}")
        number += 1
    path.rename(target)
    return target
