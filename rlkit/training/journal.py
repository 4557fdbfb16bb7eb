"""Groups on the disk before the trainer learns from them, for engines that would not sample the
same ones again (`rlkit.types.SharedEngine`).

    groups of step s ── journal/00000s.pt, synced ──▶ learner.step ── killed ──▶ asked for again ──
    read from the journal

A record holds for the same step, version, settings, prompts and bits of the weights that sampled
it; so a run that is continued with other settings samples again. A checkpoint holds the groups that
were in flight then, so records older than the one before it go.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlkit.errors import DataError
from rlkit.system.files import atomic, lenient
from rlkit.system.fingerprints import fingerprint
from rlkit.training.flight import Asked, Dispatched, sealed, unsealed
from rlkit.types import Task


class Journal:
    """Records of groups.

    Args:
      folder: where they are, one file a step. tasks: the prompts of the run. seed: of the run.
    """

    def __init__(self, folder: Path, tasks: Sequence[Task], seed: int):
        self.folder = folder
        self.tasks = tasks
        self.seed = seed
        self.saved = 0  # the oldest step in flight at the last checkpoint

    def keep(self, groups: Dispatched, weights: str) -> None:
        """On the disk when this returns. Where there is no room the run goes on, and says that it
        could not be repeated."""
        with (
            lenient(f"{self.folder}: the groups of step {groups.step + 1}", "journal"),
            atomic(self._place(groups.step)) as file,
        ):
            torch.save({"groups": sealed(groups), "weights": weights}, file)

    def find(self, request: Asked) -> Dispatched | None:
        """The groups of a request; None where they have to be sampled, and then whatever was
        sampled behind them goes too."""
        place = self._place(request.step)
        if place.is_file():
            record = torch.load(place, weights_only=True)
            own = record["groups"]
            same = all(
                own[name] == getattr(request, name) for name in ("step", "version", "settings")
            )
            if (
                same
                and record["weights"] == request.weights
                and own["before"] == list(request.before or ())
            ):
                try:
                    return unsealed(own, self.tasks, seed=self.seed)
                except DataError:
                    pass  # the problems have changed
        self._forget(lambda step: step >= request.step)
        return None

    def checkpoint(self, step: int) -> None:
        """One is being written, whose oldest step in flight this is."""
        self._forget(lambda own: own < self.saved)
        self.saved = step

    def _place(self, step: int) -> Path:
        return self.folder / f"{step:06d}.pt"

    def _forget(self, old: Any) -> None:
        for place in self.folder.glob("*.pt"):
            if old(int(place.stem)):
                os.unlink(place)


def digest(model: Any) -> str:
    """Of the bits of the trainable weights."""
    return hashlib.sha256(
        repr(fingerprint(p for p in model.parameters() if p.requires_grad)).encode()
    ).hexdigest()[:16]
