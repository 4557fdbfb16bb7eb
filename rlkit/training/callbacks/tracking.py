"""What loggers show besides the rows of numbers: settings, histograms of rewards and advantages, and the figures a run came to."""

from __future__ import annotations

import math
from typing import Any

import lightning as L

from rlkit.training.loggers import log_final, log_histogram, log_settings
from rlkit.training.schedules.paths import flat

FINAL = (  # by which runs are compared
    "test/accuracy", "test/reward", "eval/accuracy", "eval/reward", "reward/mean", "kl/ref_k3", "policy/entropy", "len/mean",
)  # fmt: skip


class Tracking(L.Callback):
    """Says to each logger of a run what is no row. Runs after whatever adds to the row."""

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        for logger in trainer.loggers:
            log_settings(logger, settings(module))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if not trainer.loggers:
            return
        rewards = [total for r in module.rollouts if (total := r.total_reward) is not None]
        advantages = module.batch.advantages[module.batch.response_mask].float().cpu().tolist()
        for logger in trainer.loggers:
            log_histogram(logger, "reward/histogram", rewards, module.rl_step)
            log_histogram(logger, "adv/histogram", advantages, module.rl_step)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        figures = {name: value for name in FINAL if math.isfinite(value := module.metrics.get(name, math.nan))}
        for logger in trainer.loggers:
            log_final(logger, settings(module), figures, module.rl_step)


def settings(module: Any) -> dict[str, Any]:
    """Dotted key → value of the run's config, Hydra's own words left out."""
    return {k: v for k, v in flat(module.provenance.get("config", {})).items() if not k.endswith(("_partial_", "_convert_"))}
