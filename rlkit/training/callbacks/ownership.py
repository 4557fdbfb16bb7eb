"""A run that another process has taken over ends before it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from rlkit.distributed import ranks
from rlkit.system import owner


class Ownership(L.Callback):
    """Looks at owner.json where a step begins and where it ends; rows and checkpoints look once more before they are written."""

    def __init__(self, run: Path):
        self.run = run

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        still_owned(self.run)

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        still_owned(self.run)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        still_owned(self.run)


def still_owned(run: Path) -> None:
    """Of several ranks the first one looks; all of them end. Raises TakenOver, on the others RankError."""
    ranks.first(lambda: owner.check(run))
