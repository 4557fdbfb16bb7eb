"""Write conversations to files and to the loggers. Reading conversations is the best way to find
reward hacking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from rlkit.episodes import append_step, write_transcript
from rlkit.episodes.completions import list_table_columns, make_completion_row, write_completions
from rlkit.system import owner
from rlkit.system.files import lose, reason, report_write_errors, write_atomic
from rlkit.system.shards import stem
from rlkit.training.loggers import log_table, log_text
from rlkit.types import Rollout, Weighted

TEXTS = 3  # number of a step's conversations that a logger shows
WAITING = 20_000  # the most rows of the completions table that wait for a checkpoint


class Samples(L.Callback):
    """Write conversations as Markdown, with many steps per file. For each step, the file has the
    best conversation, the worst conversation, and then other conversations in order."""

    def __init__(self, folder: Path, *, every: int, count: int):
        self.folder = folder
        self.every = every
        self.count = count

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step = module.rl_step
        if (
            step != 1 and step % self.every and not trainer.should_stop
        ) or not trainer.is_global_zero:
            return
        chosen = [write_transcript(r) for r in select_best_and_worst(module.rollouts, self.count)]
        path = self.folder / f"{stem(step)}.md"
        text = "\n".join([f"# Sample conversations of step {step}\n", *chosen, ""]).encode(
            errors="backslashreplace"
        )
        with report_write_errors(f"{self.folder.name}/ of step {step}"):
            write_atomic(path, (path.read_bytes() if path.exists() else b"") + text)
        for logger in trainer.loggers:
            for i, sample in enumerate(chosen[:TEXTS]):
                log_text(logger, f"samples/{i}", sample, step)


class Rollouts(L.Callback):
    """Write all rollouts of a step as JSON lines, with many steps per file."""

    def __init__(self, folder: Path, *, every: int):
        self.folder = folder
        self.every = every

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.every and module.rl_step % self.every == 0 and trainer.is_global_zero:
            with report_write_errors(f"{self.folder.name}/ of step {module.rl_step}"):
                append_step(self.folder, module.rl_step, module.rollouts)


class Completions(L.Callback):
    """Write rollouts as rows of Parquet files, and send the rollouts of some steps to the loggers
    as a table.

    Rows wait for the next checkpoint. Therefore each file is written once, and its last step is a
    step from which a resumed run can continue. If the run is killed, the waiting rows are lost, and
    the resumed run writes them again. The files in rollouts/ contain the same rollouts in any case.
    """

    def __init__(self, folder: Path, *, every: int, tables: int):
        self.folder = folder
        self.every = every
        self.tables = tables
        self.rows: list[dict[str, Any]] = []
        self.columns: dict[str, str] = {}

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        names = (name for x in module.learner.phases.values() for name in x.reward.terms)
        # the columns of all phases, so that all files have the same columns
        self.columns = list_table_columns(dict.fromkeys(names))
        if not self.every or not trainer.is_global_zero:
            return
        try:  # imported now, while there is memory for it
            import pyarrow.parquet  # noqa: F401
        except (ImportError, OSError, MemoryError) as error:
            self.every = 0
            lose(f"{self.folder.name}/ is", f"pyarrow cannot be imported: {reason(error)}")

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step = module.rl_step
        kept = self.every and step % self.every == 0
        loggers = trainer.loggers if self.due(trainer, step) else ()
        shown = [logger for logger in loggers if hasattr(logger, "log_table")]
        if not (kept or shown) or not trainer.is_global_zero:
            return
        advantages = mean_advantages(module.batch, module.trained)
        steps = {(r.group, r.sample): r.steps for r in module.trained}
        rows = []
        for r in module.rollouts:
            key = r.group, r.sample
            # with task.reuse, a group of an earlier step may have taken this one's number
            trained = r.steps is steps.get(key)
            rows.append(make_completion_row(r, step, advantages.get(key) if trained else None))
        for logger in shown:
            log_table(
                logger,
                "completions",
                list(self.columns),
                [[row.get(name) for name in self.columns] for row in rows],
                step,
            )
        self.rows += rows if kept else []
        if len(self.rows) > WAITING:
            self.flush()

    def due(self, trainer: L.Trainer, step: int) -> bool:
        """Return whether loggers get the table of this step."""
        return bool(self.tables) and (step == 1 or step % self.tables == 0 or trainer.should_stop)

    def flush(self) -> None:
        """Write the waiting rows to a file, unless another process owns the run folder now."""
        rows = self.rows
        self.rows = []
        if owner.explain_loss(self.folder.parent):
            return
        with report_write_errors(
            f"{self.folder.name}/ of steps {rows[0]['step']} to {rows[-1]['step']}"
            if rows
            else self.folder.name
        ):
            write_completions(self.folder, rows, self.columns)

    def on_save_checkpoint(
        self, trainer: L.Trainer, module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.flush()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.flush()

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        self.flush()


def mean_advantages(batch: Weighted, trained: Sequence[Rollout]) -> dict[tuple[int, int], float]:
    """Return (group, sample) → mean advantage over the trained tokens of the rollout. Rollouts
    without trained tokens are left out."""
    mask = batch.response_mask
    owners = batch.rollout_ids[:, None].expand_as(mask)[mask]
    values = batch.advantages[mask].double()
    sums = values.new_zeros(2, len(trained))
    sums[0].index_add_(0, owners, values)
    sums[1].index_add_(0, owners, torch.ones_like(values))
    means = zip(trained, *sums.tolist(), strict=True)
    return {(r.group, r.sample): total / count for r, total, count in means if count}


def select_best_and_worst(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """Select up to `count` rollouts: the best rollout, the worst rollout, then the others in
    order."""
    ranked = sorted(rollouts, key=lambda r: (r.total_reward is not None, r.total_reward or 0.0))
    picked = [ranked[-1], ranked[0]][: len(ranked)]
    return (picked + [r for r in rollouts if r is not ranked[0] and r is not ranked[-1]])[:count]
