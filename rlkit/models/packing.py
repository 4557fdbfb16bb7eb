"""Rows packed without padding, every distinct beginning once: what the update and every scoring pass put through the trunk.

The samples of one prompt begin alike, so rows are laid out as the forest of their prefixes. Each distinct prefix is one packed token:
linear layers see every one once, attention looks up the path to it. Causal states depend on the prefix alone, so this changes no
log-prob and no gradient; equal replies cost one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

ATTENTION = "rlkit_packed"
MASK_ENTRIES = 1 << 24  # of one attention mask; rows beyond it are attended to in further calls


class Paths(NamedTuple):
    """Rows of nearly one size: what each adds to the forest, and the path that it attends to."""

    queries: Tensor  # [R, Q] packed tokens that these rows add; padding is token 0
    keys: Tensor  # [R, L] packed tokens from the first of the row to its last; padding is token 0
    starts: Tensor | None  # [R] position of the first query; None: all of them 0


class Packed(NamedTuple):
    """Rows as packed tokens, one for each distinct prefix that something is predicted from."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, in its row
    paths: tuple[Paths, ...]
    home: Tensor  # [N] int64, where each token is among the queries of all paths, flattened
    parents: Tensor  # [K] int64, the packed token from which each distinct sampled token is predicted
    targets: Tensor  # [K] int64, the ids of those sampled tokens
    inverse: Tensor  # [M] int64, which of the K a sampled token of the rows is, in the order of the response mask
    response_mask: Tensor  # [B, T] bool, of the rows
    tokens: int  # of the rows before packing


