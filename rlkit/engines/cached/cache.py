"""Keys and values in pages, and one table of slots and their pages. Both last as long
as the engine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit.models.shape import read_model_shape
from rlkit.system.device import total_memory

PAGE = 16  # tokens of a page
# flash attention reads pages in place if their length is a multiple of this
FLASH_PAGE = 256
SPARE = 0  # a page that no row holds; slots without a page write into it
SHARE = 0.35  # of the memory left by the weights, for keys and values


class Pages:
    """Keys and values of all slots, and the table of their pages.

    keys, values: one tensor [Hk, pages, page, D] for each layer. The first pass allocates them, in
    the precision of its values; `clear` frees them. No row holds page 0 (SPARE).
    table: [slots, columns]. Column c names the page with the slot's positions c · page to
    (c + 1) · page - 1; 0 if there is none. The host writes `entries`, and `flush` brings the
    changes to the device. On a CPU both are the same memory.
    holders: how many rows hold each page. Samples of one prompt share the prompt's full pages.

    Args:
      tokens: capacity of all pages together, > 0, rounded up to whole pages.
      context: most positions of a slot.
    """

    def __init__(
        self, tokens: int, slots: int, context: int, device: torch.device, page: int = PAGE
    ):
        self.page = page
        self.slots = slots
        self.columns = -(-context // page)
        self.pages = -(-tokens // page)
        self.device = device
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.made = 0  # how often the memory was made
        self.scratch: dict[int, Tensor] = {}
        self.entries = np.zeros((slots, self.columns), dtype=np.int64)
        own = torch.from_numpy(self.entries)
        self.table = own if device.type == "cpu" else torch.zeros_like(own, device=device)
        self.indices = torch.arange(slots, device=device)
        self.holders = [0] * (self.pages + 1)
        self.left = list(range(1, self.pages + 1))  # a heap: the lowest free page is taken first
        self.width = 0  # columns ever in use
        self.changed: set[int] = set()  # slots with entries unknown to the device

    # ------------------------------------------------------------------------------------- the host

    def span(self, length: int) -> int:
        """The number of pages for this many tokens."""
        return -(-length // self.page)

    def take(self) -> int:
        """A free page, with one holder now. Raises: IndexError if none is free."""
        page = heapq.heappop(self.left)
        self.holders[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of these pages."""
        for page in pages:
            self.holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a holder from each of these pages; a page without holders is free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                heapq.heappush(self.left, page)

    def write(self, slot: int, pages: Sequence[int], start: int = 0) -> None:
        """Enter pages into a slot's row of the table, from the column `start` on; clear the columns
        after them."""
        stop = start + len(pages)
        self.width = max(self.width, stop)
        self.entries[slot, start:stop] = pages
        self.entries[slot, stop:] = SPARE
        self.changed.add(slot)

    def flush(self) -> None:
        """Copy the host's changed entries to the device."""
        if self.changed and self.device.type != "cpu":
            rows = sorted(self.changed)
            entries = torch.from_numpy(self.entries[rows, : self.width]).to(self.device)
            self.table[torch.tensor(rows, device=self.device), : self.width] = entries
        self.changed.clear()

    # ----------------------------------------------------------------------------------- the device

    def places(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Places of the positions [R, m] of these slots [R]: indices over the positions of all
        pages."""
        pages = self.table[rows].gather(1, positions // self.page)
        return pages * self.page + positions % self.page

    def clear(self) -> None:
        """Free the memory of keys and values; the next pass makes it again."""
        self.keys = []
        self.values = []
        self.scratch = {}

    def put(self, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
        """Write new keys and values [R, Hk, m, D] of a layer to their places [R, m]."""
        if layer == len(self.keys):
            self.made += layer == 0
            shape = (key.shape[1], self.pages + 1, self.page, key.shape[3])
            self.keys.append(allocate_zeros(shape, value))
            self.values.append(allocate_zeros(shape, value))
        at = places.flatten()
        for kept, new in ((self.keys[layer], key), (self.values[layer], value)):
            # Under mixed precision a norm with float32 weights makes the keys float32.
            own = new.to(kept.dtype).transpose(0, 1).flatten(1, 2)
            kept.flatten(1, 2).index_copy_(1, at, own)

    def gather(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the pages [R, n] of a layer, each as [R, Hk, n · page, D]. On a CPU
        the next call writes over them."""
        rows, columns = table.shape
        at = table.flatten()
        found = []
        for number, kept in enumerate((self.keys[layer], self.values[layer])):
            shape = (len(kept), len(at), *kept.shape[2:])
            out = self._scratch(number, shape, kept) if kept.device.type == "cpu" else None
            pages = torch.index_select(kept, 1, at, out=out)
            found.append(pages.view(len(kept), rows, columns * self.page, -1).transpose(0, 1))
        return found[0], found[1]

    def _scratch(self, number: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory for gathered pages, reused because allocating it costs as much as the copy."""
        size = math.prod(shape)
        own = self.scratch.get(number)
        if own is None or len(own) < size or own.dtype != like.dtype:
            own = self.scratch[number] = like.new_empty(size + size // 4)
        return own[:size].view(shape)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the pages `sources` to the pages `targets`."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for kept in (*self.keys, *self.values):
            kept[:, target] = kept[:, source]


def allocate_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the precision and device of another tensor. On a CPU the system gives memory only
    when it is written to, so the unused part of a cache costs nothing."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)


def count_token_bytes(causal: Any) -> int:
    """Bytes of the keys and values of one token in all layers."""
    config = causal.config.get_text_config()
    shape = read_model_shape(config)
    size = shape.kv_heads * shape.head_dim
    return int(2 * config.num_hidden_layers * size * causal.dtype.itemsize)


def choose_cache_tokens(causal: Any, device: torch.device) -> int:
    """How many tokens' keys and values fit into `SHARE` of the memory left by the weights; at least
    1.

    The memory is the card's or, on a CPU, the machine's or the container's. It is always the total,
    not the free memory, so that runs are reproducible.
    """
    weights = sum(p.nbytes for p in causal.parameters())
    return max(1, compute_cache_bytes(weights, total_memory(device)) // count_token_bytes(causal))


def compute_cache_bytes(weights: int, total: int) -> int:
    """Bytes of the cache of keys and values: SHARE · (total - weights)."""
    return int(SHARE * max(0, total - weights))
