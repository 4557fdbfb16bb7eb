"""Keys and values of all slots of the cached engine. They stay where they are from the first token
of an episode to its last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlkit.models.shape import model_shape

BLOCK = 16  # tokens of which a slot gets more at once
SHARE = 8  # slots of a room
LONGEST = (
    2  # completions of the longest kind that a room holds: one is usually about a quarter as long
)


class Slots:
    """Keys and values of all slots, a room [C, D] of each slot and head; a model takes it for its
    cache.

    `point` says, before each pass, where the new ones go. Memory is kept between calls and never
    zeroed again: what a slot does not see is masked, and what was written there is finite.
    """

    share = 1  # slots in a room

    def __init__(self, slots: int, capacity: int, device: torch.device):
        self.slots = slots
        self.capacity = capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.indices = torch.arange(slots, device=device)
        self.rows: Tensor | None = None  # [R] of the pass; None: the first slots in their order
        self.positions = torch.empty(0)  # [R, m]
        self.places = torch.empty(0)  # [R, m], of these positions in their room
        self.length = 0  # positions that are seen; 0: the new ones alone

    @property
    def shape(self) -> tuple[int, int]:
        """Rooms, and positions of each."""
        return self.slots, self.capacity

    def point(self, rows: Tensor | None, positions: Tensor, length: int) -> None:
        """The next pass is for these rows, at these positions [R, m], and sees the first `length`
        of them; 0: the new ones alone."""
        self.rows = rows
        self.positions = positions
        self.length = length
        self.places = self.place(
            self.indices[: len(positions)] if rows is None else rows, positions
        )

    def place(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where the positions [R, m] of these slots are in their rooms."""
        return positions

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Puts new keys and values [R, H, m, D] in their place and gives all that these rows may
        see."""
        key = key.to(
            value.dtype
        )  # under mixed precision the norm of the keys, whose weight is float32, makes them float32
        if layer == len(self.keys):
            for store, like in ((self.keys, key), (self.values, value)):
                store.append(
                    like.new_zeros(self.shape[0], like.shape[1], self.shape[1], like.shape[3])
                )
        rooms = (self.indices[: len(key)] if self.rows is None else self.rows) // self.share
        out = []
        for kept, new in ((self.keys[layer], key), (self.values[layer], value)):
            kept[rooms[:, None], :, self.places] = new.transpose(1, 2)
            out.append(new if self.length == 0 else self.seen(kept, len(new)))
        return out[0], out[1]

    def seen(self, kept: Tensor, rows: int) -> Tensor:
        """What the rows of this pass see of one layer's keys or values."""
        return (
            kept[:rows, :, : self.length]
            if self.rows is None
            else kept[:, :, : self.length][self.rows]
        )

    def visible(self, slots: int) -> Tensor:
        """What the first slots see in a step of decoding, [rooms, 1, slots of a room, L] bool."""
        return (torch.arange(self.length, device=self.indices.device) <= self.positions)[
            :, None, None
        ]

    def get_seq_length(self, layer: int = 0) -> int:
        """For models that ask; positions are always given."""
        return self.length

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first `length` positions of some slots into others."""
        for store in (*self.keys, *self.values):
            store[targets, :, :length] = store[sources, :, :length]

    def resize(self, slots: int, capacity: int) -> None:
        """Change the numbers of slots and of positions, of these to at least as many; the first
        slots keep what they hold."""
        for stores in (self.keys, self.values):
            for layer in range(len(stores)):  # one at a time: no more than one is there twice
                old = stores[layer][:slots]
                new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                new[: len(old), :, : self.capacity] = old
                stores[layer] = new
        self.indices = torch.arange(slots, device=self.indices.device)
        self.slots = slots
        self.capacity = capacity

    # -------------------------------- what the host hands out; here each slot has a room of its own

    def admits(self, slot: int, length: int) -> bool:
        """Whether an episode that will probably get so long may take this free slot."""
        return True

    def grant(self, slot: int, length: int, promised: int = 0) -> bool:
        """Positions for a slot to get so long; False where its room has none left. It was promised
        so many when it was admitted."""
        return length <= self.capacity

    def takes(self, source: int, target: int) -> bool:
        """Whether a free slot has room for what another holds; then it is granted."""
        return True

    def free(self, slots: Iterable[int]) -> None:
        """These slots hold nothing any more."""

    def flush(self) -> None:
        """What was handed out is told to the device."""


class Rooms(Slots):
    """Keys and values where `SHARE` slots share a room, [S / SHARE, H, C + BLOCK, D], and take
    blocks of it as they need them.

    A room holds two completions of the longest kind, or several of the usual kind. So most of the
    memory is in use, where a room for each slot would be a third full. Keys carry their positions,
    so their order in a room means nothing: all slots of a room attend to the whole of it, and a
    mask says what belongs to whom. The shapes of a step follow from the number of rooms alone,
    whatever the lengths are, and each position is read once. The last block of a room is nobody's:
    slots that draw nothing write there.
    """

    share = SHARE

    def __init__(self, slots: int, capacity: int, device: torch.device):
        super().__init__(slots, capacity, device)
        rooms = slots // SHARE
        self.blocks = capacity // BLOCK
        self.table = torch.full(
            (slots, self.blocks), self.blocks, device=device
        )  # block of a position → block of the room
        self.owner = torch.full(
            (rooms, self.blocks + 1), -1, device=device
        )  # which of the slots in the room
        self.base = torch.zeros(
            (rooms, self.blocks + 1), dtype=torch.int64, device=device
        )  # its block of positions
        self.ranks, self.offsets = (
            torch.arange(SHARE, device=device),
            torch.arange(BLOCK, device=device),
        )
        self.own: list[list[int]] = [[] for _ in range(slots)]
        self.promised = [0] * slots  # blocks
        self.left = [list(range(self.blocks)) for _ in range(rooms)]
        self.news: dict[tuple[int, int], int] = {}  # of table
        self.owners: dict[tuple[int, int], tuple[int, int]] = {}  # of owner and base

    @property
    def shape(self) -> tuple[int, int]:
        return self.slots // SHARE, self.capacity + BLOCK

    def place(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self.table[rows].gather(1, positions // BLOCK) * BLOCK + positions % BLOCK

    def seen(self, kept: Tensor, rows: int) -> Tensor:
        if self.rows is None:
            return kept[: rows // SHARE]
        positions = torch.arange(self.length, device=self.rows.device).expand(rows, -1)
        return kept[(self.rows // SHARE)[:, None], :, self.place(self.rows, positions)].transpose(
            1, 2
        )

    def visible(self, slots: int) -> Tensor:
        rooms = slots // SHARE
        reach = self.positions.view(rooms, SHARE, 1, 1)
        own = self.owner[:rooms, None, :, None] == self.ranks[:, None, None]
        seen = (own & (self.base[:rooms, None, :, None] * BLOCK + self.offsets <= reach)).flatten(2)
        # A slot that holds nothing sees the token that it writes into nobody's block: a row without
        # any key would be nan.
        seen |= torch.arange(seen.shape[2], device=seen.device) == self.places.view(rooms, SHARE, 1)
        return seen[:, None]

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        positions = torch.arange(length, device=sources.device).expand(len(sources), -1)
        a = self.place(sources, positions)
        b = self.place(targets, positions)
        for store in (*self.keys, *self.values):
            store[(targets // SHARE)[:, None], :, b] = store[(sources // SHARE)[:, None], :, a]

    def admits(self, slot: int, length: int) -> bool:
        first = slot // SHARE * SHARE
        taken = sum(
            max(len(self.own[s]), self.promised[s])
            for s in range(first, first + SHARE)
            if s != slot and self.own[s]
        )
        return not taken or taken + -(-length // BLOCK) <= self.blocks

    def grant(self, slot: int, length: int, promised: int = 0) -> bool:
        own = self.own[slot]
        left = self.left[slot // SHARE]
        more = -(-length // BLOCK) - len(own)
        self.promised[slot] = max(
            self.promised[slot], -(-max(length, promised) // BLOCK)
        )  # what does not fit moves where it does
        if more > len(left):
            return False
        for _ in range(more):
            block = left.pop()
            self.news[slot, len(own)] = block
            self.owners[slot // SHARE, block] = slot % SHARE, len(own)
            own.append(block)
        return True

    def takes(self, source: int, target: int) -> bool:
        own = len(self.own[source])
        promised = self.promised[source]
        if source // SHARE == target // SHARE or not self.admits(
            target, max(own, promised) * BLOCK
        ):
            return False
        return self.grant(target, own * BLOCK, promised * BLOCK)

    def free(self, slots: Iterable[int]) -> None:
        for slot in slots:
            for column, block in enumerate(self.own[slot]):
                self.news[slot, column] = self.blocks
                self.owners[slot // SHARE, block] = -1, 0
            self.left[slot // SHARE] += self.own[slot]
            self.own[slot], self.promised[slot] = [], 0

    def flush(self) -> None:
        device = self.indices.device
        if self.news:
            slot, column, block = torch.tensor(
                [(*at, block) for at, block in self.news.items()], device=device
            ).T
            self.table[slot, column] = block
        if self.owners:
            room, block, rank, base = torch.tensor(
                [(*at, *of) for at, of in self.owners.items()], device=device
            ).T
            self.owner[room, block], self.base[room, block] = rank, base
        self.news = {}
        self.owners = {}


def fitting(causal: Any, device: torch.device) -> int:
    """Tokens whose keys and values a CUDA device holds, for good: half of its free memory, and no
    more than training has left so far."""
    config = causal.config.get_text_config()
    shape = model_shape(config)
    size = shape.kv_heads * shape.head_dim
    token = 2 * config.num_hidden_layers * size * causal.dtype.itemsize
    allocated = torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated
    update = (
        torch.cuda.max_memory_allocated(device) - allocated
    )  # the probe of an update comes before the first completion
    return max(1, min(free // 2, free - update) // token)
