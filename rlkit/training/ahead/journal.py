"""Write groups to disk before the trainer learns from them. The journal is needed for engines that
cannot sample the same groups a second time (`rlkit.types.SharedEngine`).

    groups of step s ── journal/00000s.pt, synced ──▶ learner.step ── killed ──▶ requested again ──▶
    read from the journal

A record is used only if a request has the same step, version, settings, prompts and bits of the
sampling weights. Therefore a run that continues with other settings samples its groups again. A
checkpoint also holds the groups in flight. When a checkpoint is written, the journal deletes the
records of all steps that were done at the previous checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from rlkit.errors import DataError
from rlkit.system.contents import set_aside
from rlkit.system.files import open_atomically, report_write_errors
from rlkit.training.ahead.flight import Request, StepGroups, pack_groups, unpack_groups
from rlkit.types import Task


class Journal:
    """Keep records of groups in a folder, with one file per RL step.

    Args:
      folder: the folder with the records.
      tasks: the training prompts of the run.
      seed: the seed of the run.
    """

    def __init__(self, folder: Path, tasks: Sequence[Task], seed: int):
        self.folder = folder
        self.tasks = tasks
        self.seed = seed
        self.saved = 0  # the first step that was not done at the last checkpoint

    def keep(self, groups: StepGroups, weights: str) -> None:
        """Write the groups to disk, and return after the disk has stored them. If the disk is full,
        the run prints a warning that it cannot be repeated exactly, and continues."""
        with (
            report_write_errors(f"{self.folder}: the groups of step {groups.step + 1}", "journal"),
            open_atomically(self._place(groups.step)) as file,
        ):
            torch.save(pack_groups(groups) | {"weights": weights}, file)

    def find(self, request: Request) -> StepGroups | None:
        """Return the recorded groups of a request. If no record fits, delete the records of this
        step and of all later steps, and return None; the groups must then be sampled."""
        place = self._place(request.step)
        if place.is_file():
            asked = request._asdict() | {"before": list(request.before or ())}
            decide = ("step", "version", "settings", "before", "weights")
            try:
                record = torch.load(place, weights_only=True)
                if all(record[name] == asked[name] for name in decide):
                    with suppress(DataError):  # the problems have changed
                        return unpack_groups(record, self.tasks, seed=self.seed)
            except Exception:  # torch and pickle raise many types
                kept = set_aside(self.folder.parent, f"{self.folder.name}/{place.name}")
                print(
                    f"resume: {place.name} of {self.folder.name}/ is damaged or not the run's own"
                    f" and is kept as {kept}; the groups of step {request.step + 1} are sampled"
                    " again"
                )
        self._forget(lambda step: step >= request.step)
        return None

    def checkpoint(self, step: int) -> None:
        """Delete the records that no checkpoint needs any longer.

        Args:
          step: the first step that is not done at the present checkpoint.
        """
        self._forget(lambda own: own < self.saved)
        self.saved = step

    def _place(self, step: int) -> Path:
        return self.folder / f"{step:06d}.pt"

    def _forget(self, old: Callable[[int], bool]) -> None:
        for place in self.folder.glob(f"{'[0-9]' * 6}.pt"):
            if old(int(place.stem)):
                os.unlink(place)
