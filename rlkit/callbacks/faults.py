"""What a run leaves behind when it fails: enough to look at the fault, and to make it happen again."""

from __future__ import annotations

import faulthandler
import os
import shutil
import threading
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rlkit import ranks
from rlkit.callbacks.files import atomic, lenient, write_atomic
from rlkit.errors import Refusal
from rlkit.rollouts import save_rollouts

GRACE = 5.0  # seconds until a process that cannot even say so is ended
BATCH, STATE = "batch.pt", "state.ckpt"


class DebugBundle(L.Callback):
    """debug/step_000007/: traceback.txt, config.yaml and rollouts.jsonl.gz; where an update failed also its minibatch and the state before
    it, with which `rlkit replay bundle=FOLDER` does the update again."""

    def __init__(self, run: Path):
        self.run = run

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        if not isinstance(exception, Exception) or isinstance(exception, Refusal):
            return  # a signal, or a sentence that says it all
        if not trainer.is_global_zero:
            return
        folder = self.run / "debug" / f"step_{module.rl_step + 1:06d}"
        with lenient(str(folder)):
            text = "".join(traceback.format_exception(exception))
            write_atomic(folder / "traceback.txt", text.encode(errors="backslashreplace"))
            if (self.run / "config.yaml").exists():
                shutil.copy(self.run / "config.yaml", folder)
            if module.rollouts:
                save_rollouts(folder / "rollouts.jsonl.gz", module.rollouts)
            if module.minibatch is None or ranks.size() > 1:  # the state is in the hands of all ranks, and not all may be there
                exception.add_note(f"debug bundle: {folder}")
                return
            tensors = {name: value.cpu() for name, value in module.minibatch._asdict().items() if value is not None}
            with atomic(folder / BATCH) as file:
                torch.save(tensors, file)
            trainer.save_checkpoint(folder / STATE, weights_only=False)
            exception.add_note(f"debug bundle: {folder}; rlkit replay bundle={folder} does the update again")


class Watchdog(L.Callback):
    """Ends the process where a step hangs: an engine, or an environment of the user's. Rewards and tools have deadlines of their own.

    The parts of a step are generate, reward and update; the run goes on from its last checkpoint when it is resumed.
    """

    def __init__(self, minutes: float | None):
        self.seconds = None if minutes is None else 60 * minutes
        self.timer: threading.Timer | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.seconds is not None:
            self.timer = threading.Timer(self.seconds, self.hung, (module,))
            self.timer.daemon = True
            self.timer.start()
            faulthandler.dump_traceback_later(self.seconds + GRACE, exit=True)  # also where nothing lets go of the interpreter

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.timer is not None:
            self.timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.on_train_batch_end(trainer, module)

    def hung(self, module: Any) -> None:
        """Says where, and ends the process with status 1."""
        part = module.clock.current or "between generate, reward and update"
        line = (
            f"rlkit: step {module.rl_step + 1} hangs in {part}: nothing within trainer.max_step_time={(self.seconds or 0) / 60:g} minutes"
        )
        os.write(2, f"\n{line}. Where each thread stands:\n".encode())
        faulthandler.dump_traceback()
        os._exit(1)
