"""Loggers: functions of the run folder and the RL step the run stands at that give a Lightning logger, or None.

metrics.jsonl is written with any of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def none(run: Path, step: int, /) -> None:
    """No logger besides metrics.jsonl."""
    return None


def tensorboard(run: Path, step: int, /) -> Any:
    """TensorBoard event files in tensorboard/; a resumed run goes on in the same folder and hides what came after its checkpoint."""
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(
        save_dir=str(run), name="", version="tensorboard", default_hp_metric=False, purge_step=step + 1 if step else None
    )
