"""Token by token what was trained on: the text of each token, its log-prob, advantage and whether it counted. Few rollouts a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import lightning as L

from rlkit.episodes.assemble import rows
from rlkit.episodes.tokens import rounded, save_tokens
from rlkit.models.chat import decode
from rlkit.system.files import lenient
from rlkit.training.callbacks.conversations import choose
from rlkit.types import Batch, Rollout


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