def pack(ids: Tensor, response_mask: Tensor) -> Packed:
    """The forest of the prefixes of some rows, each cut before its last sampled token, from which nothing is predicted.

    Args:
      ids: [B, T], right-padded. response_mask: [B, T], True on sampled tokens; the first token of a row is never one.
    Returns: N ≤ Σ row lengths, K ≤ M = response_mask.sum(); rows without a sampled token are not in it.
    Raises: ValueError where a row begins with a sampled token, from which no state comes.
    """
    rows, mask = ids.cpu().numpy(), response_mask.cpu().numpy()
    if mask[:, :1].any():
        raise ValueError(f"row {int(mask[:, 0].argmax())} begins with a sampled token; a prompt must stand before it")
    lengths = np.where(mask, np.arange(mask.shape[1]), 0).max(1, initial=0)
    index = np.zeros(rows.shape, dtype=np.int64)  # row, position → packed token
    # Sorted, a row shares with the one before it all that it shares with any.
    order = sorted(np.flatnonzero(lengths).tolist(), key=lambda row: rows[row, : lengths[row]].astype(">i8").tobytes())
    added: dict[tuple[int, int, bool], list[tuple[int, int]]] = defaultdict(list)
    tokens, depths, size, before = [], [], 0, -1
    for row in order:
        length, shared = lengths[row], 0
        if before >= 0:
            both = min(length, lengths[before])
            differs = rows[row, :both] != rows[before, :both]
            shared = int(differs.argmax()) if differs.any() else int(both)
            index[row, :shared] = index[before, :shared]
        before, new = row, int(length) - shared
        if not new:
            continue
        index[row, shared:length] = np.arange(size, size + new)
        tokens.append(rows[row, shared:length])
        depths.append(np.arange(shared, length))
        size += new
        added[size_class(new), size_class(int(length)), shared > 0].append((row, shared))

    def tensor(values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=ids.device)

    paths, home, offset = [], np.zeros(size, dtype=np.int64), 0
    for members in added.values():
        queries, width = max(int(lengths[row]) - shared for row, shared in members), max(int(lengths[row]) for row, _ in members)
        most = max(1, MASK_ENTRIES // (queries * width))
        for part in (members[i : i + most] for i in range(0, len(members), most)):
            own = np.zeros((len(part), queries), dtype=np.int64)
            path = np.zeros((len(part), width), dtype=np.int64)
            for i, (row, shared) in enumerate(part):
                length = lengths[row]
                path[i, :length] = index[row, :length]
                own[i, : length - shared] = index[row, shared:length]
                home[own[i, : length - shared]] = offset + i * queries + np.arange(length - shared)
            starts = [shared for _, shared in part]
            paths.append(Paths(tensor(own), tensor(path), tensor(starts) if any(starts) else None))
            offset += own.size
    where, at = np.nonzero(mask)
    pairs = np.stack([index[where, at - 1], rows[where, at]], 1)
    distinct, inverse = np.unique(pairs, axis=0, return_inverse=True)
    return Packed(
        ids=tensor(np.concatenate(tokens) if tokens else []),
        positions=tensor(np.concatenate(depths) if depths else []),
        paths=tuple(paths),
        home=tensor(home),
        parents=tensor(distinct[:, 0]),
        targets=tensor(distinct[:, 1]),
        inverse=tensor(inverse),
        response_mask=response_mask,
        tokens=int(lengths.sum()),
    )


def size_class(length: int) -> int:
    """Lengths of a class differ by less than a factor of √2, so that attention is padded by less than that."""
    return int(2 * np.log2(length))


def trunk_states(trunk: Any, packed: Packed) -> Tensor:
    """The last hidden states [N, H] of all packed tokens.

    A trunk that cannot be packed (`allow_packing`) reads the paths as rows: same states, the shared beginnings once a row.
    """
    if not len(packed.ids):
        return trunk.get_input_embeddings().weight.new_zeros(0, trunk.config.hidden_size)
    if trunk.config._attn_implementation == ATTENTION:
        unused = packed.ids.new_ones(1, 1, 1, 1, dtype=torch.bool)  # given, so that no mask of all pairs is built
        states = trunk(
            input_ids=packed.ids[None], position_ids=packed.positions[None], attention_mask=unused, use_cache=False, packed=packed
        )
        return states.last_hidden_state[0]
    parts = []
    for queries, keys, starts in packed.paths:
        # Right-padded: causal attention never looks at padding, so no attention mask is built.
        states = trunk(input_ids=packed.ids[keys], use_cache=False).last_hidden_state
        at = torch.arange(queries.shape[1], device=keys.device).expand(queries.shape)
        at = (at if starts is None else at + starts[:, None]).clamp(max=keys.shape[1] - 1)
        parts.append(states.gather(1, at[..., None].expand(*at.shape, states.shape[-1])).flatten(0, 1))
    return torch.cat(parts)[packed.home]


def allow_packing(model: nn.Module) -> None:
    """Lets a causal LM read packed rows, where every layer sees the whole context and attends as Hugging Face's "sdpa".

    For any other call nothing changes. The choice stays on the model, since gradient checkpointing attends again in backward.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    config: Any = model.config
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    able = getattr(model, "_supports_attention_backend", False) and not getattr(config, "is_encoder_decoder", False)
    if able and layers == {"full_attention"} and config._attn_implementation == "sdpa" and not getattr(config, "sliding_window", None):
        AttentionInterface.register(ATTENTION, attend_packed)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        config._attn_implementation = ATTENTION


def attend_packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: Packed | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every packed token to its path; Hugging Face's own where nothing is packed.

    Args:
      query: [1, Hq, N, D]. key, value: [1, Hk, N, D], Hk divides Hq.
    Returns: [1, N, Hq, D].
    """
    if packed is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H, D]
    grouped = query.shape[1] != key.shape[1]
    parts = []
    for queries, keys, starts in packed.paths:
        rows = (q[queries].transpose(1, 2), k[keys].transpose(1, 2), v[keys].transpose(1, 2))
        if starts is None:
            out = nn_functional.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, enable_gqa=grouped)
        else:
            last = starts[:, None] + torch.arange(queries.shape[1], device=queries.device)
            seen = torch.arange(keys.shape[1], device=keys.device) <= last[..., None]
            out = nn_functional.scaled_dot_product_attention(*rows, attn_mask=seen[:, None], scale=scaling, enable_gqa=grouped)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)[packed.home][None], None
