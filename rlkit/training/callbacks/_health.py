"""Known pathologies on the terminal, each once until it has gone away."""

from __future__ import annotations

from typing import Any

import lightning as L

from rlkit.episodes import failures
from rlkit.training.callbacks.pathologies import ADVICE, CHECKS, environment_failures


class Health(L.Callback):
    """Prints what it finds, when it appears."""

    def __init__(self) -> None:
        self.active: set[str] = set()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        found = {
            check.__name__: text for check in CHECKS if (text := check(module.metrics)) is not None
        }
        for name, text in found.items():
            if name not in self.active:
                first = failures(module.rollouts) if name == environment_failures.__name__ else ""
                trainer.print(f"warning: step {module.rl_step}: {first or text}")
        self.active = set(found) | (self.active & ADVICE)
