"""metrics.jsonl, the truth of a run: rows appended, read back, cut back by a resumed run, and repeated in metrics.csv."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import DataError
from rlkit.system.files import LOST, append_once, append_whole, finite, reason, write_atomic

DISCARDED, UNREADABLE = "metrics.discarded.jsonl", "metrics.unreadable"  # beside metrics.jsonl
WAITING: dict[Path, bytes] = {}  # file → rows that found no room; a checkpoint is not written before they are


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
    return row if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 1 << 53 else None


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
            append_once(target, _joined(moved))
        target = path
        if lines and (content := _joined(kept)) != path.read_bytes():
            write_atomic(path, content)
    except OSError as error:
        raise DataError(f"{target} cannot be written ({reason(error)}), so rows that the resumed run replaces would be lost") from None
    for moved, what, name in (
        (unreadable, f"of {path.name} cannot be read", UNREADABLE),
        (discarded, f"after step {max(step, 0)}", DISCARDED),
    ):
        if moved:
            print(f"resume: {len(moved)} line(s) {what}: moved to {name}", flush=True)


def _joined(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def append_row(path: Path, step: int, row: dict[str, Any]) -> None:
    """One more line; nan becomes null. Where the disk is full it waits for the next one; the file ends with a whole line."""
    waiting = WAITING.get(path, b"") + (json.dumps(finite({"step": step, **row})) + "\n").encode()
    try:
        append_whole(path, waiting)
        WAITING.pop(path, None)
        LOST.pop(path.name, None)
    except OSError as error:
        if path not in WAITING:
            print(f"warning: {path.name} cannot grow ({reason(error)}); the run goes on, and rows wait for room", file=sys.stderr)
        WAITING[path], LOST[path.name] = waiting, reason(error)


def export_csv(path: Path) -> Path:
    """metrics.csv beside metrics.jsonl, all columns of all rows, blank where a row has none."""
    rows = read_rows(path)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    target, text = path.with_suffix(".csv"), io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(target, text.getvalue().encode(errors="backslashreplace"))
    return target
