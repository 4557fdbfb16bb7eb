"""Compute the losses of policy and critic on some rows of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import (
    KL,
    Algorithm,
    Critic,
    asks_for,
    call_part,
    hyperparameters,
    list_inputs,
    require_number,
    require_value,
)
from rlkit.types import Minibatch, TokenLogprobs, Weighted, plain


def loss_weights(batch: Weighted, algorithm: Algorithm) -> Minibatch:
    """Add each token's share of the loss to the batch, and keep only the metrics of the
    aggregation. Call this once per optimizer step, on all rows of the step."""
    with torch.no_grad():
        weights, metrics = call_part("aggregation", algorithm.aggregation, batch.quantities)
        return Minibatch(**vars(batch) | {"metrics": metrics}, weights=weights)


def surrogate(
    batch: Minibatch, scores: TokenLogprobs, algorithm: Algorithm, kl: KL
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy's loss on some rows of an update's batch.

    loss = Σ weights · (scale · policy loss + coef · KL - entropy_coef · entropy)

    The loss is a sum over rows, never a mean. Therefore the losses of micro-batches add up to the
    loss of their minibatch.

    Args:
      batch: the rows, with advantages, weights and old log-probs. If the KL is in the loss, the
        batch also has reference log-probs.
      scores: log-probs and entropies of the policy in training.
    Returns: the loss, and detached tensors for the metrics, by name. Most of these tensors hold one
      value per token, [B, T]. A function of the algorithm, for example the policy loss, may also
      return metrics of its own; their names are FUNCTION/NAME.
    """
    mask = batch.response_mask
    given = batch.quantities | {
        name: F.fill_masked(value, mask, 0.0)
        for name, value in scores._asdict().items()
        if value is not None
    }
    if batch.old_share is not None:
        old = F.interpolated_old(scores.logprobs, batch.logprobs_sampler, batch.old_share, mask)
    else:
        old = scores.logprobs.detach() if batch.logprobs_old is None else batch.logprobs_old
    given["logprobs_old"] = F.fill_masked(old, mask, 0.0)
    given["ratio"], measured = call_part("ratio", algorithm.ratio, given)
    loss, of_loss = call_part("policy_loss", algorithm.policy_loss, given)
    terms = (
        {"policy_loss": loss, "ratio": given["ratio"]}
        | measured
        | of_loss
        | find_clipped_tokens(algorithm.policy_loss, given)
    )
    scale = batch.scale
    if batch.old_share is not None:
        factor, corrected = call_part("correction", algorithm.correction, given)
        scale = factor.detach() * scale
        terms |= corrected | {"scale": scale}
    per_token = algorithm.reward_coef * (scale * terms["policy_loss"])
    if kl.active:
        given["logprobs_ref"] = F.fill_masked(
            require_value(batch.logprobs_ref, "logprobs_ref"), mask, 0.0
        )
        if asks_for(kl.estimator, "full_kl"):
            require_value(scores.full_kl, "full_kl")
        terms["kl"], measured = call_part(
            "kl_estimator", require_value(kl.estimator, "estimator"), given
        )
        terms |= measured
    if kl.in_loss:
        weight = (
            F.token_ratio(given["logprobs"], given["logprobs_old"], mask)
            if kl.importance_weight
            else 1.0
        )
        per_token = per_token + require_number(kl.coef) * weight * terms["kl"]
    if algorithm.entropy_coef:
        per_token = per_token - require_number(algorithm.entropy_coef) * given["entropy"]
    loss = (batch.weights * F.fill_masked(per_token, mask, 0.0)).sum()
    return loss, {name: term.detach() for name, term in terms.items()}


def value_surrogate(
    batch: Minibatch, scores: TokenLogprobs, critic: Critic
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the critic's loss on some rows of an update's batch: `coef · Σ weights · value loss`.

    Returns: the loss, with its gradient, and a mapping of detached tensors for the metrics. The
      mapping has the value loss and the value of each token, and the loss function's own metrics.
    """
    mask = batch.response_mask
    given = batch.quantities | {
        "values": F.fill_masked(
            F.full_precision(require_value(scores.values, "values")), mask, 0.0
        ),
        "values_old": F.fill_masked(require_value(batch.values, "values"), mask, 0.0),
        "returns": require_value(batch.returns, "returns"),
    }
    per_token, measured = call_part("value_loss", require_value(critic.loss, "critic.loss"), given)
    loss = critic.coef * (batch.weights * F.fill_masked(per_token, mask, 0.0)).sum()
    return loss, {"value_loss": per_token.detach(), "values": given["values"].detach()} | measured


def find_clipped_tokens(
    loss: Callable[..., Any], quantities: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the masks clip_held and clip_capped of clipped tokens, [B, T] bool. The policy loss
    declares a rule (`rlkit.types.Clip`), and this rule decides which tokens are clipped. Return
    an empty mapping if the loss declares no rule."""
    clip = getattr(plain(loss), "clip", None)
    if clip is None:
        return {}
    numbers = hyperparameters(loss)
    none = torch.zeros_like(quantities["ratio"], dtype=torch.bool)
    rules = {f"clip_{name}": rule for name, rule in clip._asdict().items()}
    with torch.no_grad():
        return {
            name: (
                none
                if rule is None
                else rule(**{n: quantities[n] for n in list_inputs(rule)}, **numbers)
            )
            for name, rule in rules.items()
        }
