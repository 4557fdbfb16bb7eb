"""Writing files that are whole or not there."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes) -> None:
    """Writes beside the target, flushes to the disk, renames. A reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".tmp")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
