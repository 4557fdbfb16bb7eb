"""Check whether an engine samples with the versions of the weights that it claims
(`Step.versions`).

`Cached` and `Transformers` are not checked: they read tensors of their own process. Every
other engine gets copies of the weights. In every step the trainer's forward pass reads one rollout
in 128 again, and at least one rollout. The trainer reads this rollout with the weights of the
claimed version, of the previous version and of the next version.

    noise     mean over a row's tokens of min(|engine - claimed|, |engine - other|)
    telling   tokens with |other - claimed| > 16 noise
    digits    after each row: `digits ← max(0, digits) + log10(4) · there - log10(7/4) · here`

engine, claimed and other are log-probs of the same tokens. A telling token has clearly different
log-probs under the two versions. `there` is the number of telling tokens with an engine log-prob
nearer to `other` than to `claimed`. `here` is the number of telling tokens with an engine log-prob
nearer to `claimed`.

Suppose that the engine is honest and its rounding is symmetric. Then the mean rounding is at most
twice the noise. Therefore the log-prob of a telling token lies nearer to `other` with a probability
of at most 1/8. Markov's inequality gives this bound: the probability of a rounding this large is at
most 1/4, and half of these roundings go towards `other`. 4 and 4/7 are then the likelihood ratios
of 1/2 against 1/8. Therefore n rows of an honest engine reach 6 digits with a probability of at
most n · 1e-6. An engine with another version reaches 6 digits after 10 telling tokens if all of
them lie nearer to the other version. If only half of these tokens lie nearer to the other version,
the engine reaches 6 digits after 34 telling tokens. The same sum with `here` and `there` exchanged
proves the claimed version. If neither version is proved, the two versions differ by less than the
engine rounds.

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
    """Count the tokens that speak for the claimed version of the weights, and the tokens that speak
    for another version.

    A token counts only if it is telling, that is, if the log-probs of the two versions differ by
    more than TELLING times the noise. A telling token speaks for the version with the log-prob
    nearer to the engine's log-prob.

    Args:
      engine, claimed, other: [M] log-probs of the same tokens in nats, computed by the engine, with
        the claimed version, and with the other version.
    """
    to_claimed = (engine - claimed).abs()
    to_other = (engine - other).abs()
    telling = (other - claimed).abs() > TELLING * torch.minimum(to_claimed, to_other).mean()
    here = telling & (to_claimed < to_other)
    return int(here.sum()), int(telling.sum() - here.sum())


def add_row(digits: float, tokens: int, against: int) -> float:
    """Return the digits of a proof after one more row: `max(0, digits) + log10(4) · tokens -
    log10(7/4) · against`.

    Args:
      digits: the digits of the proof before the row.
      tokens: number of the row's telling tokens that speak for the proved version.
      against: number of the row's telling tokens that speak for the other version.
    """
    return max(0.0, digits) + math.log10(4) * tokens - math.log10(7 / 4) * against


def has_copies(engine: Any) -> bool:
    """Return whether an engine samples with copies of the trainer's weights."""
    return not isinstance(engine, Cached | Transformers)


def keeps_versions(model: nn.Module) -> bool:
    """Return whether the weights of earlier versions are kept. This is so if the trained weights
    take at most LARGEST bytes and are not sharded."""
    return sum(p.nbytes for p in list_trained(model)) <= LARGEST and not find_sharded_modules(model)


def unchecked_line(engine: Any, model: nn.Module, *, shards: bool) -> str:
    """Return a line for the run's output if the check of this file covers only the newest version
    of the weights in the engine. Return an empty string otherwise."""
    if not has_copies(engine) or (keeps_versions(model) and not shards):
        return ""
    return (
        "versions: only the engine's newest version is checked (by mismatch/logp_abs_mean), because"
        " the weights of earlier versions are not kept"
    )


class Claims:
    """Keep the trained weights of the latest versions, and the evidence for or against the versions
    claimed by the engine."""

    def __init__(self) -> None:
        self.kept: dict[int, list[Tensor]] = {}  # version → weights, on the CPU
        # Digits that prove the claimed version, and digits that prove another version. Both are nan
        # until two versions have been compared.
        self.right = NAN
        self.wrong = NAN

    def check(self, u: Update) -> dict[str, float]:
        """Keep a copy of the weights before the updates of a step. Then compare the log-probs of a
        few of the step's rollouts with the log-probs of the kept versions. Return metrics for the
        step's row, or an empty mapping if the engine is not checked."""
        x = u.x
        if not has_copies(x.generation.engine) or not keeps_versions(u.model):
            return {}
        now = [p.detach().to("cpu", copy=True) for p in list_trained(u.model)]
        self.kept[u.step] = now
        self.kept.pop(u.step - x.asynchrony.staleness - 2, None)
        rollouts = [r for r in u.trained if r.response_length]
        if rollouts and x.algorithm.episodes is None:
            try:
                self._compare(
                    u, u.assemble_batch(rollouts[u.step % min(EVERY, len(rollouts)) :: EVERY])
                )
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
