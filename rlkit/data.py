"""The data side of Lightning. Prompts come from the module's own stream; the loader only counts RL steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L


class StepIndices:
    """Yields the RL steps that are still to do. Sized and stateful, so that Lightning neither prefetches nor repeats."""

    def __init__(self, total: int):
        self.total, self.position = total, 0

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        while self.position < self.total:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class RLData(L.LightningDataModule):
    """The step indices of a run."""

    def __init__(self, total: int):
        super().__init__()
        self.total = total

    def train_dataloader(self) -> StepIndices:
        return StepIndices(self.total)
