"""Compute the metrics of a step. The per-token terms of every micro-batch are collected during the
updates, gathered from all ranks once, and turned into metrics."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import require_number
from rlkit.distributed import ranks
from rlkit.errors import EngineError, PartError
from rlkit.models.packing import Packed
from rlkit.system.waiting import working
from rlkit.training.experiment import Experiment
from rlkit.types import (
    Batch,
    MeasuredEngine,
    Minibatch,
    Rollout,
    TimedEngine,
    TokenLogprobs,
    Weighted,
)

NAN = float("nan")
# names of the terms that are kept separately for the first update
BEFORE = ("ratio", "logprobs", "logprobs_sampler", "logprobs_ref", "versions", "owners")


class UpdateTerms:
    """Collect the per-token terms of all micro-batches of an RL step, such as ratios and log-probs.
    Each term becomes one flat tensor over the trained tokens."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[Tensor]] = defaultdict(list)
        self.loss = 0.0
        self.norms: dict[str, list[float]] = {"policy": [], "critic": []}
        self.rates = {"policy": NAN, "critic": NAN}
        # terms of the first update only; until then the policy has not moved
        self.first: dict[str, Tensor] = {}
        self.reference: dict[str, float] = {}  # metrics returned by the reference's update
        self.skipped = {"no_signal": 0, "nonfinite": 0, "target_kl": 0}
        # read: tokens of all rows. packed: computed tokens, where shared tokens count once. padded:
        # packed tokens plus padding
        self.read = self.packed = self.padded = 0

    def add(
        self,
        batch: Minibatch,
        loss: Tensor,
        scores: TokenLogprobs,
        parts: dict[str, Tensor],
        packed: Packed,
    ) -> None:
        """Add the terms of one micro-batch.

        Args:
          loss: the policy's loss on the micro-batch.
        """
        self._count(loss, packed)
        on_policy = batch.logprobs_old is None and batch.old_share is None
        terms = {
            **parts,
            "logprobs": scores.logprobs,
            "logprobs_old": scores.logprobs if on_policy else batch.logprobs_old,
            "entropy": scores.entropy,
            "advantages": batch.advantages,
            "logprobs_sampler": batch.logprobs_sampler,
            "logprobs_ref": batch.logprobs_ref,
            "returns": batch.returns,
            "versions": batch.versions,
            "owners": batch.rollout_ids[:, None].expand(batch.response_mask.shape),
            **batch.metrics,
        }
        for name, term in terms.items():
            if term is not None:
                self.tokens[name].append(pick_counted(term.detach(), batch).float())

    def add_stream(self, name: str, tokens: Tensor, loss: Tensor, packed: Packed) -> None:
        """Add the per-token loss [M] of a stream in one micro-batch, and this micro-batch's part of
        the stream's loss."""
        self._count(loss, packed)
        self.tokens[f"streams/{name}"].append(tokens.float())

    def _count(self, loss: Tensor, packed: Packed) -> None:
        self.loss += float(loss.detach())
        self.read += packed.tokens
        self.packed += len(packed.ids)
        padded = sum(path.queries.numel() for path in packed.paths)
        self.padded += padded if packed.segments is None else len(packed.ids)

    def stepped(self, who: str, norm: float, lr: float) -> None:
        """Record an optimizer step of the policy or the critic. If the norm is not finite, count
        the step as skipped.

        Args:
          who: policy or critic.
          norm: norm of the gradient before clipping.
          lr: the learning rate.
        """
        if not self.first:  # on a rank without tokens, an empty ratio marks that this was done
            self.first = {
                name: torch.cat(self.tokens[name]) for name in BEFORE if self.tokens[name]
            } or {"ratio": torch.zeros(0)}
        self.rates[who] = lr
        if math.isfinite(norm):
            self.norms[who].append(norm)
        else:
            self.skip("nonfinite")

    def remember(self) -> dict[str, Any]:
        """Return everything added so far, for `go_back`."""
        tokens = {name: list(values) for name, values in self.tokens.items()}
        return vars(self) | {"tokens": defaultdict(list, tokens)}

    def go_back(self, taken: dict[str, Any]) -> None:
        """Remove everything added since `remember` was called.

        Args:
          taken: the value of `remember`.
        """
        vars(self).update(taken)

    def gather(self) -> None:
        """Add the terms of all other ranks in one exchange, so that every metric covers the whole
        batch. Call this once, after the last update."""
        if ranks.size() == 1:
            return
        own = {name: torch.cat(parts).cpu() for name, parts in self.tokens.items() if parts}
        first = {name: values.cpu() for name, values in self.first.items()}
        parts = ranks.gather(lambda: (own, self.loss, first, (self.read, self.packed, self.padded)))
        names = dict.fromkeys(name for tokens, *_ in parts for name in tokens)
        for name in names:
            self.tokens[name] = [tokens[name] for tokens, *_ in parts if name in tokens]
        self.loss = math.fsum(loss for _, loss, *_ in parts)
        self.read, self.packed, self.padded = (
            sum(sizes) for sizes in zip(*(part[3] for part in parts), strict=True)
        )
        firsts = [part[2] for part in parts]
        self.first = {
            name: torch.cat([one[name] for one in firsts if name in one])
            for name in BEFORE
            if any(name in one for one in firsts)
        }

    def skip(self, why: str) -> None:
        """Count a skipped optimizer step under its reason."""
        self.skipped[why] += 1

    def get(self, name: str) -> Tensor | None:
        """Return a term for all trained tokens, [M], or None if no micro-batch has this term."""
        return torch.cat(self.tokens[name]) if self.tokens.get(name) else None

    def mean(self, name: str) -> float:
        """Return the mean of a term over the trained tokens. Return nan if no micro-batch has this
        term."""
        values = self.get(name)
        return NAN if values is None or not len(values) else float(values.mean())


