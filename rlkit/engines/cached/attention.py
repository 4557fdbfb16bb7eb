"""Attention of the cached engine: it copies no keys for grouped heads, and reads only as many
positions as a slot has."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn_functional

from rlkit.models.packing import ATTENTION as PACKED
from rlkit.models.shape import find_whole_context

ATTENTION = "rlkit_cached"
SIDE_BY_SIDE = 8  # neighbouring slots per block; a block is as long as its longest slot
CALL = 8192  # positions; on a CPU, reading them takes as long as one more attention call


def find_longest_context(config: Any) -> float:
    """The longest context that the cache can serve, in tokens (`find_whole_context`). Up to this
    length every layer needs the keys and values of all tokens, and nothing else.

    0 for a model with windows unless it uses Hugging Face's "sdpa" attention. Families with
    attention sinks or capped logits have no "sdpa" form, and most of them have windows.
    """
    context = find_whole_context(config)
    as_sdpa = config._attn_implementation in ("sdpa", PACKED)
    return context if context == math.inf or as_sdpa else 0


@contextmanager
def use_attention(config: Any, implementation: str) -> Iterator[None]:
    """Within the block, the model uses this attention implementation."""
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def use_grouped_attention(config: Any) -> AbstractContextManager[None]:
    """Within the block, the model's attention is `attend`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return use_attention(config, ATTENTION)


def choose_attention_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """Use any attention kernel of CUDA except cuDNN's: cuDNN makes a new plan for every length."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Grouped attention without copying keys: the query heads of a group are stacked as queries of
    their one key head.

    Args:
      query: [R, Hq, m, D]. key, value: [R, Hk, L, D], Hk divides Hq. attention_mask: [R, 1, m, L],
        True where a query sees a position. A mask of any other shape means causal attention, with m
        = L.
    """
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or attention_mask.shape[-2:] != (width, key.shape[2]):
        out = nn_functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous(), None
    grouped = query.reshape(rows, heads // groups, groups * width, size)
    mask = attention_mask if width == 1 or groups == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = nn_functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=scaling
    )
    return out.view(rows, heads, width, size).transpose(1, 2).contiguous(), None


def attend_in_place(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """Attention of one new token per row, with pages read in place: torch's `varlen_attn` with a
    block table (torch 2.12, CUDA, half precision).

    Args:
      query: [R, Hq, 1, D]. keys, values: those of one layer, [Hk, pages, page, D]. table: [R, n]
      int32. lengths: [R] int32, how many positions each row sees.
    Returns: [R, 1, Hq, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, _, size = query.shape
    ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    out: Any = varlen_attn(
        query.reshape(rows, heads, size),
        keys.permute(1, 2, 0, 3),
        values.permute(1, 2, 0, 3),
        ends,
        None,
        1,
        table.shape[1] * keys.shape[2],
        enable_gqa=heads != len(keys),
        seqused_k=lengths,
        block_table=table,
    )
    return out[:, None]


def explain_no_reading_in_place() -> str:
    """Why this torch cannot read pages in place; empty if it can."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"varlen_attn of torch {torch.__version__} takes no block table"
    return ""


# first slot, end of the slots, and the most positions seen by one of them
Part = tuple[int, int, int]


def cut_slots(reach: Sequence[int]) -> list[Part]:
    """Cut slots into parts of similar length, if this saves more than the additional calls cost.
    `reach`: how many positions each slot sees."""
    parts: list[Part] = []
    for start in range(0, len(reach), SIDE_BY_SIDE):
        stop = min(start + SIDE_BY_SIDE, len(reach))
        longest = max(reach[start:stop])
        if parts:
            before, _, length = parts[-1]
            both = max(length, longest)
            if (both - length) * (start - before) + (both - longest) * (stop - start) <= CALL:
                parts[-1] = (before, stop, both)
                continue
        parts.append((start, stop, longest))
    return parts
