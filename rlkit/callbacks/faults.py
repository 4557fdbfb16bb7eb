"""What a run leaves behind when it fails: enough to look at the fault, and to make it happen again."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rlkit.callbacks.files import atomic, lenient, write_atomic
from rlkit.errors import Refusal
from rlkit.rollouts import save_rollouts

BATCH, STATE = "batch.pt", "state.ckpt"


class DebugBundle(L.Callback):
    """debug/step_000007/: traceback.txt, config.yaml and rollouts.jsonl.gz; where an update failed also its minibatch and the state before
    it, with which `rlkit replay bundle=FOLDER` does the update again."""

    def __init__(self, run: Path):
        self.run = run

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        if not isinstance(exception, Exception) or isinstance(exception, Refusal):
            return  # a signal, or a sentence that says it all
        folder = self.run / "debug" / f"step_{module.rl_step + 1:06d}"
        with lenient(str(folder)):
            text = "".join(traceback.format_exception(exception))
            write_atomic(folder / "traceback.txt", text.encode(errors="backslashreplace"))
            if (self.run / "config.yaml").exists():
                shutil.copy(self.run / "config.yaml", folder)
            if module.rollouts:
                save_rollouts(folder / "rollouts.jsonl.gz", module.rollouts)
            if module.minibatch is None:
                exception.add_note(f"debug bundle: {folder}")
                return
            tensors = {name: value.cpu() for name, value in module.minibatch._asdict().items() if value is not None}
            with atomic(folder / BATCH) as file:
                torch.save(tensors, file)
            trainer.save_checkpoint(folder / STATE, weights_only=False)
            exception.add_note(f"debug bundle: {folder}; rlkit replay bundle={folder} does the update again")
