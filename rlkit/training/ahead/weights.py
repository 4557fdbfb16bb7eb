"""Keep versions of the trainable weights in memory shared by the trainer and the sampling
process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from rlkit.errors import EngineError

# Bytes copied at a time. The system's limit is a little below 2 GiB.
PIECE = 1 << 30


class WeightSlots:
    """Store the trainable weights of the latest versions in a file in memory. The file has n slots.
    Slot v mod n holds the number v, followed by the weights of version v.

    n = staleness + 1 slots are enough. When version v is written, the groups sampled by version `v
    - staleness - 1` have already been consumed. Therefore the slot of this older version is free.
    """

    def __init__(self, file: int, count: int, model: Any):
        self.file = file
        self.count = count
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.size = sum(p.numel() * p.element_size() for _, p in self.named)

    @property
    def layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, type and shape of each weight. Models with equal layouts can exchange
        weights."""
        return [(name, str(p.dtype), tuple(p.shape)) for name, p in self.named]

    def place(self, version: int) -> int:
        """Return the position of a version's number in the file. The weights of the version follow
        the number."""
        return version % self.count * (8 + self.size)

    def write(self, version: int) -> None:
        """Write the model's current weights into the slot of this version. Raise OSError if memory
        is too small."""
        self._fill(version, (p.detach().cpu() for _, p in self.named))

    def read(self, version: int) -> None:
        """Read a version's weights into the model. Raise EngineError if its slot holds another
        version."""
        at = self._find_slot(version)
        for _, p in self.named:
            own = torch.empty(p.shape, dtype=p.dtype)
            at = _copy(_read, self.file, own, at)
            p.data.copy_(own)

    def save(self, version: int) -> Tensor:
        """Return a version's weights as bytes, for a checkpoint. Raise EngineError if its slot
        holds another version."""
        out = torch.empty(self.size, dtype=torch.uint8)
        _copy(_read, self.file, out, self._find_slot(version))
        return out

    def restore(self, version: int, saved: Tensor) -> None:
        """Write the bytes that `save` returned back into the slot of their version."""
        if len(saved) != self.size:
            raise EngineError(
                f"the checkpoint's weights of version {version} have {len(saved)} bytes, and the"
                f" model's {self.size}"
            )
        self._fill(version, [saved])

    def _fill(self, version: int, parts: Iterable[Tensor]) -> None:
        """Write the weights of a version into its slot, and its number afterwards."""
        at = self.place(version) + 8
        for part in parts:
            at = _copy(os.pwrite, self.file, part.contiguous(), at)
        os.pwrite(self.file, version.to_bytes(8, "little"), self.place(version))

    def _find_slot(self, version: int) -> int:
        """Return the position of a version's weights in the file. Raise EngineError if the slot
        holds another version."""
        found = int.from_bytes(os.pread(self.file, 8, self.place(version)), "little")
        if found != version:
            raise EngineError(
                f"asynchrony=overlap: weights of version {version} were requested, but their slot"
                f" holds version {found}"
            )
        return self.place(version) + 8


def _read(file: int, data: memoryview, at: int) -> int:
    return os.preadv(file, [data], at)


def _copy(move: Callable[[int, memoryview, int], int], file: int, tensor: Tensor, at: int) -> int:
    """Move a contiguous tensor between the file and memory. Return the file position just after the
    tensor."""
    data = tensor.reshape(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(data):
        done += move(file, data[done : done + PIECE], at + done)
    return at + done


def make_shared_memory() -> int:
    """Open a nameless file in memory. The file exists as long as a process has it open. On systems
    other than Linux, the file is a temporary file on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlkit-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
