"""The data side of Lightning. Prompts come from the module's own stream; the loader only counts RL steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L


class StepIndices:
    """Yields the RL steps that are still to do. Sized and stateful, so that Lightning neither prefetches nor repeats; its state is the
    module's count of steps, which a dropped step does not move."""

    def __init__(self, total: int, done: Callable[[], int]):
        self.total, self.done = total, done

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        while (step := self.done()) < self.total:
            yield step

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.done()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The module has counted on from its checkpoint already."""


class RLData(L.LightningDataModule):
    """The step indices of a run; `done` counts the RL steps that are done."""

    def __init__(self, total: int, done: Callable[[], int]):
        super().__init__()
        self.total, self.done = total, done

    def train_dataloader(self) -> StepIndices:
        return StepIndices(self.total, self.done)
