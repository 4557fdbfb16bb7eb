"""Check whether an engine samples with the versions of the weights that it claims
(`Step.versions`).

`Cached` and `Transformers` read the trainer's own tensors, so there is nothing to check. Every
other engine gets copies of the weights. In every step the trainer's forward pass reads one rollout
in 128 again, and at least one. It reads the rollout with the weights of the claimed version, and
with the previous and the next version.

    noise     mean over a row's tokens of min(|engine - claimed|, |engine - other|)
    telling   tokens with |other - claimed| > 16 noise
    digits    after each row: digits ← max(0, digits) + log10(4) · there - log10(7/4) · here

engine, claimed and other are log-probs. `there` counts the telling tokens nearer to `other`, and
`here` the telling tokens nearer to `claimed`.

Suppose that the engine is honest and its rounding is symmetric. Then the mean rounding is at most
twice the noise. So a telling token lies nearer to `other` with a probability of at most 1/8.
Markov's inequality gives this bound: the probability of a rounding this large is at most 1/4, and
half of these roundings go towards `other`. 4 and 4/7 are then the likelihood ratios of 1/2 against
1/8. So n rows of an honest engine reach 6 digits with a probability of at most n · 1e-6. An engine
with another version reaches 6 digits after 10 telling tokens if all of them lie nearer to the other
version. If only half of them do, it reaches 6 digits after 34 telling tokens. The same sum with
`here` and `there` exchanged proves the claimed version. If neither version is proved, the two
versions differ by less than the engine rounds.

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
TELLING = 16  # a telling token's two log-probs differ by more than this many times the noise
LARGEST = 1 << 30  # versions are kept if one version's trained weights take at most this many bytes


def count_telling(engine: Tensor, claimed: Tensor, other: Tensor) -> tuple[int, int]:
    """Count the telling tokens nearer to the claimed version, and the telling tokens nearer to the
    other version.

    Args:
      engine, claimed, other: [M] log-probs of the same tokens in nats.
    """
    to_claimed = (engine - claimed).abs()
    to_other = (engine - other).abs()
    telling = (other - claimed).abs() > TELLING * torch.minimum(to_claimed, to_other).mean()
    here = telling & (to_claimed < to_other)
    return int(here.sum()), int(telling.sum() - here.sum())


def add_row(digits: float, tokens: int, against: int) -> float:
    """Return the digits of a proof after one more row.

    Args:
      digits: the digits of the proof before the row.
      tokens: number of the row's telling tokens that support the proof.
      against: number of the row's telling tokens that contradict it.
    """
    return max(0.0, digits) + math.log10(4) * tokens - math.log10(7 / 4) * against


def has_copies(engine: Any) -> bool:
    """Return whether an engine samples with copies of the trainer's weights."""
    return not isinstance(engine, Cached | Transformers)


def keeps_versions(model: nn.Module) -> bool:
    """Return whether the weights of earlier versions are kept. They are kept if the trained weights
    take at most LARGEST bytes and are not sharded."""
    return sum(p.nbytes for p in list_trained(model)) <= LARGEST and not find_sharded_modules(model)


def unchecked_line(engine: Any, model: nn.Module, *, shards: bool) -> str:
    """Return a line for the user if only the engine's newest version can be checked, and otherwise
    an empty string."""
    if not has_copies(engine) or (keeps_versions(model) and not shards):
        return ""
    return (
        "versions: only the engine's newest version is checked (by mismatch/logp_abs_mean), because"
        " the weights of earlier versions are not kept"
    )


class Claims:
    """The trained weights of the latest versions, and what the tokens so far prove about the
    engine."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}  # version → weights, on the CPU
        # Digits that prove the claimed version, and digits that prove another version. Both are nan
        # until two versions have been compared.
        self.right = NAN
        self.wrong = NAN

    def check(self, u: Update) -> dict[str, float]:
        """Keep a copy of the weights before the updates of a step, and compare a few of its
        rollouts with the kept versions. Return figures for the step's row, or an empty mapping if
        the engine is not checked."""
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
    """List the model's trainable parameters."""
    return [p for p in model.parameters() if p.requires_grad]


def put(model: nn.Module, weights: list[Tensor]) -> None:
    """Write weights into the model's trainable parameters."""
    for p, weight in zip(list_trained(model), weights, strict=True):
        p.data.copy_(weight)
