"""metrics.jsonl, the truth of a run: one row per RL step. Loggers and metrics.csv repeat it."""

from __future__ import annotations

import csv
import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L

from rlkit import ranks
from rlkit.callbacks.files import finite, lenient, reason
from rlkit.callbacks.ownership import still_owned
from rlkit.callbacks.rows import read_rows

WAITING: dict[Path, bytes] = {}  # file → rows that found no room; a checkpoint is not written before they are


class MetricsFile(L.Callback):
    """Appends the module's row after each RL step and hands it to the loggers. Runs after whatever adds to the row."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        still_owned(self.path.parent)  # again: an evaluation may have taken long
        append_row(self.path, module.rl_step, module.metrics)
        numbers = {k: v for k, v in module.metrics.items() if isinstance(v, int | float) and v == v}
        for logger in trainer.loggers:
            with lenient(f"step {module.rl_step} of {type(logger).__name__}"):
                logger.log_metrics(numbers, step=module.rl_step)


def append_row(path: Path, step: int, row: dict[str, Any]) -> None:
    """One more line, by rank 0; nan becomes null. Where the disk is full it waits for the next one; the file ends with a whole line."""
    if ranks.rank():
        return
    waiting = WAITING.get(path, b"") + (json.dumps(finite({"step": step, **row})) + "\n").encode()
    size = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            written = file.write(waiting)
            if written < len(waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        WAITING.pop(path, None)
    except OSError as error:
        if size is not None:
            os.truncate(path, size)
        if path not in WAITING:
            print(f"warning: {path.name} cannot grow ({reason(error)}); the run goes on, and rows wait for room", file=sys.stderr)
        WAITING[path] = waiting


def unwritten(path: Path) -> bool:
    """Whether rows of the file wait for room."""
    return path in WAITING


def export_csv(path: Path) -> Path:
    """metrics.csv beside metrics.jsonl, all columns of all rows, blank where a row has none."""
    rows = read_rows(path)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    target = path.with_suffix(".csv")
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return target
