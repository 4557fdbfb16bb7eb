"""Score given tokens under a model. This file computes the trainer's log-probs, entropies, values
and divergences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlkit.functional import chunked_log_probs
from rlkit.models.head import Head, split_model
from rlkit.models.packing import Packed, compute_trunk_states
from rlkit.system.sharding import find_sharded_modules
from rlkit.types import TokenLogprobs

CHUNK_LOGITS = 1 << 25  # largest number of logits in memory at once on a GPU: 128 MiB in float32
# The same on a CPU: 31 MiB. If a freed block has more than 32 MiB, the system takes it back and
# fills the next block with zeros, which costs time.
CHUNK_LOGITS_ON_CPU = 31 << 18


def choose_chunk_logits(device: torch.device) -> int:
    """Return the largest number of logits to compute in one chunk of rows."""
    return CHUNK_LOGITS_ON_CPU if device.type == "cpu" else CHUNK_LOGITS


def compute_states(model: nn.Module, packed: Packed) -> Tensor:
    """Return the last hidden states [K, H] from which the K distinct sampled tokens of packed rows
    are predicted."""
    return compute_trunk_states(split_model(model)[0], packed)[packed.parents]


def forward_logprobs(
    model: nn.Module,
    packed: Packed,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    critic: nn.Module | None = None,
    reference: tuple[Tensor, Head] | None = None,
) -> TokenLogprobs:
    """Compute the log-prob and the entropy of every sampled token. On request, also compute its
    value and the exact KL to the reference.

    The trunk makes one pass, without padding and with every shared beginning only once. The head is
    applied in chunks, and only at the positions before a sampled token. Therefore no tensor [B, T,
    V] is ever made.

    Args:
      packed: the rows, from `rlkit.models.packing.pack(ids, response_mask)`, both [B, T].
      temperature: the sampler's temperature, > 0.
      entropy_gradient: True lets the entropy carry the gradient.
      critic: a critic of `rlkit.models.critic`. The result then has `values`.
      reference: a pair of the reference's states and head. The states [K, H] are the result of
        `compute_states` on the same rows, without gradient. The result then has `full_kl`.
    Returns: tensors [B, T] in nats, or in units of reward for values; 0 outside the mask.
    """
    trunk, head = split_model(model)
    hidden = compute_states(model, packed)
    sizes = [
        head.weight.shape[0],
        *([reference[1].weight.shape[0]] if reference is not None else []),
    ]
    logprobs, entropy, *divergence = chunked_log_probs(
        hidden,
        head,
        packed.targets,
        temperature=temperature,
        chunk_size=max(1, choose_chunk_logits(hidden.device) // sum(sizes)),
        entropy_gradient=entropy_gradient,
        # With a frozen head, the gradient is computed in the forward pass. For sharded weights this
        # backward pass would gather and free shards out of turn.
        frozen_head=not find_sharded_modules(trunk)
        and not any(weight.requires_grad for weight in head.module.parameters()),
        reference=reference,
    )
    values = None if critic is None else critic(hidden, packed)

    def placed(tokens: Tensor) -> Tensor:
        mask = packed.response_mask
        return tokens.new_zeros(mask.shape).masked_scatter(mask, tokens[packed.inverse])

    return TokenLogprobs(
        placed(logprobs),
        placed(entropy),
        None if values is None else placed(values),
        placed(divergence[0]) if divergence else None,
    )
