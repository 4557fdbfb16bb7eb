"""KL and references: every kl_fn, and how a reference model is made and moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import call
from rlkit.notebook.configs import accepted, asks_for
from rlkit.notebook.tensors import mask_like, row_mean, same_shape
from rlkit.training import references as reference
from rlkit.types import Reference, unpacked

KLHook = Callable[..., Tensor]
UpdateHook = Callable[..., None]


def compute_kl(
    policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None, kl_fn: Callable[..., Tensor] = F.forward
) -> Tensor:
    """The divergence of each sequence from the reference [B], in nats, by any estimate.

    Args:
      policy_logprobs: [B, T] in nats, of tokens that the policy sampled, carries the gradient; [T] is one sequence.
      ref_logprobs: the same shape, a constant. mask: True where a token counts; anything may lie under it, nan and inf included.
      kl_fn: (policy_logprobs, ref_logprobs, mask) → [B], or an estimator of the core, whose mean is taken over each sequence.
    Raises: ValueError where shapes differ or kl_fn does not give [B].

    >>> compute_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -9.0]]), torch.tensor([[True, False]]))
    tensor([0.5000])
    """
    same_shape(policy_logprobs=policy_logprobs, ref_logprobs=ref_logprobs)
    mask = mask_like(policy_logprobs, mask)
    if policy_logprobs.dim() == 1:
        policy_logprobs, ref_logprobs, mask = policy_logprobs[None], ref_logprobs[None], mask[None]
    policy = F.fill_masked(policy_logprobs, mask, 0.0)
    ref = F.fill_masked(ref_logprobs.detach().to(policy.device), mask, 0.0)
    if asks_for(kl_fn, "logprobs"):
        given = {"logprobs": policy, "logprobs_ref": ref, "logprobs_old": policy.detach(), "response_mask": mask}
        return row_mean(call(kl_fn, given), mask)
    kl = kl_fn(policy, ref, mask)
    if kl.shape != policy.shape[:1]:
        raise ValueError(f"kl_fn gave shape {tuple(kl.shape)}; it must be [B] = {tuple(policy.shape[:1])}")
    return kl


def compute_forward_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """A kl_fn: the mean of log π - log ref, an estimate of KL(π‖ref), of either sign.

    Its gradient is that of the divergence (the core's `forward` at ratio 1); the gradient of the bare mean is 0 on average.
    """
    return compute_kl(policy_logprobs, ref_logprobs, mask, F.forward)


def compute_reverse_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """A kl_fn: an estimate of KL(ref‖π) by the importance weights ref / π; not the negated forward one."""
    return compute_kl(policy_logprobs, ref_logprobs, mask, F.reverse)


def create_truncated_kl(threshold: float = 1.0) -> KLHook:
    """A kl_fn: the mean of k3 with log-ratios clamped to ±threshold (nats, 0 < threshold ≤ 20), so never negative."""
    return partial(compute_kl, kl_fn=partial(F.truncated, threshold=threshold))


def truncated_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """A kl_fn: `create_truncated_kl()`, at a threshold of 1 nat.

    >>> compute_kl(torch.tensor([[-1.0]]), torch.tensor([[-9.0]]), kl_fn=truncated_kl)
    tensor([0.3679])
    """
    return create_truncated_kl()(policy_logprobs, ref_logprobs, mask)


def create_adaptive_kl(probability: float = 0.1) -> KLHook:
    """A kl_fn: k3 on tokens that the policy gives more than `probability` (in [0, 1)), 0 on others (`confident_share`); the mean of all."""
    return partial(compute_kl, kl_fn=partial(F.confident, probability=probability))


def confident_share(policy_logprobs: Tensor, mask: Tensor | None = None, probability: float = 0.1) -> Tensor:
    """Which share of each sequence's tokens `create_adaptive_kl(probability)` looks at [B], in 0 … 1; 0 for one without tokens.

    >>> confident_share(torch.tensor([[-1.0, -3.0]]))
    tensor([0.5000])
    """
    mask = mask_like(policy_logprobs, mask)
    return row_mean(F.full_precision(policy_logprobs.detach()).exp() > probability, mask)


def compute_kl_divergence(old_logprobs: Tensor, new_logprobs: Tensor, mask: Tensor | None = None) -> Tensor:
    """How far an update has moved the policy: k3 estimate of KL(old‖new) on the old policy's tokens [B, T], a scalar ≥ 0 in nats.

    >>> compute_kl_divergence(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor(0.1065)
    """
    same_shape(old_logprobs=old_logprobs, new_logprobs=new_logprobs)
    return F.approximate_kl(new_logprobs, old_logprobs.to(new_logprobs.device), mask_like(new_logprobs, mask))


def create_reference_model(policy_model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the policy as it is now, without gradient, in evaluation mode. Under LoRA the base is copied too."""
    return copy.deepcopy(policy_model).requires_grad_(False).eval()


def update_reference_model(
    ref_model: torch.nn.Module, policy_model: torch.nn.Module, update_fn: UpdateHook | None = None, **progress: Any
) -> None:
    """Moves the reference: by `update_fn`, or without one to a copy of the policy, parameters and buffers by name.

    Of `progress`, such as step (RL steps done) and kl (nats per token, of the last step), an update_fn gets what its signature takes.
    """
    if update_fn is None:
        reference.follow(reference.track(ref_model), policy_model)
    else:
        update_fn(ref_model, policy_model, **accepted(update_fn, progress))


def lift_update(kept: Reference) -> UpdateHook:
    """A reference of the core that moves, as a ref update_fn: (ref_model, policy_model, **progress) → None.

    What is averaged is kept in float32 beside a narrower reference. Without a step in the progress, calls are counted.
    """
    states: WeakKeyDictionary[torch.nn.Module, tuple[int, reference.Moving]] = WeakKeyDictionary()

    def update_fn(ref_model: torch.nn.Module, policy_model: torch.nn.Module, **progress: Any) -> None:
        calls, state = states.get(ref_model) or (0, reference.track(ref_model)._replace(model=None))
        states[ref_model] = calls + 1, unpacked(kept.update(state, policy_model, **({"step": calls + 1} | progress)))[0]

    return update_fn


def create_ema_updater(decay: float = 0.999) -> UpdateHook:
    """A ref update_fn: reference ← decay · reference + (1 - decay) · policy. Averaged in float32, so that a bfloat16 reference moves."""
    return lift_update(reference.ema(decay=decay))


def create_periodic_updater(update_every: int = 20) -> UpdateHook:
    """A ref update_fn: a copy of the policy at every multiple of `update_every` steps (or calls, where no step is passed)."""
    return lift_update(reference.periodic(every=update_every))


def create_kl_updater(threshold: float = 0.5, measure: Literal["accumulated", "distance"] = "accumulated") -> UpdateHook:
    """A ref update_fn: a copy of the policy once the KL since the last copy adds up to more than `threshold` nats per token.

    With measure=distance, once the KL of one call does (`rlkit.training.references.on_kl`). A call without kl raises TypeError.
    """
    return lift_update(reference.on_kl(threshold=threshold, measure=measure))
