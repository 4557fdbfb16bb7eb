"""Rows of the evidence, one line of JSON each, written as soon as they are known.

    {"part": "b", "piece": "0.6B base, 512", "status": "begun"}
    {"part": "b", "piece": "0.6B base, 512", "status": "row", "table": "decode", "key": "replay", …}
    {"part": "b", "piece": "0.6B base, 512", "status": "done"}

A part is a list of pieces. A piece is over once it is done, skipped or failed, and a part once it
has a row with the status `over`. Whatever is over is not done again. A piece that was interrupted
starts again; of two rows with one table and key the later one counts.
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
TRIES = 2  # starts of a piece that bring no row, after which it counts as failed
Row = Mapping[str, Any]
# Takes the name of a table, the key of a row in it, and the row's figures.
Report = Callable[..., None]


def append_row(folder: Path, **row: Any) -> None:
    """Add one row and hand it to the disk, so that a kill loses nothing."""
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
    """All rows of a folder in order, [] without a file. A line torn by a kill is left out."""
    file = folder / FILE
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def states_of(rows: Sequence[Row], part: str) -> dict[str, str]:
    """Pieces of a part in the order of their first start, each with its last status; `row` counts
    as `begun`."""
    states: dict[str, str] = {}
    for row in rows:
        if row["part"] == part and row.get("piece"):
            states[row["piece"]] = "begun" if row["status"] == "row" else row["status"]
    return states


def is_over(rows: Sequence[Row], part: str) -> bool:
    """Whether all pieces of a part were over the last time that it ran."""
    return any(row["part"] == part and row["status"] == "over" for row in rows)


def vain_starts(rows: Sequence[Row], part: str, piece: str) -> int:
    """How often a piece has begun since its last row."""
    starts = 0
    for row in rows:
        if (row["part"], row.get("piece")) == (part, piece):
            starts = starts + 1 if row["status"] == "begun" else 0
    return starts


def figures_of(rows: Sequence[Row], part: str) -> dict[str, list[dict[str, Any]]]:
    """The tables of a part: of each its rows in order, without the columns that say where they
    belong. Of rows with one piece, table and key the last one counts."""
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
    """Do the pieces of a part that are not over, in their order, until one fails.

    Args:
      pieces: name → function that reports its rows, and returns why it was skipped or None.
      again: pieces that failed are tried once more.
    Returns: 0 once all are over; 3 if one has failed and others may be left, which need a process
      of their own, because a failure on a GPU can leave CUDA unusable.
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
