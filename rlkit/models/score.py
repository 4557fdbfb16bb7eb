"""Log-probs of given tokens under a model: the trainer's side of every ratio."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlkit.functional import chunked_log_probs

CHUNK_LOGITS = 1 << 25  # logits held at once: 128 MiB in float32


def trunk_and_head(model: Any) -> tuple[Any, Any]:
    """The transformer and the language-model head of a Hugging Face causal LM, also under PEFT."""
    causal = model.get_base_model() if hasattr(model, "disable_adapter") else model
    return causal.base_model, causal.get_output_embeddings()


def score(
    model: nn.Module, ids: Tensor, response_mask: Tensor, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of every sampled token.

    The head is applied only at the positions that predict a sampled token, in chunks, so [B, T, V] never exists.
    Rows are right-padded: causal attention never looks at padding, so no attention mask is built.

    Args:
      ids: [B, T]. response_mask: [B, T], True on sampled tokens; the first token of a row is never one.
      temperature: > 0, the one that was sampled with.
    Returns: log-probs [B, T] and entropies [B, T] in nats (without gradient unless asked for), 0 outside the mask.
    """
    trunk, head = trunk_and_head(model)
    hidden = trunk(input_ids=ids, use_cache=False).last_hidden_state
    predicted = response_mask[:, 1:]
    chunk = max(1, CHUNK_LOGITS // head.weight.shape[0])
    logprobs, entropy = chunked_log_probs(
        hidden[:, :-1][predicted],
        head,
        ids[:, 1:][predicted],
        temperature=temperature,
        chunk_size=chunk,
        entropy_gradient=entropy_gradient,
    )
    empty = torch.zeros(ids.shape, dtype=logprobs.dtype, device=ids.device)
    return empty.masked_scatter(response_mask, logprobs), empty.masked_scatter(response_mask, entropy)
