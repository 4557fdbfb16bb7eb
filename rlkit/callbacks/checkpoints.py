"""Checkpoints at RL-step boundaries. Lightning's own are driven by optimiser steps, which are not RL steps."""

from __future__ import annotations

import io
import pickle
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
        for old in checkpoints(self.folder)[: -self.keep] if trainer.is_global_zero else ():
            old.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    return sorted(folder.glob(f"{PREFIX}*{SUFFIX}"))


def load_checkpoint(source: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint on the CPU: the file that is named, or the newest of a folder that can be read.

    Damaged ones of a folder are named on standard error and passed over. Raises DataError where none can be read.
    """
    import sys

    for path in [source] if source.suffix == SUFFIX else reversed(checkpoints(source)):
        try:
            return path, torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"warning: {path} is damaged and passed over ({reason})", file=sys.stderr)
    raise DataError(f"{source}: no checkpoint that can be read; start anew with resume=never, or name an older run")
