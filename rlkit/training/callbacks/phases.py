"""Phases as they change: one line in the terminal, a row in metrics.jsonl, a mark in TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.system.rows import append_row
from rlkit.training.loggers import log_text


class Phases(L.Callback):
    """Lets the module draw its conclusions from a step's metrics, `eval/*` included. Runs after whatever adds to the row."""

    def __init__(self, metrics: Path):
        self.metrics, self.line = metrics, ""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.line = line = module.learner.advance()
        if not line:
            return
        if ranks.rank() == 0:
            append_row(self.metrics, module.rl_step, {"schedule/switch": line})
        for logger in trainer.loggers:
            log_text(logger, "schedule/switch", line, module.rl_step)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.line:  # below the line of the step that ended the phase
            trainer.print(self.line)
            self.line = ""
