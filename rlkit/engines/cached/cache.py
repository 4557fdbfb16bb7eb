"""Keys and values of all slots of the cached engine. They stay where they are from the first token of an episode to its last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 64  # tokens by which the capacity of a slot grows


class Slots:
    """Keys and values of all slots, [S, H, C, D] for each layer; a model takes it for its cache.

    `rows` and `positions` say, before each pass, where the new ones go: rows None are the first slots in their order.
    """

    def __init__(self, slots: int, capacity: int, device: torch.device):
        self.slots, self.capacity = slots, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows: Tensor | None = None
        self.indices = torch.arange(slots, device=device)
        self.positions = torch.empty(0)  # [R, m]
        self.length = 0  # positions that are seen; 0: the new ones alone

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Puts new keys and values [R, H, m, D] in their place and gives all that these rows may see."""
        key = key.to(value.dtype)  # under mixed precision the norm of the keys, whose weight is float32, makes them float32
        if layer == len(self.keys):
            for store, like in ((self.keys, key), (self.values, value)):
                store.append(like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3]))
        rows = self.indices[: len(key)] if self.rows is None else self.rows
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

    def resize(self, slots: int, capacity: int) -> None:
        """Change the numbers of slots and of positions, of these to at least as many; the first slots keep what they hold."""
        for stores in (self.keys, self.values):
            for layer in range(len(stores)):  # one at a time: no more than one is there twice
                old = stores[layer][:slots]
                new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                new[: len(old), :, : self.capacity] = old
                stores[layer] = new
        self.indices = torch.arange(slots, device=self.indices.device)
        self.slots, self.capacity = slots, capacity


def fitting(causal: Any, device: torch.device) -> int:
    """Tokens whose keys and values half of the free memory of a CUDA device holds; the rest is for passes, logits and noise."""
    config = causal.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token = 2 * config.num_hidden_layers * heads * size * causal.dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, free // 2 // token)
