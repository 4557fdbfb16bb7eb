"""Keep metrics.jsonl, the truth of a run: append rows, read them, cut them back for a resumed run,
and repeat them in metrics.csv."""

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
# file → rows without room so far; a checkpoint waits until they are written
WAITING: dict[Path, bytes] = {}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All readable rows; none without a file. A broken line, for example one cut by a kill, is
    passed over."""
    return [row for _, row in read_lines(path) if row is not None]


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """(line, its row or None) for every nonempty line."""
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
    """The first 16 hexadecimal digits of the SHA-256 of a line. A checkpoint knows the line by
    them."""
    return hashlib.sha256(line).hexdigest()[:16]


def cut_back(path: Path, step: int, own: Sequence[str] | None = None) -> None:
    """Move the rows after `step` to metrics.discarded.jsonl, because a resumed run writes them
    again, and unreadable lines to metrics.unreadable. Print both moves.

    Args:
      own: digests of the lines the run had written up to `step`, by its checkpoint. If one of them
        is missing, the file was damaged or exchanged. Then other lines up to `step` go to
        aside/metrics.jsonl. If no line is the run's own, the whole file goes there. None: no
        checkpoint lists them.
    Raises: DataError, with everything in its place, if a file cannot be written.
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
    """A sentence on rows known to a checkpoint and missing in metrics.jsonl."""
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
    """Append a line; nan becomes null. On a full disk the row waits for the next call; the file
    always ends with a whole line."""
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
    """Write metrics.csv beside metrics.jsonl: all columns of all rows, blank if a row lacks one."""
    rows = read_rows(path)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    target = path.with_suffix(".csv")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(target, text.getvalue().encode(errors="backslashreplace"))
    return target