def update_metrics(batch: Weighted, terms: UpdateTerms, experiment: Experiment) -> dict[str, float]:
    """Return the metrics of a step's updates. The keys are the same for every algorithm. A metric
    is nan if this step does not compute its quantity.

    loss/*            summed loss, and its policy term
    policy/entropy    nats per sampled token in the updates, or before them if all were skipped
    ratio/*           policy over old policy. first_mean must be 1, because the first minibatch is
                      on-policy; it is nan unless algorithm.old=trainer
    clip/*            share of tokens whose gradient the loss's own clip removes: low_frac with a
                      ratio below 1, high_frac with a ratio above. positive_frac and negative_frac
                      split the same tokens by the sign of the advantage. capped_frac is the share
                      of tokens with a bounded weight that keep their gradient. All are nan if a
                      loss declares no rule (`rlkit.types.clips`). These metrics show the effect of
                      the step's own updates, and not the age of the samples, because the ratio is
                      relative to the trainer's pass before the updates (unless algorithm.old names
                      another policy)
    kl/ref, ref_k3    KL to the reference, by k1 and k3, nats per token, for the policy before the
                      step's updates
    kl/old            KL(before the step‖now), measured before each optimizer step, mean over the
                      step's updates. The effect of the last update is therefore not measured, and
                      kl/old is 0 with one update per step. nan if algorithm.old needs no pass
                      before the updates
    kl/step           KL(before the step‖after its last update), on some rollouts of the step
    kl/start          KL(the start of the run‖after the last update), on rollouts of the first step.
                      kl/step and kl/start are computed by k3, in nats per token
                      (rlkit.training.update.drift)
    kl/estimate       mean of the estimator named by `kl`. kl/nonzero_frac: share of tokens with an
                      estimate other than 0
    mismatch/*        trainer against sampler on the same tokens, before any correction. ess, chi2
                      and out_of_bounds_frac describe the weights of the tokens: the share of
                      effective samples, the chi-square 1 / ess - 1, and the share of weights
                      outside 1/2 … 2. ess_sequence and chi2_sequence describe the weights of the
                      rollouts (`effective_sample_size`)
    adv/*             advantages of trained tokens
    scale/*           factor on the policy loss (off-policy correction × token filter): its mean,
                      and the share of tokens with a factor of 0
    value/*           the critic: loss, mean value, mean return, and 1 - Var(return - value) /
                      Var(return) before the update
    optim/*           gradient norms before clipping, learning rates, updates taken and skipped,
                      updates ended by target_kl
    streams/NAME      per-token loss of a stream other than the reward's, over the stream's own
                      tokens: a divergence, or -log π, in nats
    PART/NAME         mean of a metric returned by a function of PARTS (rlkit.algorithm). A metric
                      per token is averaged over the trained tokens of all updates. A metric per
                      rollout is averaged over the rollouts with a trained token. Entries of nan do
                      not count. Metrics of the group filter and the overlong rule cover all
                      rollouts of the step, with refills the accepted ones

    Raises: PartError if a function of the algorithm returns a metric with a name that rlkit uses
    itself.
    """
    values = {
        "loss/total": terms.loss,
        "loss/policy": terms.mean("policy_loss"),
        "policy/entropy": _entropy(batch, terms),
        "policy/entropy_coef": require_number(experiment.algorithm.entropy_coef),
        **_ratios(batch, terms),
        **_divergences(batch, terms, experiment),
        **_advantages(batch),
        **_scale(batch, terms),
        **_critic(batch, terms),
        **_optimizer(terms),
    }
    return _join_metrics(values, _measure_parts(batch, terms), "a part gave a metric")


