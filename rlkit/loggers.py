"""Loggers: functions of the run folder that give a Lightning logger, or None. metrics.jsonl is written with any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def none(run: Path, /) -> None:
    """No logger besides metrics.jsonl."""
    return None


def tensorboard(run: Path, /) -> Any:
    """TensorBoard event files in tensorboard/; a resumed run goes on in the same folder."""
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(save_dir=str(run), name="", version="tensorboard", default_hp_metric=False)
