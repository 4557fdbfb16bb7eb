"""Conversations as files and as text of the loggers: the standard cure for reward hacking is to read them. And of few of them token by
token what was trained on: the text of each token, its log-prob, advantage and whether it counted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.episodes import save_rollouts, transcript
from rlkit.episodes._assemble import rows
from rlkit.episodes.tokens import rounded, save_tokens
from rlkit.models.chat import decode
from rlkit.system.files import lenient, write_atomic
from rlkit.training.loggers import log_text
from rlkit.types import Batch, Rollout

TEXTS = 3  # conversations of a step in a logger


class Samples(L.Callback):
    """Writes a Markdown file of conversations: the best, the worst, then others in order."""

    def __init__(self, folder: Path, *, every: int, count: int):
        self.folder, self.every, self.count = folder, every, count

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step = module.rl_step
        if (step != 1 and step % self.every and not trainer.should_stop) or not trainer.is_global_zero:
            return
        chosen = [transcript(r) for r in choose(module.rollouts, self.count)]
        text = f"# Sample conversations of step {step}\n\n" + "\n".join(chosen)
        with lenient(f"samples/step_{step:06d}.md"):
            write_atomic(self.folder / f"step_{step:06d}.md", text.encode(errors="backslashreplace"))
        for logger in trainer.loggers:
            for i, sample in enumerate(chosen[:TEXTS]):
                log_text(logger, f"samples/{i}", sample, step)


class Rollouts(L.Callback):
    """Writes all rollouts of a step as JSON lines."""

    def __init__(self, folder: Path, *, every: int):
        self.folder, self.every = folder, every

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if self.every and module.rl_step % self.every == 0 and trainer.is_global_zero:
            with lenient(f"rollouts/step_{module.rl_step:06d}.jsonl.gz"):
                save_rollouts(self.folder / f"step_{module.rl_step:06d}.jsonl.gz", module.rollouts)


def choose(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """The best, the worst, then the first of the others."""
    ranked = sorted(rollouts, key=lambda r: float("-inf") if r.reward is None else r.reward)
    picked = [ranked[-1], ranked[0]]
    return (picked + [r for r in rollouts if r is not ranked[0] and r is not ranked[-1]])[:count]


class Tokens(L.Callback):
    """Writes tokens/step_NNNNNN.jsonl.gz: the best and the worst rollout of a step and the first of the others."""

    def __init__(self, folder: Path, *, every: int, count: int):
        self.folder, self.every, self.count = folder, every, count

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.text_of = lru_cache(1 << 12)(partial(decode, module.policy.renderer))  # pairs of tokens come again from step to step

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step = module.rl_step
        if not self.every or (step != 1 and step % self.every and not trainer.should_stop) or not trainer.is_global_zero:
            return
        chosen = choose(module.trained, self.count)
        place = {(r.group, r.sample): i for i, r in enumerate(module.trained)}
        learned = learned_from(module.trained, module.batch, [place[r.group, r.sample] for r in chosen])
        with lenient(f"tokens/step_{step:06d}.jsonl.gz"):
            save_tokens(self.folder / f"step_{step:06d}.jsonl.gz", chosen, self.text_of, learned)


def learned_from(rollouts: Sequence[Rollout], batch: Batch, places: Sequence[int]) -> list[list[dict[str, list]]]:
    """Of some of the rollouts of `batch`, of each step: advantages and trained (1 where the loss counted the token)."""
    assert batch.advantages is not None
    advantages, mask, owners = batch.advantages.float().cpu(), batch.response_mask.cpu(), batch.rollout_ids.tolist()
    out: list[list[dict[str, list]]] = []
    for place in places:
        steps: list[dict[str, list]] = [{"advantages": [], "trained": []} for _ in rollouts[place].steps]
        lines = [line for line, owner in enumerate(owners) if owner == place]  # none where the first prompt left no room for a reply
        for line, row in zip(lines, rows(rollouts[place]), strict=True):
            for number in dict.fromkeys(row.steps):
                length = len(rollouts[place].steps[number].response_ids)
                end = max(t for t, step in enumerate(row.steps) if step == number) + 1  # a reply ends its step
                span = slice(end - length, end)
                steps[number] = {"advantages": rounded(advantages[line, span].tolist()), "trained": mask[line, span].int().tolist()}
        out.append(steps)
    return out
