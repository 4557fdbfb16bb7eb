"""One row per RL step into metrics.jsonl, and into the loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.system.rows import append_row
from rlkit.training.callbacks.ownership import still_owned


class MetricsFile(L.Callback):
    """Appends the module's row after each RL step and hands it to the loggers. Runs after whatever adds to the row."""

    def __init__(self, path: Path):
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        still_owned(self.path.parent)  # again: an evaluation may have taken long
        if ranks.rank() == 0:
            append_row(self.path, module.rl_step, module.metrics)
        numbers = {k: v for k, v in module.metrics.items() if isinstance(v, int | float) and v == v}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=module.rl_step)
