"""Keep metrics.jsonl, the record of a run's metrics. Append rows, read them, cut off late rows for
a resumed run, and copy all rows to metrics.csv."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import DataError, warn
from rlkit.system.files import (
    LOST,
    append_once,
    append_whole,
    read_regular,
    reason,
    replace_nonfinite,
    write_atomic,
)

# beside metrics.jsonl
DISCARDED = "metrics.discarded.jsonl"
UNREADABLE = "metrics.unreadable"
# file → rows not written yet because the disk is full; a checkpoint waits for them
WAITING: dict[Path, bytes] = {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all readable rows; without a file there are none. A broken line, for example cut short
    by a kill, is skipped."""
    return [row for _, row in read_lines(path) if row is not None]


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Read (line, row) for every nonempty line. The row is None if the line is broken."""
    lines = read_regular(path).split(b"\n") if path.exists() else []
    return [(line, _parse_row(line)) for line in lines if line]


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return (
        row
        if isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 1 << 53
        else None
    )


def digest_line(line: bytes) -> str:
    """Return the first 16 hexadecimal digits of a line's SHA-256. A checkpoint identifies the line
    by this digest."""
    return hashlib.sha256(line).hexdigest()[:16]


def cut_back(path: Path, step: int, own: Sequence[str] | None = None) -> None:
    """Cut metrics.jsonl back to `step`. A resumed run writes later rows again, so they are moved to
    metrics.discarded.jsonl. Unreadable lines are moved to metrics.unreadable. Both moves are
    printed.

    Args:
      own: digests of the lines written by the run up to `step`, as its checkpoint lists them. If a
        listed line is missing, the file was damaged or exchanged. Then all unlisted lines up to
        `step` are moved to aside/metrics.jsonl. If no listed line is in the file, the whole file is
        moved to it. None means that no checkpoint lists lines.
    Raises: DataError if a file cannot be written. metrics.jsonl is then unchanged.
    """
    lines = read_lines(path)
    missing = Counter(own or ()) - Counter(digest_line(line) for line, _ in lines)
    foreign = bool(own) and missing.total() == len(own or ())
    mine = set(own or ())
    unreadable = []
    discarded = []
    kept = []
    others = []
    for line, row in lines:
        if foreign or (
            missing and digest_line(line) not in mine and row is not None and row["step"] <= step
        ):
            others.append(line)
        elif row is None:
            unreadable.append(line)
        elif row["step"] > step:
            discarded.append(line)
        else:
            kept.append(line)
    target = path
    try:
        for target, moved in (
            (path.with_name(UNREADABLE), unreadable),
            (path.with_name(DISCARDED), discarded),
            (path.parent / "aside" / path.name, others),
        ):
            append_once(target, _join_lines(moved))
        target = path
        if lines:
            content = _join_lines(kept)
            if content != path.read_bytes():
                write_atomic(path, content)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({reason(error)}), so rows that the resumed run replaces"
            " would be lost"
        ) from None
    if missing:
        print(
            "resume: "
            + _describe_loss(path, lines, len(own or ()), missing.total(), step, len(others)),
            flush=True,
        )
    for moved, what, name in (
        (unreadable, f"of {path.name} cannot be read", UNREADABLE),
        (discarded, f"after step {max(step, 0)}", DISCARDED),
    ):
        if moved:
            print(f"resume: {len(moved)} line(s) {what}: moved to {name}", flush=True)


def _describe_loss(
    path: Path, lines: Sequence[object], own: int, missing: int, step: int, others: int
) -> str:
    """Describe in a sentence the rows listed by a checkpoint but missing in metrics.jsonl."""
    kept = f"; {others} other line(s) are kept in aside/{path.name}" if others else ""
    if missing < own:
        return (
            f"{path.name} lacks {missing} of the {own} row(s) that this run wrote up to step"
            f" {step}{kept}"
        )
    what = "is empty" if path.exists() else "is missing"
    what = "is not what this run wrote" if lines else what
    return (
        f"{path.name} {what}; its {own} row(s) up to step {step} are lost, and the run goes on"
        f" without them{kept}"
    )


def _join_lines(lines: Sequence[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def append_row(path: Path, step: int, row: dict[str, Any]) -> None:
    """Append a row as a line of JSON; nan becomes null. On a full disk the row waits in WAITING for
    the next call. The file always ends with a whole line."""
    waiting = (
        WAITING.get(path, b"")
        + (json.dumps(replace_nonfinite({"step": step, **row})) + "\n").encode()
    )
    try:
        append_whole(path, waiting)
        WAITING.pop(path, None)
        LOST.pop(path.name, None)
    except OSError as error:
        if path not in WAITING:
            warn(
                f"{path.name} cannot grow ({reason(error)}); the run goes on, and rows wait for"
                " room"
            )
        WAITING[path] = waiting
        LOST[path.name] = reason(error)


def export_csv(path: Path) -> Path:
    """Write metrics.csv beside metrics.jsonl, with all columns of all rows. A cell is blank if its
    row lacks the column."""
    rows = read_rows(path)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    target = path.with_suffix(".csv")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(target, text.getvalue().encode(errors="backslashreplace"))
    return target
