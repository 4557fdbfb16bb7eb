"""Attention of the cached engine: it reads keys and values where they are, and only as many
positions as a slot has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn_functional

from rlkit.models.shape import model_shape

ATTENTION = "rlkit_cached"
SIDE_BY_SIDE = 8  # slots whose longest is looked for together
CALL = 8192  # positions that are read in the time of one more call of attention, on a CPU


def full_attention(config: Any, length: int) -> bool:
    """Whether every layer sees the whole context, of at most `length` tokens: then keys and values
    of a position are all that is kept."""
    shape = model_shape(config)
    if shape.encoder:
        return False
    if shape.layer_types:
        return shape.layer_types == {"full_attention"}
    return shape.window is None or length <= shape.window


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """The model attends by `attend` inside."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def attention_kernels(device: torch.device) -> AbstractContextManager[Any]:
    """On CUDA all but cuDNN's, which plans each new shape anew: contexts and replies have any."""
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
    """Attention in which the heads of a group stand side by side as queries of their one key head,
    so that no key is copied.

    Args:
      query: [R, Hq, m, D]. key, value: [R, Hk, L, D], Hk divides Hq. attention_mask: [R, 1, m, L],
        True is seen; of any other shape, it is causal, and m = L. Where n rows share a room of
        keys, m = 1, keys are [R / n, Hk, L, D] and the mask [R / n, 1, n, L].
    Of each part of the rows (`PARTS`) only the keys are read that one of them sees.
    """
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    if len(key) != rows and attention_mask is not None:
        shared = query.view(len(key), -1, key.shape[1], groups, size).transpose(
            1, 2
        )  # [rooms, Hk, n, groups, D]
        mask = attention_mask.repeat_interleave(
            groups, 2, output_size=groups * attention_mask.shape[2]
        )
        out = nn_functional.scaled_dot_product_attention(
            shared.flatten(2, 3), key, value, attn_mask=mask, scale=scaling
        )
        return out.view(shared.shape).transpose(1, 2).reshape(rows, 1, heads, size), None
    if attention_mask is None or attention_mask.shape[-2:] != (width, key.shape[2]):
        out = nn_functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
        return out.transpose(1, 2).contiguous(), None
    grouped = query.reshape(rows, heads // groups, groups * width, size)
    mask = attention_mask if width == 1 or groups == 1 else attention_mask.repeat(1, 1, groups, 1)
    outs = [
        nn_functional.scaled_dot_product_attention(
            grouped[start:stop],
            key[start:stop, :, :length],
            value[start:stop, :, :length],
            attn_mask=mask[start:stop, ..., :length],
            scale=scaling,
        )
        for start, stop, length in PARTS.get() or [(0, rows, key.shape[2])]
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(rows, heads, width, size).transpose(1, 2).contiguous(), None


Part = tuple[int, int, int]  # slots from, to; the positions that one of them sees
PARTS: ContextVar[list[Part] | None] = ContextVar("parts", default=None)


def parts_of(reach: Tensor) -> list[Part]:
    """Cuts slots [n] that see so many positions each into parts of nearly one length, where that
    saves more than further calls cost."""
    parts: list[Part] = []
    blocks = (
        nn_functional.pad(reach, (0, -len(reach) % SIDE_BY_SIDE))
        .view(-1, SIDE_BY_SIDE)
        .amax(1)
        .tolist()
    )
    for block, longest in enumerate(blocks):
        start = block * SIDE_BY_SIDE
        stop = min((block + 1) * SIDE_BY_SIDE, len(reach))
        if parts:
            before, _, length = parts[-1]
            both = max(length, longest)
            if (both - length) * (start - before) + (both - longest) * (stop - start) <= CALL:
                parts[-1] = (before, stop, both)
                continue
        parts.append((start, stop, longest))
    return parts
