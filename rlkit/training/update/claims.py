"""Whether an engine samples with the versions of the weights that it claims (`Step.versions`).

`Cached` and `Transformers` read the trainer's own tensors and have nothing to claim. Any other
engine is given copies. In every step the trainer's own forward reads one rollout in 128 again, at
least one: with the weights of its version, and with those of the versions before and after it.

    noise     mean over a row's tokens of min(|engine - claimed|, |engine - other|)
    telling   tokens with |other - claimed| > 16 noise
    digits    after each row: max(0, digits) + log10(4) · there - log10(7/4) · here

engine, claimed and other are log-probs; `there` and `here` count the telling tokens that lie nearer
to `other` and to `claimed`. If the engine is honest and its rounding is symmetric, the mean
rounding is at most twice the noise. So a telling token lies nearer to `other` with a probability of
at most 1/8: by Markov's inequality 1/4 that its rounding is large enough, half of it in that
direction. 4 and 4/7 are then the likelihood ratios of 1/2 against 1/8, and n rows of an honest
engine reach 6 digits with a probability of at most n · 1e-6. They need 10 telling tokens of another
version, or 34 of which half are. The same sum with `here` and `there` exchanged proves the claimed
version. If neither is proved, two versions differ by less than the engine rounds.

Source: Page 1954, "Continuous inspection schemes", of likelihood ratios.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlkit.engines import Cached, Transformers
from rlkit.system.sharding import find_sharded_modules
from rlkit.training.metrics import NAN
from rlkit.training.update.record import Update
from rlkit.training.update.scored import compute_batch_logprobs
from rlkit.types import Batch

EVERY = 128  # of so many rollouts one is read again
TELLING = 16  # times the noise
LARGEST = 1 << 30  # bytes of the trained weights of one version that are kept


def count_telling(engine: Tensor, claimed: Tensor, other: Tensor) -> tuple[int, int]:
    """Count the telling tokens nearer to the claimed version, and those nearer to the other.

    Args:
      engine, claimed, other: [M] log-probs of the same tokens in nats.
    """
    to_claimed = (engine - claimed).abs()
    to_other = (engine - other).abs()
    telling = (other - claimed).abs() > TELLING * torch.minimum(to_claimed, to_other).mean()
    here = telling & (to_claimed < to_other)
    return int(here.sum()), int(telling.sum() - here.sum())


def add_row(digits: float, tokens: int, against: int) -> float:
    """The digits of a proof after a row with tokens for it and against it."""
    return max(0.0, digits) + math.log10(4) * tokens - math.log10(7 / 4) * against


def has_copies(engine: Any) -> bool:
    """Whether an engine samples with copies of the trainer's weights."""
    return not isinstance(engine, Cached | Transformers)


def keeps_versions(model: nn.Module) -> bool:
    """Whether the weights of earlier versions are kept: those in training are few, and whole."""
    return sum(p.nbytes for p in list_trained(model)) <= LARGEST and not find_sharded_modules(model)


def unchecked_line(engine: Any, model: nn.Module, *, shards: bool) -> str:
    """A line on an engine of whose versions only the newest is checked; empty for all others."""
    if not has_copies(engine) or (keeps_versions(model) and not shards):
        return ""
    return (
        "versions: only the newest one of the engine is checked, by mismatch/logp_abs_mean, since"
        " the weights of earlier ones are not kept"
    )


class Claims:
    """The trained weights of the last versions, and what is proved of the engine so far."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}  # version → weights, on the CPU
        self.right = NAN  # digits of proof, see above; nan before two versions were compared
        self.wrong = NAN

    def check(self, u: Update) -> dict[str, float]:
        """Keep the weights before the updates of a step, and compare a few of its rollouts with
        the kept ones; figures for its row, none of an engine that is not checked."""
        x = u.x
        if not has_copies(x.generation.engine) or not keeps_versions(u.model):
            return {}
        now = [p.detach().to("cpu", copy=True) for p in list_trained(u.model)]
        self.kept[u.step] = now
        self.kept.pop(u.step - x.asynchrony.staleness - 2, None)
        rollouts = [r for r in u.trained if r.response_length]
        if rollouts and x.algorithm.episodes is None:
            try:
                self._compare(u, u.assemble_batch(rollouts[u.step % len(rollouts) :: EVERY]))
            finally:
                put(u.model, now)
        return {"mismatch/version_right": self.right, "mismatch/version_wrong": self.wrong}

    def _compare(self, u: Update, batch: Batch) -> None:
        version = int(batch.versions[batch.sampled_mask][0])
        near = {version - 1, version, version + 1} & self.kept.keys()
        if version not in near or len(near) == 1:
            return
        read = {}
        for own in near:
            put(u.model, self.kept[own])
            read[own] = compute_batch_logprobs(u, u.model, batch).logprobs
        for other in near - {version}:
            for row, mask in enumerate(batch.sampled_mask & (batch.versions == version)):
                given = batch.logprobs_sampler, read[version], read[other]
                here, there = count_telling(*(logprobs[row][mask] for logprobs in given))
                self.right = add_row(self.right, here, there)
                self.wrong = add_row(self.wrong, there, here)


def list_trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters in training."""
    return [p for p in model.parameters() if p.requires_grad]


def put(model: nn.Module, weights: list[Tensor]) -> None:
    """Write weights into the parameters in training."""
    for p, weight in zip(list_trained(model), weights, strict=True):
        p.data.copy_(weight)
