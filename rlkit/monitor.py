"""What an update did, in numbers: the terms of every micro-batch gathered once, and the metrics made of them."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkit.functional import approximate_kl, clip_fractions, correlation, effective_sample_size, k1, k3, ratio_statistics
from rlkit.settings import Experiment
from rlkit.types import Batch

NAN = float("nan")


class UpdateTerms:
    """Per-token terms of all micro-batches of an RL step, masked tokens only, on one line each."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[Tensor]] = defaultdict(list)
        self.loss, self.norms, self.lr = 0.0, [], NAN  # type: ignore[var-annotated]
        self.first_ratio: Tensor | None = None
        self.skipped = {"no_signal": 0, "nonfinite": 0}

    def add(self, batch: Batch, loss: Tensor, logprobs: Tensor, entropy: Tensor, parts: dict[str, Tensor]) -> None:
        """The terms of one micro-batch."""
        old = logprobs if batch.logprobs_old is None else batch.logprobs_old
        terms = parts | {"logprobs": logprobs, "logprobs_old": old, "entropy": entropy, "advantages": batch.advantages}
        terms |= {"logprobs_sampler": batch.logprobs_sampler, "logprobs_ref": batch.logprobs_ref}
        for name, term in terms.items():
            if term is not None:
                self.tokens[name].append(term.detach()[batch.response_mask].float())
        self.loss += float(loss.detach())

    def stepped(self, norm: float, lr: float) -> None:
        """An optimiser step was taken."""
        if self.first_ratio is None and self.tokens["ratio"]:
            self.first_ratio = torch.cat(self.tokens["ratio"])
        self.norms.append(norm)
        self.lr = lr

    def skip(self, why: str) -> None:
        """An optimiser step was not taken."""
        self.skipped[why] += 1

    def get(self, name: str) -> Tensor | None:
        """One term over all tokens, [M], or None where nothing has it."""
        return torch.cat(self.tokens[name]) if self.tokens.get(name) else None

    def mean(self, name: str) -> float:
        """Token mean of a term; nan where there is none."""
        values = self.get(name)
        return NAN if values is None or not len(values) else float(values.mean())


def update_metrics(batch: Batch, terms: UpdateTerms, experiment: Experiment) -> dict[str, float]:
    """A fixed set of keys for every algorithm; nan where a quantity does not exist in this step.

    loss/*            summed loss, policy term
    policy/entropy    nats per sampled token
    ratio/*           policy over old policy; first_mean must be 1 (the first minibatch is on-policy)
    clip/*            share of tokens beyond each bound and held by the clip
    kl/ref, ref_k3    to the reference, k1 and k3, nats per token; kl/old: moved within the step
    mismatch/*        trainer against sampler on the same tokens
    adv/*             advantages of trained tokens
    optim/*           gradient norm before clipping, learning rate, updates taken and skipped
    """
    values = {"loss/total": terms.loss, "loss/policy": terms.mean("policy_loss"), "policy/entropy": terms.mean("entropy")}
    return values | _ratios(terms, experiment) | _divergences(terms, experiment) | _advantages(batch) | _optimizer(terms)


def _ratios(terms: UpdateTerms, experiment: Experiment) -> dict[str, float]:
    out = dict.fromkeys(("ratio/mean", "ratio/var", "ratio/max", "ratio/first_mean", "clip/low_frac", "clip/high_frac"), NAN)
    ratio, advantages = terms.get("ratio"), terms.get("advantages")
    if ratio is None or advantages is None:
        return out
    mask = torch.ones_like(ratio, dtype=torch.bool)
    out["ratio/mean"], out["ratio/var"], out["ratio/max"] = map(float, ratio_statistics(ratio, mask))
    if terms.first_ratio is not None:
        out["ratio/first_mean"] = float(terms.first_ratio.mean())
    bounds = hyperparameters(experiment.algorithm.policy_loss)
    if {"clip_low", "clip_high"} <= bounds.keys():
        low, high = clip_fractions(ratio, advantages, mask, clip_low=bounds["clip_low"], clip_high=bounds["clip_high"])
        out["clip/low_frac"], out["clip/high_frac"] = float(low), float(high)
    return out


def _divergences(terms: UpdateTerms, experiment: Experiment) -> dict[str, float]:
    names = ("kl/ref", "kl/ref_k3", "kl/old", "mismatch/kl", "mismatch/logp_abs_mean", "mismatch/logp_abs_max")
    out = dict.fromkeys((*names, "mismatch/ratio_max", "mismatch/ess", "mismatch/pearson"), NAN)
    out["kl/coef"] = experiment.kl.coef
    logprobs, old, sampler = terms.get("logprobs"), terms.get("logprobs_old"), terms.get("logprobs_sampler")
    if logprobs is None or old is None or sampler is None:
        return out
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    reference = terms.get("logprobs_ref")
    if reference is not None:
        out["kl/ref"], out["kl/ref_k3"] = float(k1(old, reference).mean()), float(k3(old, reference).mean())
    out["kl/old"] = float(approximate_kl(logprobs, old, mask))
    gap = (old - sampler).abs()
    out["mismatch/kl"] = float(approximate_kl(old, sampler, mask))
    out["mismatch/logp_abs_mean"], out["mismatch/logp_abs_max"] = float(gap.mean()), float(gap.max())
    out["mismatch/ratio_max"] = float((old - sampler).clamp(-20, 20).exp().max())
    out["mismatch/ess"] = float(effective_sample_size(old, sampler, mask))
    out["mismatch/pearson"] = float(correlation(old.exp(), sampler.exp(), mask))
    return out


def _advantages(batch: Batch) -> dict[str, float]:
    assert batch.advantages is not None
    values = batch.advantages[batch.response_mask].float()
    if not len(values):
        return dict.fromkeys(("adv/mean", "adv/std", "adv/min", "adv/max", "adv/abs_mean", "adv/positive_frac"), NAN)
    return {
        "adv/mean": float(values.mean()),
        "adv/std": float(values.std(correction=0)),
        "adv/min": float(values.min()),
        "adv/max": float(values.max()),
        "adv/abs_mean": float(values.abs().mean()),
        "adv/positive_frac": float((values > 0).float().mean()),
    }


def _optimizer(terms: UpdateTerms) -> dict[str, float]:
    return {
        "optim/grad_norm": sum(terms.norms) / len(terms.norms) if terms.norms else NAN,
        "optim/lr": terms.lr,
        "optim/updates": len(terms.norms),
        "optim/skipped_nonfinite": terms.skipped["nonfinite"],
        "optim/skipped_no_signal": terms.skipped["no_signal"],
    }


def hyperparameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters of a part and their values."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
