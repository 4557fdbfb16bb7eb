"""metrics.jsonl, the truth of a run: one row per RL step. Loggers and metrics.csv repeat it."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.system.files import LOST, finite, reason, write_atomic
from rlkit.training.callbacks.ownership import still_owned
from rlkit.training.callbacks.rows import read_rows

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
        LOST.pop(path.name, None)
    except OSError as error:
        if size is not None:
            with suppress(OSError):  # a folder that became read-only in between
                os.truncate(path, size)
        if path not in WAITING:
            print(f"warning: {path.name} cannot grow ({reason(error)}); the run goes on, and rows wait for room", file=sys.stderr)
        WAITING[path], LOST[path.name] = waiting, reason(error)


def unwritten(path: Path) -> bool:
    """Whether rows of the file wait for room."""
    return path in WAITING


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
