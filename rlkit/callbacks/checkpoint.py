"""Checkpoints at RL-step boundaries. Lightning's own are driven by optimiser steps, which are not RL steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from rlkit.callbacks.files import write_atomic
from rlkit.errors import DataError

PREFIX, SUFFIX = "step_", ".ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its target and renames it. Lightning's own goes through the system's temporary folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_atomic(Path(path), buffer.getvalue())


class RLCheckpoint(L.Callback):
    """Saves after every `every` RL steps and after the last; keeps the newest `keep`."""

    def __init__(self, folder: Path, *, every: int, keep: int):
        if every < 1 or keep < 1:
            raise ValueError(f"callbacks.checkpoint: every and keep must be at least 1, are {every} and {keep}")
        self.folder, self.every, self.keep = folder, every, keep

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if module.rl_step % self.every == 0 or trainer.should_stop:
            self.save(trainer, module)

    def save(self, trainer: L.Trainer, module: Any) -> None:
        """Writes the checkpoint of the current RL step, then drops the oldest ones."""
        path = self.folder / f"{PREFIX}{module.rl_step:06d}{SUFFIX}"
        trainer.save_checkpoint(path, weights_only=False)  # here the flag means "leave the optimiser out"
        for old in checkpoints(self.folder)[: -self.keep]:
            old.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob(f"{PREFIX}*{SUFFIX}"))


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that can be read, on the CPU; damaged ones are named and passed over.

    Raises: DataError where there is none.
    """
    import warnings

    for path in reversed(checkpoints(folder)):
        try:
            return path, torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}); using the one before it", stacklevel=2)
    raise DataError(f"{folder} holds no checkpoint to continue from; start anew with resume=never")
