"""Where the parts of an algorithm meet: a batch becomes advantages, weights and one loss.

A part is a plain function; its positional parameters are quantities of `rlkit.types.QUANTITIES`, given by name. So a user's own
loss asks for what it needs in its signature, and nothing here changes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from rlkit.functional import fill_masked
from rlkit.types import AdvantageFn, AggregationFn, Batch, GroupFilterFn, KLFn, PolicyLossFn

PER_ROLLOUT = ("rewards", "group_ids", "lengths")  # quantities [N]; all others have a row dimension


class Algorithm(NamedTuple):
    """A named set of functions; complete alone."""

    name: str
    advantage: AdvantageFn
    ratio: Callable[..., Tensor]
    policy_loss: PolicyLossFn
    aggregation: AggregationFn
    group_filter: GroupFilterFn
    epochs: int = 1
    minibatches: int = 1


class KL(NamedTuple):
    """The penalty that keeps the policy near the reference. `coef` 0 or no estimator means none, and no reference pass."""

    name: str
    estimator: KLFn | None = None
    placement: Literal["loss"] = "loss"
    coef: float = 0.0

    @property
    def active(self) -> bool:
        """True where the reference has to be scored."""
        return self.estimator is not None and self.coef > 0


@functools.lru_cache(maxsize=256)
def inputs(function: Callable[..., Any]) -> tuple[str, ...]:
    """The quantities that a part asks for: its parameters that can be positional and have no default."""
    return tuple(
        p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
    )


def call(function: Callable[..., Any], quantities: Mapping[str, Any]) -> Any:
    """Calls a part with the quantities that its signature names."""
    return function(**{name: quantities[name] for name in inputs(function)})


def quantities(batch: Batch) -> dict[str, Any]:
    """What the parts may ask for, before the policy is evaluated."""
    return {name: value for name, value in batch._asdict().items() if value is not None}


def estimate_advantages(batch: Batch, algorithm: Algorithm) -> Batch:
    """The batch with advantages [B, T], zero outside the response mask and for rollouts that the group filter drops.

    Computed once over the whole update batch, without gradient, from raw rewards: a KL penalty never enters here.
    Raises: ValueError where the advantage has neither shape [N] nor [B, T].
    """
    with torch.no_grad():
        given = quantities(batch)
        advantages = call(algorithm.advantage, given)
        kept = call(algorithm.group_filter, given)
        if advantages.shape == batch.rewards.shape:
            advantages = advantages[batch.rollout_ids][:, None].expand_as(batch.ids)
        if advantages.shape != batch.ids.shape:
            raise ValueError(
                f"algorithm.advantage gave shape {tuple(advantages.shape)}; it must be [N] = {tuple(batch.rewards.shape)} "
                f"or [B, T] = {tuple(batch.ids.shape)}"
            )
        trained = batch.response_mask & kept[batch.rollout_ids][:, None]
        return batch._replace(advantages=fill_masked(advantages, trained, 0.0), response_mask=trained)


def weigh(batch: Batch, algorithm: Algorithm) -> Batch:
    """The batch with each token's share of the loss. Called once per optimiser step, on all of its rows."""
    with torch.no_grad():
        return batch._replace(weights=call(algorithm.aggregation, quantities(batch)))


def surrogate(batch: Batch, logprobs: Tensor, entropy: Tensor, algorithm: Algorithm, kl: KL) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of some rows of an update batch: Σ weights · (policy loss + coef · KL). Sums over rows, never means.

    Args:
      batch: with advantages, weights, old log-probs and, where `kl` is active, reference log-probs.
      logprobs, entropy: [B, T] of the policy being trained.
    Returns: the loss, and the per-token terms [B, T] that the metrics are made of (detached).
    """
    mask = batch.response_mask
    given = quantities(batch) | {"logprobs": fill_masked(logprobs, mask, 0.0), "entropy": fill_masked(entropy, mask, 0.0)}
    given["logprobs_old"] = fill_masked(logprobs.detach() if batch.logprobs_old is None else batch.logprobs_old, mask, 0.0)
    given["ratio"] = call(algorithm.ratio, given)
    per_token = call(algorithm.policy_loss, given)
    terms = {"policy_loss": per_token, "ratio": given["ratio"]}
    if kl.active:
        given["logprobs_ref"] = fill_masked(_required(batch.logprobs_ref, "logprobs_ref"), mask, 0.0)
        terms["kl"] = call(_required(kl.estimator, "estimator"), given)
        per_token = per_token + kl.coef * terms["kl"]
    loss = (_required(batch.weights, "weights") * fill_masked(per_token, mask, 0.0)).sum()
    return loss, {name: term.detach() for name, term in terms.items()}


def _required(value: Any, name: str) -> Any:
    if value is None:
        raise ValueError(f"surrogate: the batch has no {name}; prepare it before the update")
    return value


def select(batch: Batch, rows: Tensor) -> Batch:
    """Some rows of a batch, cut to their longest. Per-rollout quantities [N] stay whole."""
    width = int(batch.attention_mask[rows].sum(1).max())
    per_row = {
        name: value[rows][:, :width] if value.dim() == 2 else value[rows]
        for name, value in batch._asdict().items()
        if value is not None and name not in PER_ROLLOUT
    }
    return batch._replace(**per_row)


def minibatches(batch: Batch, algorithm: Algorithm, seed: int) -> Iterator[Batch]:
    """Every update's batch: `epochs` passes over all rollouts, each split at random into `minibatches` parts of whole rollouts."""
    if algorithm.minibatches == 1:
        for _ in range(algorithm.epochs):
            yield weigh(batch, algorithm)
        return
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    for _ in range(algorithm.epochs):
        order = torch.randperm(len(batch.rewards), generator=generator)
        for part in order.tensor_split(algorithm.minibatches):
            rows = torch.isin(batch.rollout_ids.cpu(), part).nonzero()[:, 0].to(batch.ids.device)
            if len(rows):  # none where every rollout of the part ended before its first reply
                yield weigh(select(batch, rows), algorithm)


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[Tensor]:
    """Row numbers, longest rollouts first, as many at a time as fit into `max_tokens` padded tokens.

    Rows of one rollout stay together, since a ratio or a mean of a sequence is one of all its tokens; so a portion is always
    at least one rollout, also where its rows alone exceed `max_tokens`. A rollout is as long as its longest row.
    Rows without a trained token are left out: they add nothing to any sum.
    """
    lengths, trained = batch.attention_mask.sum(1).tolist(), batch.response_mask.any(1).tolist()
    owners = batch.rollout_ids.tolist()
    rollouts: dict[int, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if trained[row]:
            rollouts.setdefault(owners[row], []).append(row)
    portion: list[int] = []
    for rows in rollouts.values():
        if portion and (len(portion) + len(rows)) * lengths[portion[0]] > max_tokens:
            yield torch.tensor(portion, device=batch.ids.device)
            portion = []
        portion = portion + rows
    if portion:
        yield torch.tensor(portion, device=batch.ids.device)
