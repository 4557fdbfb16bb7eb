"""Write a run's files whole or not at all, and handle failed writes. All writes of a run use this
module.

Before the first step, a run is refused if a file cannot be written (`refuse_unwritable`). From then
on no failed write ends the run. Each lost file is reported at once, and again at the end of the run
(`report_write_errors`, `LOST`).
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
    """Return the folder for files rlkit can make again at any time: $XDG_CACHE_HOME/rlkit, else
    ~/.cache/rlkit. None for a user without a home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    cache = given if os.path.isabs(given) else os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "rlkit" if os.path.isabs(cache) else None


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing. When the block ends, it replaces `path` and is on the
    disk. If the block fails, the old file stays."""
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
    """Open a regular file for reading. (A plain `open` of a FIFO would wait for a writer, possibly
    forever.)

    Raises: OSError if the file cannot be opened, or if the path is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path) -> bytes:
    """Read all bytes of a regular file. Raises: OSError, as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader never sees half of it: write beside the target, flush to the
    disk, then rename."""
    with open_atomically(path) as file:
        file.write(data)


def append_whole(path: Path, data: bytes) -> None:
    """Append all of the data to a file, or nothing. A missing file is created. Raises: OSError if
    there is no room for all of the data."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):  # the folder became read-only in between
                os.truncate(path, size)
            raise


def append_once(path: Path, data: bytes) -> None:
    """Append to a file, and return when the data are on the disk. If the file already ends with the
    data, an earlier process appended them before it was killed, and nothing is appended. Raises:
    OSError."""
    if not data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - len(data)))
        there = file.read() == data
    if not there:
        append_whole(path, data)
        sync(path)


# name of an output that could not be written so far → the reason
LOST: dict[str, str] = {}
SAID = set[tuple[str, str]]()  # what was named as unwritten, and why


@contextmanager
def report_write_errors(what: str, kind: str = "") -> Iterator[None]:
    """Run a block that writes an output the run can do without. A full disk or a read-only folder
    is reported, not raised.

    The loss is kept in `LOST` until a later block of the same kind succeeds, so the end of the run
    can name it.

    Args:
      what: the file, as the user knows it.
      kind: the key of this output in LOST; `what` by default.
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
    """Report an unwritten file once, and remember it for the end of the run. With `quiet`, another
    rank reports the file."""
    again = (what, why) in SAID and (kind or what) in LOST
    SAID.add((what, why))
    LOST[kind or what] = why
    if not quiet and not again:
        with suppress(OSError):  # standard error may go into a file on the same disk
            warn(f"{what} not written ({why}); the run goes on")


@contextmanager
def refuse_unwritable(place: Path | str) -> Iterator[None]:
    """Run a block that writes files before anything is computed. If a file cannot be written, the
    command is refused in one sentence.

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
    """Run a library's writer, and turn its own errors about the disk into OSErrors, on all ranks
    alike."""
    try:
        yield
    except Exception as error:
        why = None if isinstance(error, OSError) else explain_write_error(error)
        if why is None:
            raise
        raise OSError(errno.EIO, why) from error


def reason(error: BaseException) -> str:
    """Describe an error in a few words, for example "No space left on device"."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def write_json(path: Path, value: Any) -> None:
    """Write readable JSON. nan and infinity become null, because JSON has neither."""
    write_atomic(path, _json_text(value))


def is_json(path: Path, value: Any) -> bool:
    """Return whether a file holds exactly the output of `write_json` for this value."""
    try:
        return read_regular(path) == _json_text(value)
    except OSError:
        return False


def _json_text(value: Any) -> bytes:
    return (json.dumps(replace_nonfinite(value), indent=2, ensure_ascii=False) + "\n").encode()


def replace_nonfinite(value: Any) -> Any:
    """Return the value with None for every nan or infinity, and with each NamedTuple as a
    mapping."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {k: replace_nonfinite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def put_aside(path: Path, suffix: str) -> Path:
    """Add a suffix to a file's name, plus a number if the new name is taken, so that nothing is
    overwritten. Returns the new path."""
    target = path.with_name(path.name + suffix)
    number = 2
    while target.exists():
        target = path.with_name(f"{path.name}{suffix}_{number}")
        number += 1
    path.rename(target)
    return target
