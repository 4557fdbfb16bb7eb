"""The cache of the engine `cached`: keys and values of all slots, which stay where they are, and attention that copies none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn_functional

ATTENTION = "rlkit_cached"
SIDE_BY_SIDE = 8  # slots whose longest is looked for together
CALL = 8192  # positions that are read in the time of one more call of attention, on a CPU


def full_attention(config: Any, length: int) -> bool:
    """Whether every layer sees the whole context, of at most `length` tokens: then keys and values of a position are all that is kept."""
    if getattr(config, "is_encoder_decoder", False):
        return False
    if kinds := getattr(config, "layer_types", None):
        return set(kinds) == {"full_attention"}
    window = getattr(config, "sliding_window", None)  # of all layers, as in Mistral
    return not window or length <= window


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

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention in which the heads of a group stand side by side as queries of their one key head, so that no key is copied.

    Args:
      query: [R, Hq, m, D]. key, value: [R, Hk, L, D], Hk divides Hq. attention_mask: [R, 1, m, L], True is seen; of any other shape, it
        is causal, and m = L.
    Of each part of the rows (`PARTS`) only the keys are read that one of them sees.
    """
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or attention_mask.shape[-2:] != (width, key.shape[2]):
        out = nn_functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    grouped = query.reshape(rows, heads // groups, groups * width, size)
    mask = attention_mask if width == 1 or groups == 1 else attention_mask.repeat(1, 1, groups, 1)
    outs = [
        nn_functional.scaled_dot_product_attention(
            grouped[start:stop], key[start:stop, :, :length], value[start:stop, :, :length],
            attn_mask=mask[start:stop, ..., :length], scale=scaling,
        )
        for start, stop, length in PARTS.get() or [(0, rows, key.shape[2])]
    ]  # fmt: skip
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.view(rows, heads, width, size).transpose(1, 2).contiguous(), None


Part = tuple[int, int, int]  # slots from, to; the positions that one of them sees
PARTS: ContextVar[list[Part] | None] = ContextVar("parts", default=None)


def parts_of(reach: Tensor) -> list[Part]:
    """Cuts slots [n] that see so many positions each into parts of nearly one length, where that saves more than further calls cost."""
    parts: list[Part] = []
    blocks = nn_functional.pad(reach, (0, -len(reach) % SIDE_BY_SIDE)).view(-1, SIDE_BY_SIDE).amax(1).tolist()
    for block, longest in enumerate(blocks):
        start, stop = block * SIDE_BY_SIDE, min((block + 1) * SIDE_BY_SIDE, len(reach))
        if parts:
            before, _, length = parts[-1]
            both = max(length, longest)
            if (both - length) * (start - before) + (both - longest) * (stop - start) <= CALL:
                parts[-1] = (before, stop, both)
                continue
        parts.append((start, stop, longest))
    return parts


class Slots:
    """Keys and values of all slots, [S, H, C, D] for each layer; what a model takes for its cache.

    `rows` and `positions` say, before each pass, where the new ones go: rows None are the first slots in their order.
    """

    def __init__(self, slots: int, room: int, device: torch.device):
        self.slots, self.room = slots, room
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows: Tensor | None = None
        self.places = torch.arange(slots, device=device)
        self.positions = torch.empty(0)  # [R, m]
        self.length = 0  # positions that are seen; 0: the new ones alone

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Puts new keys and values [R, H, m, D] in their place and gives all that these rows may see."""
        if layer == len(self.keys):
            for store, like in ((self.keys, key), (self.values, value)):
                store.append(like.new_zeros(self.slots, like.shape[1], self.room, like.shape[3]))
        rows = self.places[: len(key)] if self.rows is None else self.rows
        out = []
        for kept, new in ((self.keys[layer], key), (self.values[layer], value)):
            kept[rows[:, None], :, self.positions] = new.transpose(1, 2)
            if self.length == 0:
                out.append(new)
            else:
                seen = kept[:, :, : self.length]
                out.append(seen[: len(new)] if self.rows is None else seen[self.rows])
        return out[0], out[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """For models that ask; positions are always given."""
        return self.length

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first `length` positions of some slots into others."""
        for store in (*self.keys, *self.values):
            store[targets, :, :length] = store[sources, :, :length]

    def resize(self, slots: int, room: int) -> None:
        """Other numbers of slots and of positions, of these at least as many; what the first slots hold stays."""
        for stores in (self.keys, self.values):
            for layer in range(len(stores)):  # one at a time: no more than one is there twice
                old = stores[layer][:slots]
                new = old.new_zeros(slots, old.shape[1], room, old.shape[3])
                new[: len(old), :, : self.room] = old
                stores[layer] = new
        self.slots, self.room = slots, room
