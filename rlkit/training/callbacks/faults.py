"""Write files that help to inspect and to reproduce the fault of a failed run."""

from __future__ import annotations

import shutil
import traceback
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.episodes import save_rollouts
from rlkit.errors import NonFinite, Refusal, announce
from rlkit.system import owner, rng
from rlkit.system.files import report_write_errors, write_atomic
from rlkit.system.noted import is_noted, note
from rlkit.system.redaction import cover
from rlkit.system.sharding import find_sharded_modules
from rlkit.training.callbacks.checkpoints import AtomicCheckpointIO
from rlkit.training.update.split import move_to_device

BATCH = "batch.pt"
STATE = "state.ckpt"


class DebugBundle(L.Callback):
    """Write a folder such as debug/step_000007/ when a run fails. It holds traceback.txt,
    config.yaml and rollouts.jsonl.gz. After a failed update it also holds the update's minibatch
    and the state before the update, so `rlkit replay bundle=FOLDER` can repeat it.

    With several ranks, the first rank writes the folder. A rank that fails alone writes a folder of
    its own, such as debug/step_000007_rank1/. With trainer=ddp each rank has the whole state. The
    state of sharded weights can be gathered only if all ranks fail together, for example when
    numbers are not finite.
    """

    def __init__(self, run: Path):
        self.run = run

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        announce(exception)
        said = not isinstance(exception, Exception) or isinstance(exception, Refusal)
        if said or owner.explain_loss(self.run):
            # nothing to write: it is a signal, or an error whose message explains it, or another
            # process owns the folder now
            return
        together = ranks.size() == 1 or isinstance(exception, NonFinite)
        echo = isinstance(exception, ranks.RankError)
        failed = module.learner.micro.minibatch is not None and not echo
        # in all other cases rank 0 writes the same files
        writes = ranks.rank() == 0 or not (together or echo)
        name = f"step_{module.rl_step + 1:06d}"
        folder = self.run / "debug" / (f"{name}_rank{ranks.rank()}" if ranks.rank() else name)
        if writes:
            exception.add_note(f"debug bundle: {folder}")
            with report_write_errors(str(folder)):
                text = cover("".join(traceback.format_exception(exception)))
                write_atomic(folder / "traceback.txt", text.encode(errors="backslashreplace"))
                if (self.run / "config.yaml").exists():
                    shutil.copy(self.run / "config.yaml", folder)
                    if is_noted(self.run):
                        note(folder)
                if module.rollouts:
                    save_rollouts(folder / "rollouts.jsonl.gz", module.rollouts)
        if not failed or (find_sharded_modules(module.model) and not together):
            return
        state = collect_state(trainer, module)
        if writes:
            with report_write_errors(str(folder)):
                batch = vars(move_to_device(module.learner.micro.minibatch, "cpu"))
                AtomicCheckpointIO().save_checkpoint(batch, folder / BATCH)
                AtomicCheckpointIO().save_checkpoint(state, folder / STATE)
                exception.add_note(f"rlkit replay bundle={folder} repeats the update")


def collect_state(trainer: L.Trainer, module: Any) -> dict[str, Any]:
    """Collect the state for a debug bundle: weights, optimizers, RLModule's additions to a
    checkpoint, and this rank's random generators. If the weights are sharded, all ranks must call
    this."""
    strategy = trainer.strategy
    state = {
        "state_dict": strategy.lightning_module_state_dict(),
        "optimizer_states": [
            strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers
        ],
    }
    module.fill(state, [rng.state()])
    return state


class Watchdog(L.Callback):
    """Record the step of a run, and its current activity (generate, reward or update). If the run
    exceeds `trainer.max_step_time` (`rlkit.system.waiting.limit_waiting`), the message says where
    the run hangs.

    Between steps the limit applies only to calls that wait for an answer from outside, such as the
    rewards and environments of an evaluation.
    """

    def __init__(self) -> None:
        self.module: Any = None

    def place(self) -> str:
        """Return a text such as "step 7 hangs in generate". Between steps, return ""."""
        if self.module is None:
            return ""
        part = self.module.clock.current or "between generate, reward and update"
        return f"step {self.module.rl_step + 1} hangs in {part}"

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.module = module

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.module = None

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.module = None
