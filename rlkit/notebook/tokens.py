"""The log-probs of tokens that are there already, from padded tensors of prompts and replies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlkit.models.log_probs import forward_logprobs
from rlkit.models.packing import pack


def compute_logprobs_for_tokens(
    model: nn.Module,
    prompt_ids: Tensor,
    prompt_mask: Tensor | None,
    generated_ids: Tensor,
    micro_batch_size: int = 8,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """The log-probs [B, T] that a model gives to tokens which are there already, in nats, float32, with gradient.

    Args:
      prompt_ids: [B, P], padded on either side. prompt_mask: [B, P], True on real tokens, at least one a row; None: everywhere.
      generated_ids: [B, T], all of them scored. micro_batch_size: rows at once. temperature: > 0, the one that was sampled with.
    """
    ids, mask = rows_of(prompt_ids, prompt_mask, generated_ids)
    device = next(model.parameters()).device
    found = [
        forward_logprobs(model, pack(part.to(device), sampled.to(device)), temperature=temperature).logprobs[sampled.to(device)]
        for part, sampled in zip(ids.split(micro_batch_size), mask.split(micro_batch_size), strict=True)
    ]
    return torch.cat(found).reshape(generated_ids.shape)


def rows_of(prompt_ids: Tensor, prompt_mask: Tensor | None, generated_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt and reply side by side without the padding between them, and a mask on the reply; so positions count real tokens."""
    real = torch.ones_like(prompt_ids, dtype=torch.bool) if prompt_mask is None else prompt_mask.bool()
    if not real.any(1).all():
        raise ValueError("a row of prompt_mask is empty: the first token of a reply has nothing before it to be predicted from")
    rows = [torch.cat([p[m], g.to(p.device)]) for p, m, g in zip(prompt_ids, real, generated_ids, strict=True)]
    width = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(row, (0, width - len(row))) for row in rows])
    at = torch.arange(width, device=ids.device)
    ends = torch.tensor([len(row) for row in rows], device=ids.device)[:, None]
    return ids, (at < ends) & (at >= ends - generated_ids.shape[1])
