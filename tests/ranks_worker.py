"""A rank of tests/distributed/test_ranks.py: trains runs, one after the other, and keeps every
gradient as it is before clipping.

The runs stand in ROOT/runs.json, as a list of (folder, overrides, source); ROOT/FOLDER.status is
their end. A run with a source goes on from the first step of that folder's run.
"""

from __future__ import annotations

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rlkit.config.compose
from rlkit.commands.train import join_ranks, note_start, run_in_folder
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.distributed import ranks
from rlkit.models.load import load_policy
from rlkit.system.identity import read_identity
from rlkit.types import Policy


@functools.wraps(load_policy)
def double(**settings: Any) -> Policy:
    """A policy in float64, where sums in another order differ by nothing that an optimiser could
    make large."""
    policy = load_policy(**settings)
    policy.model.double()
    return policy


def unpacked(**settings: Any) -> Policy:
    """A policy that cannot read packed rows, as one with linear attention."""
    policy = load_policy(**settings)
    policy.model.config._attn_implementation = "sdpa"
    return policy


def draws(rollout) -> float:
    """A reward that draws from every generator that a user's may draw from."""
    return (
        len(rollout.steps[-1].response_ids)
        + random.random()
        + float(np.random.rand())
        + float(torch.rand(()))
    )


def half(response_mask: torch.Tensor) -> torch.Tensor:
    """A token filter that draws: it is computed on the whole batch by every rank."""
    return response_mask & (torch.rand(response_mask.shape) < 0.5)


def bad(
    ratio: torch.Tensor, advantages: torch.Tensor, rollout_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """A policy loss whose gradient at 1 is infinite; the start-up check would refuse it."""
    return (ratio - 1).sqrt() * advantages


def begun(source: Path, target: Path) -> None:
    """A copy of a run that knows its first step alone."""
    shutil.copytree(source, target)
    (target / "checkpoints" / "step_000002.ckpt").unlink()


def main(root: Path) -> None:
    clip = torch.nn.utils.clip_grad_norm_
    seen: list[torch.Tensor] = []

    def keep(parameters, norm):
        parameters = list(parameters)
        flat = [ranks.gather_tensors(p.grad).flatten() for p in parameters if p.grad is not None]
        seen.append(torch.cat(flat) if flat else torch.zeros(0))
        return clip(parameters, norm)

    torch.nn.utils.clip_grad_norm_ = keep
    rlkit.config.compose.dry_run = lambda x: None
    for name, overrides, source in json.loads((root / "runs.json").read_text()):
        composed = compose(overrides)
        x = experiment(composed)
        join_ranks(x.trainer)
        folder = root / name
        if source:
            ranks.broadcast(lambda source=root / source, target=folder: begun(source, target))
        resume = folder / "checkpoints" if source else None
        ranks.broadcast(
            lambda folder=folder, composed=composed: note_start(
                folder, composed, read_identity(folder)
            )
        )
        status = run_in_folder(
            x, composed.config, load_tasks(x), folder, started=0.0, resume=resume
        )
        if ranks.rank() == 0:
            (root / f"{name}.status").write_text(str(status))
            torch.save(seen, root / f"{name}.grads")
        seen.clear()
    ranks.leave()
