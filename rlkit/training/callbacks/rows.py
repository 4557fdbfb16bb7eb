"""The rows of metrics.jsonl as they are read back, and what a resumed run does with those that it cannot keep."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlkit.errors import DataError
from rlkit.runs import folder as runs
from rlkit.system.files import reason, write_atomic

DISCARDED, UNREADABLE = "metrics.discarded.jsonl", "metrics.unreadable"  # beside metrics.jsonl


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows that can be read; none where there is no file. A line that is no row, as one cut by a kill, is passed over."""
    return [row for _, row in read_lines(path) if row is not None]


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """(line, its row or None) for every line that is not empty."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [(line, _row(line)) for line in lines if line]


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0 else None


def cut_back(path: Path, step: int) -> None:
    """Moves the rows after `step`, which a resumed run writes again, to metrics.discarded.jsonl, and unreadable lines to
    metrics.unreadable, and says so. Raises DataError, with everything in its place, where that fails.
    """
    lines = read_lines(path)
    unreadable = [line for line, row in lines if row is None]
    discarded = [line for line, row in lines if row is not None and row["step"] > step]
    kept = [line for line, row in lines if row is not None and row["step"] <= step]
    target = path
    try:
        for target, moved in ((path.with_name(UNREADABLE), unreadable), (path.with_name(DISCARDED), discarded)):
            _append(target, moved)
        target = path
        if lines and (content := _joined(kept)) != path.read_bytes():
            write_atomic(path, content)
    except OSError as error:
        raise DataError(f"{target} cannot be written ({reason(error)}), so rows that the resumed run replaces would be lost") from None
    if unreadable:
        print(
            f"resume: {_count(unreadable, 'line')} of {path.name} cannot be read and {_are(unreadable)} moved to {UNREADABLE}", flush=True
        )
    if discarded:
        print(f"resume: {_count(discarded, 'row')} after step {max(step, 0)} {_are(discarded)} moved to {DISCARDED}", flush=True)


def _append(path: Path, lines: Sequence[bytes]) -> None:
    """Appends lines, on the disk when it returns. Those that the file ends with already were appended before a kill."""
    block = _joined(lines)
    if not block or (path.is_file() and path.read_bytes().endswith(block)):
        return
    with path.open("ab") as file:
        file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _joined(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def _count(lines: Sequence[bytes], word: str) -> str:
    return f"{len(lines)} {word}{'s' * (len(lines) != 1)}"


def _are(lines: Sequence[bytes]) -> str:
    return "is" if len(lines) == 1 else "are"


def refuse_restart(folder: Path) -> None:
    """Raises DataError where a run has trained and has no checkpoint left: it could only begin again, in place of what it was."""
    if steps := lost_steps(folder):
        raise DataError(
            f"{folder} has trained {steps} steps, but none of its checkpoints is left, so it cannot go on. Start a new run without resume "
            "(with resume=auto: move this folder away first); nothing in it was changed"
        )


def lost_steps(folder: Path) -> int:
    """How many steps a run has trained whose checkpoints are gone; 0 where one is left, or where it ended before its first save.

    A run is past its first save where it has rows of steps after callbacks.checkpoint.every, where its summary says that its end was
    saved, or where something is left that only a save brings about.
    """
    saves = folder / "checkpoints"
    if any(saves.glob("step_*.ckpt")):
        return 0
    summary = runs.read_summary(folder) or {}
    numbers = [int(found[1]) for path in (folder / "rollouts").glob("step_*") if (found := re.match(r"step_(\d+)", path.name))]
    steps = max([row["step"] for row in read_rows(folder / "metrics.jsonl")] + numbers, default=0)
    ended = summary.get("ended") in ("finished", "out of time", "interrupted") and summary.get("steps") and not summary.get("unsaved")
    left = any(any(saves.glob(name)) for name in ("*.superseded", "*.damaged*", "best.json"))
    parts = None
    with suppress(DataError):  # a config that cannot be read says nothing of saves
        parts = runs.read_config(folder).get("callbacks")
    every = [
        part["every"]
        for part in (parts.values() if isinstance(parts, Mapping) else ())
        if isinstance(part, Mapping)
        and part.get("_target_") == "rlkit.training.callbacks.checkpoint"
        and isinstance(part.get("every"), int)
    ]
    return steps if ended or left or not every or steps > min(every) else 0
