"""Store keys and values in pages, and list the pages of each slot in one table. The pages and the
table last as long as the engine."""

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

PAGE = 16  # tokens in a page
# Flash attention can read pages in place if the tokens in a page are a multiple of this number.
FLASH_PAGE = 256
SPARE = 0  # number of the page that no row holds; slots without a page write into it
SHARE = 0.35  # share of the memory left by the weights, to be used for keys and values


class Pages:
    """Store the keys and values of all slots, and the table of their pages.

    Attributes:
      keys, values: one tensor [Hk, pages, page, D] for each layer. The first pass of the model
        allocates them, in the precision of its own keys and values. `clear` frees them. No row
        holds page 0 (SPARE).
      table: [slots, columns]. Column c has the number of the page for the slot's positions from
        `c · page` to `(c + 1) · page - 1`, or 0 if the slot has no page for these positions. The
        host writes `entries`, and `flush` copies the changed rows to the device. On a CPU,
        `entries` and `table` share their memory.
      holders: the number of rows that hold each page. Rows share the full pages of a common
        beginning of their prompts.

    Args:
      tokens: capacity of all pages together in tokens, > 0, rounded up to whole pages.
      slots: number of slots, > 0.
      context: the most positions in a slot.
      page: tokens in a page.
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
        self.made = 0  # how often the memory of keys and values was allocated
        self.scratch: dict[int, Tensor] = {}
        self.entries = np.zeros((slots, self.columns), dtype=np.int64)
        own = torch.from_numpy(self.entries)
        self.table = own if device.type == "cpu" else torch.zeros_like(own, device=device)
        self.indices = torch.arange(slots, device=device)
        self.holders = [0] * (self.pages + 1)
        self.left = list(range(1, self.pages + 1))  # a heap: the lowest free page is taken first
        self.width = 0  # the most columns ever in use
        self.changed: set[int] = set()  # slots with entries not yet copied to the device

    # ------------------------------------------------------------------------------------- the host

    def span(self, length: int) -> int:
        """Return the number of pages for this many tokens."""
        return -(-length // self.page)

    def take(self) -> int:
        """Acquire a free page for one row, and return the number of the page.

        Raises: IndexError if no page is free.
        """
        page = heapq.heappop(self.left)
        self.holders[page] = 1
        return page

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of these pages."""
        for page in pages:
            self.holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a holder from each of these pages. A page without holders is free."""
        for page in pages:
            self.holders[page] -= 1
            if not self.holders[page]:
                heapq.heappush(self.left, page)

    def write(self, slot: int, pages: Sequence[int], start: int = 0) -> None:
        """Write the numbers of these pages into a slot's row of the table, from the column `start`
        on. Set all later columns of the row to SPARE."""
        stop = start + len(pages)
        self.width = max(self.width, stop)
        self.entries[slot, start:stop] = pages
        self.entries[slot, stop:] = SPARE
        self.changed.add(slot)

    def flush(self) -> None:
        """Copy every row of the table that the host has changed to the device."""
        if self.changed and self.device.type != "cpu":
            rows = sorted(self.changed)
            entries = torch.from_numpy(self.entries[rows, : self.width]).to(self.device)
            self.table[torch.tensor(rows, device=self.device), : self.width] = entries
        self.changed.clear()

    # ----------------------------------------------------------------------------------- the device

    def places(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the places [R, m] of the positions [R, m] in these slots [R]. A place is the index
        of a position if the positions of all pages are counted, one page after the other."""
        pages = self.table[rows].gather(1, positions // self.page)
        return pages * self.page + positions % self.page

    def clear(self) -> None:
        """Free the memory of keys and values. The next pass of the model allocates it again."""
        self.keys = []
        self.values = []
        self.scratch = {}

    def put(self, layer: int, key: Tensor, value: Tensor, places: Tensor) -> None:
        """Write a layer's new keys and values [R, Hk, m, D] to their places [R, m]."""
        if layer == len(self.keys):
            self.made += layer == 0
            for store, new in ((self.keys, key), (self.values, value)):
                shape = (new.shape[1], self.pages + 1, self.page, new.shape[3])
                store.append(allocate_zeros(shape, value))
        at = places.flatten()
        for kept, new in ((self.keys[layer], key), (self.values[layer], value)):
            # In mixed precision, a norm with float32 weights makes keys float32, so convert them.
            own = new.to(kept.dtype).transpose(0, 1).flatten(1, 2)
            kept.flatten(1, 2).index_copy_(1, at, own)

    def gather(self, layer: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Copy a layer's keys and values out of the pages [R, n]; return each as [R, Hk, n · page,
        D]. On a CPU, the next call overwrites the result."""
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
        """Return memory into which `gather` copies pages. The next call with the same `number`
        returns the same memory again, if this memory is large enough. To allocate new memory for
        each call of `gather` would take as long as copying the pages."""
        size = math.prod(shape)
        own = self.scratch.get(number)
        if own is None or len(own) < size or own.dtype != like.dtype:
            own = self.scratch[number] = like.new_empty(size + size // 4)
        return own[:size].view(shape)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the contents of the pages `sources` into the pages `targets`, in every layer."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for kept in (*self.keys, *self.values):
            kept[:, target] = kept[:, source]


def allocate_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocate zeros with the precision and the device of another tensor.

    On a CPU, the operating system supplies memory only when it is first written to. Therefore the
    unused part of a cache costs nothing.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(like.dtype).view(shape)


def count_token_bytes(causal: Any) -> int:
    """Return the number of bytes of one token's keys and values in all layers."""
    config = causal.config.get_text_config()
    shape = read_model_shape(config)
    size = shape.kv_heads * shape.head_dim
    return int(2 * config.num_hidden_layers * size * causal.dtype.itemsize)


def choose_cache_tokens(causal: Any, device: torch.device) -> int:
    """Return the number of tokens whose keys and values fit into the cache's memory; at least 1.

    The cache gets the share `SHARE` of the memory that the weights leave on the GPU or, on a CPU,
    in the machine or the container. The computation uses the total memory, not the free memory, so
    that runs are reproducible.
    """
    weights = sum(p.nbytes for p in causal.parameters())
    return max(1, compute_cache_bytes(weights, total_memory(device)) // count_token_bytes(causal))


def compute_cache_bytes(weights: int, total: int) -> int:
    """Return the size of the cache of keys and values in bytes, `SHARE · (total - weights)`."""
    return int(SHARE * max(0, total - weights))
