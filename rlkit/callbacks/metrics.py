"""metrics.jsonl, the truth of a run: one row per RL step. Loggers and metrics.csv repeat it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning as L

from rlkit import ranks
from rlkit.callbacks.files import finite, write_atomic


class MetricsFile(L.Callback):
    """Appends the module's row after each RL step and hands it to the loggers. Runs after whatever adds to the row."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        append_row(self.path, module.rl_step, module.metrics)
        numbers = {k: v for k, v in module.metrics.items() if isinstance(v, int | float) and v == v}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=module.rl_step)


def append_row(path: Path, step: int, row: dict[str, Any]) -> None:
    """One more line, by rank 0; nan becomes null."""
    if ranks.rank():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(finite({"step": step, **row})) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows; a last line cut by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def cut_back(path: Path, step: int) -> None:
    """Drops the rows after `step`, which a resumed run writes again."""
    kept = [row for row in read_rows(path) if row["step"] <= step]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept).encode())


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
