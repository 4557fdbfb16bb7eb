"""Conversations as files and as text of the loggers: reading them is the standard cure for reward hacking."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.episodes import append_step, transcript
from rlkit.system.files import lenient, write_atomic
from rlkit.system.shards import stem
from rlkit.training.loggers import log_text
from rlkit.types import Rollout

TEXTS = 3  # conversations of a step in a logger


class Samples(L.Callback):
    """Writes conversations as Markdown, many steps a file: the best of a step, the worst, then others in order."""

    def __init__(self, folder: Path, *, every: int, count: int):
        self.folder, self.every, self.count = folder, every, count

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step = module.rl_step
        if (step != 1 and step % self.every and not trainer.should_stop) or not trainer.is_global_zero:
            return
        chosen = [transcript(r) for r in best_and_worst(module.rollouts, self.count)]
        path, title = self.folder / f"{stem(step)}.md", f"# Sample conversations of step {step}\n"
        text = "\n".join([title, *chosen, ""]).encode(errors="backslashreplace")
        with lenient(f"{self.folder.name}/ of step {step}"):
            earlier = path.read_bytes() if path.exists() else b""
            again = re.search(b"^" + title.encode(), earlier, re.M)  # of a run that is resumed from before it
            write_atomic(path, earlier[: again and again.start()] + text)
        for logger in trainer.loggers:
            for i, sample in enumerate(chosen[:TEXTS]):
                log_text(logger, f"samples/{i}", sample, step)


class Rollouts(L.Callback):
    """Writes all rollouts of a step as JSON lines, many steps a file."""

    def __init__(self, folder: Path, *, every: int):
        self.folder, self.every = folder, every

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.every and module.rl_step % self.every == 0 and trainer.is_global_zero:
            with lenient(f"{self.folder.name}/ of step {module.rl_step}"):
                append_step(self.folder, module.rl_step, module.rollouts)


def best_and_worst(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """The best, the worst, then the first of the others."""
    ranked = sorted(rollouts, key=lambda r: float("-inf") if r.reward is None else r.reward)
    picked = [ranked[-1], ranked[0]]
    return (picked + [r for r in rollouts if r is not ranked[0] and r is not ranked[-1]])[:count]
