"""How tensors of a notebook meet."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import rlkit.functional as F
from rlkit.algorithm import micro_batches, select
from rlkit.models import forward_logprobs, pack
from rlkit.types import Batch, TokenLogprobs


@torch.no_grad()
def score_batch(
    model: nn.Module, batch: Batch, temperature: float, micro_batch_tokens: int = 16384, critic: nn.Module | None = None
) -> TokenLogprobs:
    """Log-probs, entropies and values [B, T] of a batch, one micro-batch at a time."""
    zeros = torch.zeros_like(batch.logprobs_sampler)
    out = TokenLogprobs(zeros, zeros.clone(), None if critic is None else zeros.clone())
    for rows in micro_batches(batch, micro_batch_tokens):
        part = select(batch, rows)
        scores = forward_logprobs(model, pack(part.ids, part.response_mask), temperature=temperature, critic=critic)
        for kept, found in zip(out, scores, strict=True):
            if kept is not None and found is not None:
                kept[rows, : part.ids.shape[1]] = found.to(kept.dtype)
    return out


def same_shape(**tensors: Tensor) -> None:
    if len({t.shape for t in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ValueError(f"shapes differ: {shapes}; nothing is broadcast")


def mask_like(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    same_shape(values=values, mask=mask)
    return mask.to(values.device).bool()


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    return F.rollout_mean(values, mask, torch.arange(len(mask), device=mask.device))[:, 0]


def per_token_of(advantages: Tensor, like: Tensor) -> Tensor:
    """[B] or [B, T] → [B, T] on the device of `like`, a constant."""
    advantages = advantages.detach().to(like.device)
    if advantages.shape == like.shape[:1]:
        advantages = advantages[:, None].expand(like.shape)
    same_shape(advantages=advantages, tokens=like)
    return advantages


def mean_of_tokens(per_token: Tensor, mask: Tensor) -> Tensor:
    """The mean over all tokens that count; 0 with a gradient where there is none."""
    return (F.token_mean(mask) * F.fill_masked(per_token, mask, 0.0)).sum()


def required(value: Tensor | None) -> Tensor:
    assert value is not None
    return value
