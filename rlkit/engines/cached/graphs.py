"""CUDA graphs of a decoding step: one call starts all its kernels, hundreds of small ones."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

CAPTURED = ("cuda",)  # kinds of devices with captured steps
MOST_SHAPES = 48  # captured shapes held at once


class Shape(NamedTuple):
    """The numbers that a capture fixes; each combination is captured once."""

    settings: Any  # of the draw
    slots: int  # in a pass through the model
    pages: tuple[int, ...]  # to read for the slots of each part

    def covers(self, other: Shape) -> bool:
        """Whether a step of this shape also does the other's work: extra slots draw nothing, and
        extra pages are masked."""
        return (
            self.settings == other.settings
            and self.slots >= other.slots
            and len(self.pages) == len(other.pages)
            and all(own >= its for own, its in zip(self.pages, other.pages, strict=True))
        )


class Graphs:
    """Runs steps over buffers at fixed places. The first step of a shape runs kernel by kernel, the
    second is captured, and later ones are replayed.

    A graph lasts as long as its buffers and weights. At most `MOST_SHAPES` are held. A shape beyond
    them replays the smallest graph that covers it, if there is one.

    If a model cannot be captured, for instance because a step waits for the host, its first step or
    the capture fails. It then decodes without graphs, after one warning.
    """

    refused: ClassVar[WeakSet[Any]] = WeakSet()  # models that cannot be captured

    def __init__(self, model: Any, device: torch.device):
        self.model = model
        self.device = device
        # memory shared by all graphs: no graph reads values left there by another
        self.pool: Any = None
        self.captured = 0  # number of captures so far, including forgotten ones
        self.started: set[Shape] = set()
        self.replays: dict[Shape, Callable[[], None]] = {}

    def forget(self) -> None:
        """Drop all graphs, because their buffers or weights have moved."""
        self.started = set()
        self.replays = {}
        self.pool = None  # the allocator frees a pool with its last graph

    def __call__(self, shape: Shape, step: Callable[[], None]) -> None:
        """Run a step of this shape, as a graph if possible."""
        if shape not in self.replays and len(self.replays) >= MOST_SHAPES:
            covering = [own for own in self.replays if own.covers(shape)]
            shape = min(covering, key=lambda own: (sum(own.pages), own.slots), default=shape)
        elif shape not in self.replays and self.model not in self.refused:
            try:
                if shape not in self.started:
                    with refuse_host_waits(self.device):
                        step()
                    self.started.add(shape)
                    return
                self.pool = self.pool or memory_pool(self.device)
                self.replays[shape] = capture(step, self.device, self.pool)
                self.captured += 1
            except RuntimeError as error:  # CUDA's own, and out of memory
                self.refused.add(self.model)
                reason = str(error).strip().partition("\n")[0]
                warnings.warn(
                    f"the decoding step of {type(self.model).__name__} cannot be captured as a CUDA"
                    " graph, so it runs without one, more slowly;"
                    f" generation.engine.cuda_graphs=false skips the attempt: {reason}",
                    stacklevel=2,
                )
        self.replays.get(shape, step)()


def can_capture(device: torch.device) -> bool:
    """Whether steps on this device can be captured."""
    return device.type in CAPTURED


@contextmanager
def refuse_host_waits(device: torch.device) -> Iterator[None]:
    """Within the block, raise RuntimeError if the host waits for the device: such a wait would
    break a capture."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode(before)


def memory_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else object()


@cache
def side_stream(device: torch.device) -> Any:
    """One stream for all captures: every stream that multiplies matrices keeps memory for good, and
    a new stream for each capture would add up."""
    return torch.cuda.Stream(device)


def capture(step: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """Capture the kernels of a step without running them; return a function that starts them all.

    torch.cuda.graph would also empty the memory cache first, and leave the side stream in force
    after a failed capture.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.stream(side_stream(device)):
        # other threads may allocate meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            step()
        except BaseException:
            abandon(graph, device, pool)
            raise
        graph.capture_end()
    return graph.replay


def abandon(graph: Any, device: torch.device, pool: Any) -> None:
    """End a broken capture. `capture_end` raises before it tells the allocator that the capture has
    ended. The allocator's filter would then go on sending this thread's blocks on the side stream
    to the pool, and the pool would keep its memory for good."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    # private names of torch, absent in a version without this filter
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