def _join_metrics(row: Mapping[str, Any], others: Mapping[str, float], said: str) -> dict[str, Any]:
    taken = row.keys() & others.keys()
    if taken:
        raise PartError(f"{said} {min(taken)}, a metric of rlkit; give it another name")
    return {**row, **others}


def pick_counted(value: Tensor, batch: Batch) -> Tensor:
    """Return the entries of a term or a metric that count in its mean, [M]. These entries belong to
    trained tokens, or to rollouts with a trained token. A single number counts once for each
    trained token.

    Therefore the sums and counts of micro-batches add up to the sum and count of their batch, for
    every way of splitting the batch.
    """
    mask = batch.response_mask
    if value.dim() == 0:
        return value.expand(int(mask.sum()))
    return value[mask] if value.dim() == 2 else value[batch.rollout_ids[mask.any(1)].unique()]


def convert_to_number(name: str, value: Any) -> float:
    """Convert a metric to a number. The metric may be a number, or a tensor or array with one
    entry. For any other value, raise PartError with the name of the metric."""
    if isinstance(value, int | float):
        return value
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise PartError(
            f"the metric {name!r} is {type(value).__name__}, not a number; give one number per name"
        ) from None


def with_own(row: Mapping[str, Any], logged: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Add the metrics of callbacks to a step's row. Callbacks may write numbers and texts into the
    row. They may also log values on any rank, and the row then gets the mean over the values of all
    ranks.

    Raises: PartError for any other value, and for a logged name that is already in the row.
    """
    every: dict[str, list[float]] = {}
    for own in ranks.gather(lambda: dict(logged)):
        for name, values in own.items():
            every.setdefault(name, []).extend(values)
    plain = {
        name: v if v is None or isinstance(v, str | int | float) else convert_to_number(name, v)
        for name, v in row.items()
    }
    means = {name: sum(values) / len(values) for name, values in every.items()}
    return _join_metrics(plain, means, "a callback logged")


def _measure_parts(batch: Weighted, terms: UpdateTerms) -> dict[str, float]:
    # the group filter and the overlong rule see all sampled rollouts, before any rollout is left
    # out
    sampled = ("group_filter", "overlong")
    found = {
        n: pick_counted(v, batch.whole() if n.startswith(sampled) else batch)
        for n, v in batch.metrics.items()
    }
    found |= {
        name: torch.cat(values) for name, values in terms.tokens.items() if "/" in name and values
    }
    means = {name: float(v[~v.isnan()].cpu().double().mean()) for name, v in found.items()}
    return means | terms.reference


def _ratios(batch: Weighted, terms: UpdateTerms) -> dict[str, float]:
    clip = (
        "clip/low_frac",
        "clip/high_frac",
        "clip/positive_frac",
        "clip/negative_frac",
        "clip/capped_frac",
    )
    out = dict.fromkeys(("ratio/mean", "ratio/var", "ratio/max", "ratio/first_mean", *clip), NAN)
    ratio = terms.get("ratio")
    advantages = terms.get("advantages")
    if ratio is None or advantages is None:
        return out
    mask = torch.ones_like(ratio, dtype=torch.bool)
    out["ratio/mean"], out["ratio/var"], out["ratio/max"] = map(
        float, F.ratio_statistics(ratio, mask)
    )
    if "ratio" in terms.first and batch.old_share is None:
        out["ratio/first_mean"] = float(terms.first["ratio"].mean())
    held = terms.get("clip_held")
    capped = terms.get("clip_capped")
    if held is not None and capped is not None:
        sides = (
            held * (ratio < 1),
            held * (ratio > 1),
            held * (advantages > 0),
            held * (advantages < 0),
            capped,
        )
        out |= {name: float(side.mean()) for name, side in zip(clip, sides, strict=True)}
    return out


def _divergences(batch: Weighted, terms: UpdateTerms, experiment: Experiment) -> dict[str, float]:
    names = (
        "kl/ref",
        "kl/ref_k3",
        "kl/old",
        "mismatch/kl",
        "mismatch/logp_abs_mean",
        "mismatch/logp_abs_max",
        "mismatch/ratio_max",
        "mismatch/out_of_bounds_frac",
        "mismatch/ess",
        "mismatch/chi2",
        "mismatch/ess_sequence",
        "mismatch/chi2_sequence",
        "mismatch/pearson",
        "kl/nonzero_frac",
    )
    out = dict.fromkeys(names, NAN)
    out["kl/coef"] = require_number(experiment.kl.coef)
    out["kl/estimate"] = terms.mean("kl")
    estimates = terms.get("kl")
    if estimates is not None:
        out["kl/nonzero_frac"] = float((estimates != 0).float().mean())
    logprobs = terms.get("logprobs")
    before = terms.get("logprobs_old")
    if logprobs is not None and before is not None:
        out["kl/old"] = float(
            F.approximate_kl(logprobs, before, torch.ones_like(logprobs, dtype=torch.bool))
        )
    old, sampler, reference = (
        _before(batch, terms, f"logprobs_{who}") for who in ("old", "sampler", "ref")
    )
    if old is None or sampler is None or not len(old):
        return out
    if reference is not None:
        out["kl/ref"] = float(F.k1(old, reference).mean())
        out["kl/ref_k3"] = float(F.k3(old, reference).mean())
    return out | _mismatch(old, sampler, _owners(batch, terms))


def _entropy(batch: Weighted, terms: UpdateTerms) -> float:
    """Return the mean entropy of the tokens in the updates. If every update was skipped, return the
    mean entropy of the tokens in the pass before the updates."""
    if terms.tokens.get("entropy") or batch.entropy_old is None or not batch.response_mask.any():
        return terms.mean("entropy")
    return float(batch.entropy_old[batch.response_mask].float().mean())


def _owners(batch: Weighted, terms: UpdateTerms) -> Tensor | None:
    """Return the rollout number of each trained token."""
    if batch.logprobs_old is None:
        return terms.first.get("owners")
    return batch.rollout_ids[:, None].expand(batch.ids.shape)[batch.response_mask]


def _mismatch(old: Tensor, sampler: Tensor, owners: Tensor | None) -> dict[str, float]:
    """Compute the metrics mismatch/* on some tokens [M], at least one."""
    mask = torch.ones_like(old, dtype=torch.bool)
    gap = (old - sampler).abs()
    ratio = (old - sampler).clamp(-20, 20).exp()
    share = F.effective_sample_size(old, sampler, mask)
    of_rollouts = F.effective_sample_size(old, sampler, mask, owners)
    values = {
        "kl": F.approximate_kl(old, sampler, mask),
        "logp_abs_mean": gap.mean(),
        "logp_abs_max": gap.max(),
        "ratio_max": ratio.max(),
        "out_of_bounds_frac": ((ratio > 2) | (ratio < 0.5)).float().mean(),
        "ess": share,
        "chi2": 1 / share - 1,
        "ess_sequence": of_rollouts,
        "chi2_sequence": 1 / of_rollouts - 1,
        "pearson": F.correlation(old.exp(), sampler.exp(), mask),
    }
    return {f"mismatch/{name}": float(value) for name, value in values.items()}


def staleness_metrics(
    batch: Weighted, terms: UpdateTerms, *, step: int, updates: Mapping[int, int]
) -> dict[str, float]:
    """Measure how far the sampling weights were behind the trained weights. All metrics are over
    trained tokens, before any off-policy correction.

    staleness/steps_mean, _max     RL steps behind (difference of versions)
    staleness/updates_mean         steps of the policy's optimizer behind
    staleness/kl                   KL(sampler‖before the update), k3, nats per token: the joint
                                   effect of old weights and of the engine
    staleness/ess_seq, chi2_seq    effective share and chi-square of the rollouts' weights
                                   (`effective_sample_size`)
    staleness/chi2_token           chi-square of the tokens' weights
    staleness/out_of_bounds_frac   share of tokens with a weight outside 1/2 … 2
    mismatch/*                     here only over tokens of age 0, sampled by the same weights that
                                   this step trains; nan without such tokens

    Args:
      step: RL steps done before this one.
      updates: version → steps of the policy's optimizer up to this version.
    """
    names = (
        "steps_mean",
        "steps_max",
        "updates_mean",
        "kl",
        "ess_seq",
        "chi2_token",
        "chi2_seq",
        "out_of_bounds_frac",
    )
    out = dict.fromkeys((f"staleness/{name}" for name in names), NAN)
    old, sampler, versions = (
        _before(batch, terms, name) for name in ("logprobs_old", "logprobs_sampler", "versions")
    )
    if old is None or sampler is None or versions is None or not len(old):
        return out
    age = step - versions
    owners = _owners(batch, terms)
    first = min(updates.values())
    behind = [
        updates.get(step, first) - updates.get(int(version), first) for version in versions.tolist()
    ]
    every = _mismatch(old, sampler, owners)
    shares = (
        every[f"mismatch/{name}"]
        for name in ("kl", "ess_sequence", "chi2", "chi2_sequence", "out_of_bounds_frac")
    )
    values = (float(age.mean()), float(age.max()), sum(behind) / len(behind), *shares)
    out |= dict(zip((f"staleness/{name}" for name in names), values, strict=True))
    fresh = age == 0
    if not fresh.any():
        return out | dict.fromkeys(every, NAN)
    return out | _mismatch(old[fresh], sampler[fresh], None if owners is None else owners[fresh])


def _before(batch: Weighted, terms: UpdateTerms, name: str) -> Tensor | None:
    """Return a quantity of the trained tokens from before the update, such as log-probs. If there
    was a pass before the update, the quantity covers the whole batch, and otherwise the first
    minibatch."""
    if batch.logprobs_old is None:
        return terms.first.get("logprobs" if name == "logprobs_old" else name)
    values = getattr(batch, name)
    return None if values is None else values[batch.response_mask].float()


def _advantages(batch: Weighted) -> dict[str, float]:
    values = batch.advantages[batch.response_mask].float()
    names = ("adv/mean", "adv/std", "adv/min", "adv/max", "adv/abs_mean", "adv/positive_frac")
    if not len(values):
        return dict.fromkeys(names, NAN)
    spread = (
        values.mean(),
        values.std(correction=0),
        values.min(),
        values.max(),
        values.abs().mean(),
        (values > 0).float().mean(),
    )
    return dict(zip(names, map(float, spread), strict=True))


def _scale(batch: Weighted, terms: UpdateTerms) -> dict[str, float]:
    measured = terms.get("scale")  # measured in every update if the scale changes with the policy
    values = batch.scale[batch.response_mask].float() if measured is None else measured
    return {
        "scale/mean": float(values.mean()),
        "scale/zero_frac": float((values == 0).float().mean()),
    }


def _critic(batch: Weighted, terms: UpdateTerms) -> dict[str, float]:
    explained = NAN
    if batch.values is not None and batch.returns is not None:
        mask = batch.response_mask
        explained = float(F.explained_variance(batch.values, batch.returns, mask))
    return {
        "value/loss": terms.mean("value_loss"),
        "value/mean": terms.mean("values"),
        "value/return_mean": terms.mean("returns"),
        "value/explained_variance": explained,
    }


def _optimizer(terms: UpdateTerms) -> dict[str, float]:
    out: dict[str, float] = {}
    for who, prefix in (("policy", "optim/"), ("critic", "optim/critic_")):
        norms = terms.norms[who]
        mean = sum(norms) / len(norms) if norms else NAN
        out |= {
            f"{prefix}grad_norm": mean,
            f"{prefix}lr": terms.rates[who],
            f"{prefix}updates": len(norms),
        }
    names = {
        "nonfinite": "skipped_nonfinite",
        "no_signal": "skipped_no_signal",
        "target_kl": "ended_by_target_kl",
    }
    return out | {f"optim/{name}": terms.skipped[why] for why, name in names.items()}


class Clock:
    """Measure the seconds of a step and of its named parts: generate, environment, reward, update
    and model. The seconds of "model" are also contained in the other parts: they are the time in
    which the engine samples or the model computes (see `performance`).

    Args:
      between: seconds since the end of the previous step, without evaluations. Callbacks log and
        save in this time.
    """

    def __init__(self, between: float = 0.0) -> None:
        self.started = time.perf_counter()
        self.between = between
        self.ended: float | None = None
        self.current = ""  # name of the innermost part in progress
        self.sessions: list[float] = []  # seconds that each episode spent in its session
        self.engine: dict[str, float] = {}  # metrics of the engine after its last sampling
        # seconds in which decoding stood still, because it waited for an answer of a session
        self.late = 0.0
        self.worked = 0.0  # processor seconds of this process in the update
        parts = ("generate", "environment", "reward", "update", "model")
        self.parts = dict.fromkeys(parts, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the seconds of a block, including its work on the device, and add these seconds
        to the part `name`."""
        begun = time.perf_counter()
        outer = self.current
        self.current = name
        worked = time.process_time()
        with working() if name == "update" else nullcontext():
            yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if name == "update":
            self.worked += time.process_time() - worked
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - begun
        self.current = outer

    @contextmanager
    def measure_sampling(self, engine: Any) -> Iterator[None]:
        """Measure the seconds of a block that collects episodes. Time in which the engine is busy
        counts as "model". All other time (sessions, tools, templates) counts as "environment"."""
        begun = time.perf_counter()
        before = _figures(engine)
        with self.part("generate"):
            yield
        self.engine = _figures(engine)
        worked = self.engine["busy_s"] - before["busy_s"]
        self.late += self.engine["late_s"] - before["late_s"]
        self.parts["model"] += worked
        self.parts["environment"] += time.perf_counter() - begun - worked

    def end(self) -> None:
        """End the step."""
        self.ended = time.perf_counter()

    def make_following(self, *, evaluated: float) -> Clock:
        """Return the clock of the next step.

        Args:
          evaluated: seconds of evaluations since the end of this step.
        """
        return Clock(
            0.0 if self.ended is None else max(0.0, time.perf_counter() - self.ended - evaluated)
        )

    def total(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self.started


ELSEWHERE = ("busy_s", "late_s", "captured_shapes")  # metrics of the engine shown under perf/


def _figures(engine: Any) -> dict[str, float]:
    """Return the metrics of an engine, always with `busy_s` and `late_s`. Raise EngineError if a
    metric is not a number."""
    figures = {"late_s": 0.0, "busy_s": engine.busy_s if isinstance(engine, TimedEngine) else 0.0}
    given = engine.metrics() if isinstance(engine, MeasuredEngine) else {}
    try:
        math.fsum(dict(given).values())
    except (TypeError, ValueError):
        raise EngineError(
            f"metrics() of generation.engine ({type(engine).__name__}) gave {given!r:.200}; give a"
            " dict of name → number"
        ) from None
    return figures | given


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in GiB: on CUDA the peak of the device, otherwise the peak of this
    process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def performance(
    batch: Weighted, terms: UpdateTerms, clock: Clock, *, tokens: int, device: torch.device
) -> dict[str, float]:
    """Return metrics about the wall-clock time of a step, and about the tokens that packing saves
    in its updates. Ignore perf/* when you check whether two runs are identical.

    `perf/outside_model_frac = 1 - model / (step + time since the step before)`, in [0, 1]. "model"
    is the time of the engine's work, the passes over given tokens, the backward passes and the
    optimizers. The engine's work lasts from the call of the decoder until the host has the
    completions. This work consists of forward passes, sampling tokens and managing slots. On a GPU,
    or in a fused step, these three cannot be timed separately. All other time counts as outside the
    model: the service around the engine, environment, tools, templates and tokenizer, rewards,
    assembly of batches, advantages, metrics, callbacks, loggers and the training loop.

    Args:
      tokens: number of tokens in all batches of the run so far.
    """
    seconds = clock.total()
    return {
        "tokens/total": tokens,
        "tokens/sampled": int(batch.sampled_mask.sum()),
        "perf/padding_frac": 1 - terms.packed / terms.padded if terms.padded else NAN,
        "perf/shared_frac": 1 - terms.packed / terms.read if terms.read else NAN,
        "perf/step_s": seconds,
        "perf/tokens_per_s": int(batch.attention_mask.sum()) / seconds,
        "perf/outside_model_frac": 1 - clock.parts["model"] / (seconds + clock.between),
        "perf/between_s": clock.between,
        **{f"perf/{name}_s": value for name, value in clock.parts.items()},
        "perf/session_s_mean": sum(clock.sessions) / len(clock.sessions) if clock.sessions else NAN,
        "perf/session_s_max": max(clock.sessions, default=NAN),
        "perf/late_s": clock.late,
        "perf/captured_shapes": clock.engine.get("captured_shapes", NAN),
        # on a GPU, or with several ranks, this process also waits for the device or other processes
        "perf/update_processor_s": (
            clock.worked if device.type == "cpu" and ranks.size() == 1 else NAN
        ),
        "perf/peak_mem_gb": peak_memory(device),
        **{
            f"engine/{name}": value for name, value in clock.engine.items() if name not in ELSEWHERE
        },
    }


def refill_metrics(sampled: Sequence[Rollout], batch: Batch) -> dict[str, float]:
    """Return three metrics. batch/rollouts is the number of rollouts with trained tokens.
    group/sampled is the number of prompts in the step. group/acceptance_rate is the share of these
    prompts with such rollouts."""
    groups = len({r.group for r in sampled})
    trained = batch.rollout_ids[batch.response_mask.any(1)].unique()
    return {
        "batch/rollouts": len(trained),
        "group/sampled": groups,
        "group/acceptance_rate": len(batch.group_ids[trained].unique()) / groups,
    }
