"""Whether an engine samples with the versions of the weights that it claims (`Step.versions`).

`Cached` and `Transformers` read the trainer's own tensors and have nothing to claim. Any other
engine is given copies. In every step the trainer's own forward reads one rollout in 128 again (at
least one) with the weights of its version, and with the previous and the next version.

    noise     mean over a row's tokens of min(|engine - claimed|, |engine - other|)
    telling   tokens with |other - claimed| > 16 noise
    digits    after each row: digits ← max(0, digits) + log10(4) · there - log10(7/4) · here

engine, claimed and other are log-probs; `there` and `here` count the telling tokens nearer to
`other` and to `claimed`. If the engine is honest and its rounding is symmetric, the mean rounding
is at most twice the noise. So a telling token lies nearer to `other` with a probability of at most
1/8: Markov's inequality bounds the probability of a rounding this large by 1/4, and half of these
roundings go towards `other`. 4 and 4/7 are then the likelihood ratios of 1/2 against 1/8, and n
rows of an honest engine reach 6 digits with a probability of at most n · 1e-6. An engine with
another version reaches 6 digits after 10 telling tokens if all of them lie nearer to that version,
or after 34 if half of them do. The same sum with `here` and `there` exchanged proves the claimed
version. If neither is proved, two versions differ by less than the engine rounds.

Source: Page 1954, "Continuous inspection schemes", applied to likelihood ratios.
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

EVERY = 128  # one of this many rollouts is read again
TELLING = 16  # times the noise
LARGEST = 1 << 30  # versions are kept if the trained weights of one have at most this many bytes


def count_telling(engine: Tensor, claimed: Tensor, other: Tensor) -> tuple[int, int]:
    """Count the telling tokens nearer to the claimed version, and the telling tokens nearer to the
    other.

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
    """Whether the weights of earlier versions are kept. They are if the trained weights take at
    most LARGEST bytes and are not sharded."""
    return sum(p.nbytes for p in list_trained(model)) <= LARGEST and not find_sharded_modules(model)


def unchecked_line(engine: Any, model: nn.Module, *, shards: bool) -> str:
    """A line for an engine if only its newest version is checked; else empty."""
    if not has_copies(engine) or (keeps_versions(model) and not shards):
        return ""
    return (
        "versions: only the engine's newest version is checked (by mismatch/logp_abs_mean), because"
        " the weights of earlier versions are not kept"
    )


class Claims:
    """The trained weights of the last versions, and the proofs about the engine so far."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}  # version → weights, on the CPU
        self.right = NAN  # digits of proof, see above; nan before two versions were compared
        self.wrong = NAN

    def check(self, u: Update) -> dict[str, float]:
        """Keep the weights before the updates of a step, and compare a few of its rollouts with the
        kept weights. Return figures for the step's row; empty for an engine that is not checked."""
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
