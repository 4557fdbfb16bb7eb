"""Compute the KL with any kl_fn, and make and update a reference model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import call, list_inputs
from rlkit.extras.notebook.data import Hook
from rlkit.training import references as reference
from rlkit.types import QUANTITIES, Reference, unpacked

KLHook = Callable[..., Tensor]
UpdateHook = Callable[..., None]


def compute_kl(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    valid_mask: Tensor | None = None,
    kl_fn: Any = F.forward,
) -> Tensor:
    """Compute the divergence of each sequence from the reference [B], in nats. It is the result of
    a kl_fn, or the mean of an estimator of the core.

    policy_logprobs carries the gradient, and ref_logprobs is a constant. Both are [B, T] on tokens
    sampled by the policy, or [T] for one sequence.
    """
    mask = torch.ones_like(policy_logprobs) if valid_mask is None else valid_mask
    width = policy_logprobs.shape[-1]
    mask = mask.bool().to(policy_logprobs.device).reshape(-1, width)
    policy = F.fill_masked(policy_logprobs.reshape(-1, width), mask, 0.0)
    ref = F.fill_masked(ref_logprobs.detach().to(policy.device).reshape(-1, width), mask, 0.0)
    if is_estimator(kl_fn):
        found = call(
            kl_fn,
            {
                "logprobs": policy,
                "logprobs_ref": ref,
                "logprobs_old": policy.detach(),
                "response_mask": mask,
            },
        )
        return F.rollout_mean(found, mask, torch.arange(len(mask), device=mask.device))[:, 0]
    kl = kl_fn(policy, ref, mask.to(policy.dtype))
    if kl.shape != policy.shape[:1]:
        raise ValueError(
            f"kl_fn gave shape {tuple(kl.shape)}; it must be [B] = {tuple(policy.shape[:1])}"
        )
    return kl


def is_estimator(kl_fn: Callable[..., Any]) -> bool:
    """Return whether a function is an estimator of the core: it asks for quantities only."""
    asked = list_inputs(kl_fn)
    return "logprobs" in asked and set(asked) <= set(QUANTITIES)


def compute_forward_kl(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    valid_mask: Tensor | None = None,
    kl_fn: Hook = None,
) -> Tensor:
    """Estimate KL(policy ‖ reference) of each sequence [B], as the mean of log π - log ref. The
    estimate can be negative. Its gradient is the gradient of the divergence."""
    return compute_kl(policy_logprobs, ref_logprobs, valid_mask, kl_fn or F.forward)


def compute_reverse_kl(
    policy_logprobs: Tensor,
    ref_logprobs: Tensor,
    valid_mask: Tensor | None = None,
    kl_fn: Hook = None,
) -> Tensor:
    """Estimate KL(reference ‖ policy) of each sequence [B], with the importance weights ref / π."""
    return compute_kl(policy_logprobs, ref_logprobs, valid_mask, kl_fn or F.reverse)


def create_truncated_kl(threshold: float = 1.0) -> KLHook:
    """Return a kl_fn: the mean of k3 with log-ratios clamped to ±threshold (in nats, 0 < threshold
    ≤ 20). It is never negative."""
    return partial(compute_kl, kl_fn=partial(F.truncated, threshold=threshold))


truncated_kl = create_truncated_kl()


def create_adaptive_kl(confidence_threshold: float = 0.1) -> KLHook:
    """Return a kl_fn: the mean over all tokens of k3, counted as 0 on tokens with a policy
    probability up to the threshold (in [0, 1))."""
    return partial(compute_kl, kl_fn=partial(F.confident, probability=confidence_threshold))


def create_reference_model(policy_model: torch.nn.Module, ref_model_fn: Hook = None) -> Any:
    """Return a copy of the current policy without gradient, in evaluation mode, or the result of
    ref_model_fn."""
    return (
        ref_model_fn(policy_model)
        if ref_model_fn
        else copy.deepcopy(policy_model).requires_grad_(False).eval()
    )


def update_reference_model(
    ref_model: torch.nn.Module,
    policy_model: torch.nn.Module,
    update_fn: UpdateHook,
    **progress: Any,
) -> None:
    """Update the reference model. An update_fn receives the entries of `progress` that it has
    parameters for: step, and kl or kl_value (nats per token)."""
    taken = inspect.signature(update_fn).parameters
    given = progress | ({"kl_value": progress["kl"]} if "kl" in progress else {})
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    update_fn(
        ref_model,
        policy_model,
        **{name: value for name, value in given.items() if every or name in taken},
    )


def lift_update(kept: Reference) -> UpdateHook:
    """Turn a moving reference of the core into an update_fn. If no step is passed to it, it counts
    its calls instead."""
    states: WeakKeyDictionary[torch.nn.Module, tuple[int, reference.Moving]] = WeakKeyDictionary()

    def update_fn(
        ref_model: torch.nn.Module, policy_model: torch.nn.Module, **progress: Any
    ) -> None:
        calls, state = states.get(ref_model) or (0, reference.track(ref_model)._replace(model=None))
        states[ref_model] = (
            calls + 1,
            unpacked(kept.update(state, policy_model, **({"step": calls + 1} | progress)))[0],
        )

    return update_fn


def create_ema_updater(decay: float = 0.999) -> UpdateHook:
    """Return an update_fn for a moving average of the policy. Each update computes
    `reference ← decay · reference + (1 - decay) · policy` in float32."""
    return lift_update(reference.ema(decay=decay))


def create_periodic_updater(update_every: int) -> UpdateHook:
    """Return an update_fn that copies the policy at every multiple of `update_every` steps, or of
    its calls if no step is passed."""
    return lift_update(reference.periodic(every=update_every))


def create_kl_updater(threshold: float = 0.5) -> UpdateHook:
    """Return an update_fn that copies the policy when the KL added up since the last copy exceeds
    `threshold` nats per token."""
    return lift_update(reference.on_kl(threshold=threshold))
