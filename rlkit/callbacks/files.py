"""Writing files that are whole or not there."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write into that takes its place, on the disk, when the block ends; where the block fails, what was there stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".tmp")
    try:
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


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, data: bytes) -> None:
    """Writes beside the target, flushes to the disk, renames. A reader never sees half a file."""
    with atomic(path) as file:
        file.write(data)


@contextmanager
def lenient(what: str) -> Iterator[None]:
    """A block that writes what a run can do without: a full disk or a read-only folder is said, not raised."""
    try:
        yield
    except OSError as error:
        print(f"warning: {what} not written ({reason(error)}); the run goes on", file=sys.stderr, flush=True)


def reason(error: BaseException) -> str:
    """An error in a few words: No space left on device."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.splitlines()[0] if text else type(error).__name__


def write_json(path: Path, value: Any) -> None:
    """Readable JSON; nan and infinity become null, as JSON knows neither."""
    write_atomic(path, (json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n").encode())


def finite(value: Any) -> Any:
    """The value with None for every number that JSON does not know."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
