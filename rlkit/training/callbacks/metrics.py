"""Write each step's row to metrics.jsonl, and show the row in the loggers, with texts and
histograms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.system import owner
from rlkit.system.rows import append_row
from rlkit.training.kernels import note_choices, record_choices
from rlkit.training.loggers import log_final, log_histogram, log_settings, log_text
from rlkit.training.metrics import with_own
from rlkit.training.schedules.paths import flatten_numbers

FINAL = (  # the metrics whose last values compare runs
    "test/accuracy",
    "test/reward",
    "eval/accuracy",
    "eval/reward",
    "reward/mean",
    "kl/ref_k3",
    "policy/entropy",
    "len/mean",
)


class Ownership(L.Callback):
    """Check in owner.json that no other process has taken the run folder. This callback checks the
    file at the start and at the end of each step. The file is checked again before a row is added
    to metrics.jsonl, and before a checkpoint gets its final name."""

    def __init__(self, run: Path):
        self.run = run

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        check_ownership(self.run)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        check_ownership(self.run)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        check_ownership(self.run)


class ChoicesNoted(L.Callback):
    """Write to run.json which kernels the run has chosen, and whether activations are recomputed.
    In a resumed run, these choices come from the checkpoint."""

    def __init__(self, run: Path):
        self.run = run

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        if ranks.rank() == 0:
            engine = module.experiment.generation.engine
            note_choices(self.run, record_choices(engine, module.policy.model))


def check_ownership(run: Path) -> None:
    """End the run on all ranks if another process has taken its folder. The first rank checks the
    folder and raises TakenOver; the other ranks then raise RankError."""
    ranks.broadcast(lambda: owner.check_owner(run))


class MetricsFile(L.Callback):
    """Append the metrics of each RL step to metrics.jsonl, and send them to the loggers, with texts
    and histograms. Then let the learner update its controllers and its phase with these metrics,
    `eval/*` included (`Learner.advance`). If a phase ends, print a line.

    This callback runs after every callback that adds to the row.
    """

    def __init__(self, path: Path):
        self.path = path
        self.line = ""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        for logger in trainer.loggers:
            log_settings(logger, list_settings(module))

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.line:  # printed only now, to come after the line of the step that ended the phase
            trainer.print(self.line)
            self.line = ""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        # checked again, because an evaluation may have taken long
        check_ownership(self.path.parent)
        module.metrics = with_own(module.metrics, module.logged)
        module.logged = {}
        if ranks.rank() == 0:
            append_row(self.path, module.rl_step, module.metrics)
        for logger in trainer.loggers:
            _show(logger, module)
        self.line = line = module.learner.advance()
        if line and ranks.rank() == 0:
            append_row(self.path, module.rl_step, {"schedule/switch": line})
        for logger in trainer.loggers if line else ():
            log_text(logger, "schedule/switch", line, module.rl_step)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        late = with_own({}, module.logged)
        if late:  # logged since the last row
            if ranks.rank() == 0:
                append_row(self.path, module.rl_step, late)
            for logger in trainer.loggers:
                logger.log_metrics(dict(late), step=module.rl_step)
        finite = {name: module.metrics.get(name, math.nan) for name in FINAL}
        figures = {name: value for name, value in finite.items() if math.isfinite(value)}
        for logger in trainer.loggers:
            log_final(logger, list_settings(module), figures, module.rl_step)


def _show(logger: Any, module: Any) -> None:
    """Log the numbers and texts of a step's row, and histograms of rewards and advantages."""
    numbers = {k: v for k, v in module.metrics.items() if isinstance(v, int | float) and v == v}
    logger.log_metrics(numbers, step=module.rl_step)
    for name, text in module.metrics.items():
        if isinstance(text, str):
            log_text(logger, name, text, module.rl_step)
    rewards = [total for r in module.rollouts if (total := r.total_reward) is not None]
    log_histogram(logger, "reward/histogram", rewards, module.rl_step)
    advantages = module.batch.advantages[module.batch.response_mask].float().cpu().tolist()
    log_histogram(logger, "adv/histogram", advantages, module.rl_step)


def list_settings(module: Any) -> dict[str, Any]:
    """Return dotted key → value of the run's config, without Hydra's own keys."""
    return {
        k: v
        for k, v in flatten_numbers(module.provenance.get("config", {})).items()
        if not k.endswith(("_partial_", "_convert_"))
    }
