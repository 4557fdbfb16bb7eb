"""Conversations as files and as text of the loggers: the standard cure for reward hacking is to read them. And of few of them token by
token what was trained on: the text of each token, its log-prob, advantage and whether it counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.episodes import save_rollouts, transcript
from rlkit.episodes.assemble import rows
from rlkit.models.chat import decode
from rlkit.system.files import finite, lenient, write_atomic
from rlkit.training.loggers import log_text
from rlkit.types import Batch, Rollout

DIGITS = 5  # of a log-prob or advantage
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
        self.text_of = lru_cache(1 << 12)(partial(decode, module.policy.codec))  # pairs of tokens come again from step to step

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        step = module.rl_step
        if not self.every or (step != 1 and step % self.every and not trainer.should_stop) or not trainer.is_global_zero:
            return
        chosen = choose(module.trained, self.count)
        place = {(r.group, r.sample): i for i, r in enumerate(module.trained)}
        learned = learned_from(module.trained, module.batch, [place[r.group, r.sample] for r in chosen])
        with lenient(f"tokens/step_{step:06d}.jsonl.gz"):
            save_tokens(self.folder / f"step_{step:06d}.jsonl.gz", chosen, self.text_of, learned)


def save_tokens(
    path: Path, rollouts: Sequence[Rollout], text_of: Callable[[tuple[int, ...]], str], learned: Sequence[list[dict[str, list]]] = ()
) -> None:
    """One line a rollout: {group, sample, task_id, steps: [{text, logprobs, advantages, trained}, …]}, each a list over the reply's tokens.

    Args:
      text_of: ids → text.
      learned: of each rollout what `learned_from` gives; without it the lines have text and log-probs alone.
    """
    lines = []
    for index, rollout in enumerate(rollouts):
        steps = []
        for number, step in enumerate(rollout.steps):
            own = {"text": pieces(step.response_ids, text_of), "logprobs": rounded(step.logprobs)}
            steps.append(own | (learned[index][number] if learned else {}))
        line = {"group": rollout.group, "sample": rollout.sample, "task_id": rollout.task.id, "steps": steps}
        lines.append(json.dumps(finite(line)) + "\n")
    write_atomic(path, gzip.compress("".join(lines).encode(), compresslevel=6, mtime=0))


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


def pieces(ids: Sequence[int], text_of: Callable[[tuple[int, ...]], str]) -> list[str]:
    """The text that each token adds; a character of several tokens stands at the last of them. Joined they are the whole text.

    Each is decoded behind the token before it, for some tokenizers drop a space at the start of a text.
    """
    out: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        known = text_of(tuple(before)) if before else ""
        text = text_of((*before, *pending))
        own = text[len(known) :] if text.startswith(known) else text_of(tuple(pending))
        if own.endswith("\ufffd") and len(pending) < 4:  # UTF-8 takes four bytes at most
            out.append("")
            continue
        out.append(own)
        before, pending = pending, []
    if pending:
        out[-1] = text_of(tuple(pending))
    return out


def rounded(values: Sequence[float]) -> list[float]:
    """Numbers short enough to read and to store."""
    return [round(value, DIGITS) for value in values]
