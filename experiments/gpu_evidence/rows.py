"""Store the rows of the evidence, one line of JSON each, as soon as they are measured.

    {"part": "b", "piece": "0.6B base, 512", "status": "begun"}
    {"part": "b", "piece": "0.6B base, 512", "status": "row", "table": "decode", "key": "replay", …}
    {"part": "b", "piece": "0.6B base, 512", "status": "done"}

A part is a list of pieces. A piece is over when it is done, skipped or failed. A part is over when
it has a row with the status `over`. A piece or part that is over never runs again. An interrupted
piece starts again from its beginning; if two rows have the same table and key, the later row
counts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = "rows.jsonl"
OVER = ("done", "skipped", "failed")
TRIES = 2  # a piece fails after this many starts in a row without a result
Row = Mapping[str, Any]
# A function that takes the name of a table, the key of a row in the table, and the row's figures.
Report = Callable[..., None]


def append_row(folder: Path, **row: Any) -> None:
    """Append one row and flush it to the disk, so that a kill loses nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a+b") as file:
        torn = file.tell() > 0 and _last_byte(file) != b"\n"
        file.write(b"\n" * torn + json.dumps(row, default=str).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of a folder in order, [] without a file. Skip a line torn by a kill."""
    file = folder / FILE
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def states_of(rows: Sequence[Row], part: str) -> dict[str, str]:
    """Return each piece of a part with its last status, in the order of their first start.

    The status `row` is returned as `begun`.
    """
    states: dict[str, str] = {}
    for row in rows:
        if row["part"] == part and row.get("piece"):
            states[row["piece"]] = "begun" if row["status"] == "row" else row["status"]
    return states


def is_over(rows: Sequence[Row], part: str) -> bool:
    """Return whether all pieces of a part were over when it last ran."""
    return any(row["part"] == part and row["status"] == "over" for row in rows)


def vain_starts(rows: Sequence[Row], part: str, piece: str) -> int:
    """Return how often a piece has begun since its last row."""
    starts = 0
    for row in rows:
        if (row["part"], row.get("piece")) == (part, piece):
            starts = starts + 1 if row["status"] == "begun" else 0
    return starts


def figures_of(rows: Sequence[Row], part: str) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of a part, each with its rows in order.

    The columns `part`, `status` and `table` are left out. If several rows have the same piece,
    table and key, the last row counts.
    """
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        if row["part"] == part and row["status"] == "row":
            own = {k: v for k, v in row.items() if k not in ("part", "status", "table", "key")}
            if own["piece"] == row["key"]:
                named = own
            else:
                named = {"piece": own.pop("piece"), "row": row["key"], **own}
            last[row["piece"], row["table"], row["key"]] = named
    tables: dict[str, list[dict[str, Any]]] = {}
    for (_, table, _), figures in last.items():
        tables.setdefault(table, []).append(figures)
    return tables


def perform(
    folder: Path,
    part: str,
    pieces: Mapping[str, Callable[[Report], str | None]],
    *,
    again: bool = False,
) -> int:
    """Run the unfinished pieces of a part in order, until one fails.

    Args:
      pieces: name → function that reports its rows and returns why it was skipped, or None.
      again: also run failed pieces once more.
    Returns: 0 when all pieces are over; 3 after a failure. The remaining pieces then need a new
      process, because a failure on a GPU can leave CUDA unusable.
    """
    for name, work in pieces.items():
        rows = read_rows(folder)
        state = states_of(rows, part).get(name)
        if state in OVER and not (again and state == "failed"):
            continue
        place = {"part": part, "piece": name}
        if vain_starts(rows, part, name) >= TRIES:
            reason = f"begun {TRIES} times and never ended"
            append_row(folder, **place, status="failed", reason=reason)
            continue
        append_row(folder, **place, status="begun")

        def report(
            table: str, key: str = name, place: dict[str, str] = place, **figures: Any
        ) -> None:
            append_row(folder, **place, status="row", table=table, key=key, **figures)

        print(f"--- {part}: {name}", flush=True)
        began = time.monotonic()
        try:
            skipped = work(report)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            print(reason, flush=True)
            append_row(folder, **place, status="failed", reason=reason[:800])
            return 3
        status = {"status": "skipped", "reason": skipped} if skipped else {"status": "done"}
        append_row(folder, **place, **status, seconds=round(time.monotonic() - began, 1))
    append_row(folder, part=part, status="over")
    return 0
