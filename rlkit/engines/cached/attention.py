"""Compute the attention of the cached engine.

This attention makes no copies of the keys for grouped query heads. For each slot it reads little
more than the positions that the slot holds.
"""

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
from rlkit.models.shape import find_whole_context, read_model_shape

ATTENTION = "rlkit_cached"
SIDE_BY_SIDE = 8  # neighbouring slots in a block; a block reads as far as its longest slot
# On a CPU, reading this many positions takes as long as one more call of attention.
CALL = 8192


def find_longest_context(config: Any) -> float:
    """Return the longest context, in tokens, that the cache can serve. In contexts up to this
    length, every layer needs the keys and values of all tokens, and no other state
    (`find_whole_context`).

    Return 0 for a model with windows in some layers, unless it uses Hugging Face's "sdpa"
    attention. Families with attention sinks or capped logits have no "sdpa" form, and most of them
    have windows.
    """
    context = find_whole_context(config)
    as_sdpa = config._attn_implementation in ("sdpa", PACKED)
    return context if context == math.inf or as_sdpa else 0


@contextmanager
def use_attention(config: Any, implementation: str) -> Iterator[None]:
    """Return a context manager that makes the model use this attention implementation."""
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


def use_grouped_attention(config: Any) -> AbstractContextManager[None]:
    """Return a context manager that makes the model use `attend` as its attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    return use_attention(config, ATTENTION)


def choose_attention_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that excludes the attention kernel of cuDNN on CUDA, because cuDNN
    makes a new plan for every length."""
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
    """Compute grouped attention without copying keys.

    The query heads of a group share one key head. The queries of a group are stacked, as if a
    single head had more queries.

    Args:
      query: [R, Hq, m, D].
      key, value: [R, Hk, L, D]; Hk divides Hq.
      attention_mask: [R, 1, m, L], True if a query sees a position. None, or a mask of any other
        shape, means causal attention with m = L.
    Returns: the attention's output [R, m, Hq, D], and None.
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
    return out.view(rows, heads, width, -1).transpose(1, 2).contiguous(), None


def attend_in_place(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor
) -> Tensor:
    """Compute attention for one new token per row, and read the pages in place. The function calls
    torch's `varlen_attn` with a block table (torch 2.12, CUDA, half precision).

    Args:
      query: [R, Hq, 1, D].
      keys, values: the pages of one layer, [Hk, pages, page, D].
      table: the pages of each row, [R, n] int32.
      lengths: the number of positions seen by each row, [R] int32.
    Returns: [R, 1, Hq, D].
    """
    from torch.nn.attention.varlen import varlen_attn

    rows, heads, _, size = query.shape
    ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    # The keys are found by the table and the lengths. FlashAttention 2 wants the ends all the same.
    ends_k = nn_functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    out: Any = varlen_attn(
        query.reshape(rows, heads, size),
        keys.permute(1, 2, 0, 3),
        values.permute(1, 2, 0, 3),
        ends,
        ends_k,
        1,
        table.shape[1] * keys.shape[2],
        enable_gqa=heads != len(keys),
        seqused_k=lengths,
        block_table=table,
    )
    return out[:, None]


def explain_no_reading_in_place(causal: Any) -> str:
    """Return the reason why the pages of a model cannot be read in place. Return "" if they can."""
    head_dim = read_model_shape(causal.config.get_text_config()).head_dim
    dtype = causal.dtype
    if torch.is_autocast_enabled(causal.device.type):
        dtype = torch.get_autocast_dtype(causal.device.type)
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it reads half precision, and the keys are {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"it reads heads of 8, 16, … 256 numbers, and these have {head_dim}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"varlen_attn of torch {torch.__version__} takes no block table"
    return ""


# A range of slots: the first slot, the slot after the last one, and the most positions that any
# slot of the range sees.
Part = tuple[int, int, int]


def cut_slots(reach: Sequence[int]) -> list[Part]:
    """Divide the slots into ranges of similar length, if this saves more time than the additional
    calls of attention cost.

    Args:
      reach: the number of positions seen by each slot.
    """
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
