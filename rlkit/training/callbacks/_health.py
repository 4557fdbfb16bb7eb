"""Print each known pathology once on the terminal. At the end of a run, `rlkit train` prints in how
many steps each pathology occurred."""

from __future__ import annotations

from typing import Any

import lightning as L

from rlkit.episodes.summary import count_failures, count_refusals, describe_failing_tools
from rlkit.training.callbacks.pathologies import (
    CHECKS,
    LEAST_BAD,
    environment_failures,
    with_least_bad,
)


class Health(L.Callback):
    """Print each pathology in the first step that shows it."""

    def __init__(self) -> None:
        self.said: set[str] = set()
        self.least_bad = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"said": sorted(self.said), "least_bad": self.least_bad}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.said = set(state_dict["said"])
        self.least_bad = state_dict["least_bad"]

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        before = {"group/frac_all_bad": self.least_bad}
        row = list(with_least_bad([before, module.metrics]))[-1]
        self.least_bad = row[LEAST_BAD]
        found = {check.__name__: text for check in CHECKS if (text := check(row)) is not None}
        found |= {
            text.partition(" failed")[0]: text for text in describe_failing_tools(module.rollouts)
        }
        refused = count_refusals(module.rollouts)
        found |= {"refusals": refused} if refused else {}
        for name, text in found.items():
            if name not in self.said:
                first = (
                    count_failures(module.rollouts) if name == environment_failures.__name__ else ""
                )
                trainer.print(f"warning: step {module.rl_step}: {first or text}")
        self.said |= found.keys()
