"""CUDA graphs of a decoding step: its kernels, hundreds of small ones, started all at once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

CAPTURED = ("cuda",)  # kinds of devices on which steps are captured
MOST_SHAPES = 48  # shapes that are captured at once; what is left runs kernel by kernel


class Shape(NamedTuple):
    """The host's numbers that a captured step depends on; each combination is captured once."""

    settings: Any  # of the draw
    slots: int  # that go through the model
    pages: tuple[int, ...]  # that the step reads for the slots of each part

    def covers(self, other: Shape) -> bool:
        """Whether a step of this shape also does the other's work: further slots draw nothing, and
        further pages are masked."""
        return (
            self.settings == other.settings
            and self.slots >= other.slots
            and len(self.pages) == len(other.pages)
            and all(own >= its for own, its in zip(self.pages, other.pages, strict=True))
        )


class Graphs:
    """Steps over buffers that stay where they are: started kernel by kernel the first time in a
    shape, captured the second, replayed then.

    They last as long as the buffers and the weights that they read. At most `MOST_SHAPES` are held
    at once. A shape beyond them replays the smallest one that covers it, where there is one.

    A model that cannot be captured, one that asks the host for instance, is found by its first step
    or by the capture. It decodes without from then on, with one warning.
    """

    refused: ClassVar[WeakSet[Any]] = WeakSet()  # models that cannot be captured

    def __init__(self, model: Any, device: torch.device):
        self.model = model
        self.device = device
        self.pool: Any = (
            None  # memory that all of them share: none needs what another has left there
        )
        self.captured = 0  # shapes so far, those that were forgotten among them
        self.started: set[Shape] = set()
        self.replays: dict[Shape, Callable[[], None]] = {}

    def forget(self) -> None:
        """Drop every graph, because the buffers or weights that they read have moved."""
        self.started = set()
        self.replays = {}
        self.pool = None  # the allocator ends a pool with its last graph

    def __call__(self, shape: Shape, step: Callable[[], None]) -> None:
        """Run the step, which has this shape, as a graph where that is possible."""
        if shape not in self.replays and len(self.replays) >= MOST_SHAPES:
            covering = [own for own in self.replays if own.covers(shape)]
            shape = min(covering, key=lambda own: (sum(own.pages), own.slots), default=shape)
        elif shape not in self.replays and self.model not in self.refused:
            try:
                if shape not in self.started:
                    with host_looks_refused(self.device):
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
                    " graph and runs without, more slowly (generation.engine.cuda_graphs=false"
                    f" does not try): {reason}",
                    stacklevel=2,
                )
        self.replays.get(shape, step)()


def can_capture(device: torch.device) -> bool:
    """Whether steps on this device can be captured."""
    return device.type in CAPTURED


@contextmanager
def host_looks_refused(device: torch.device) -> Iterator[None]:
    """What makes the host wait for the device, and would break a capture, raises RuntimeError
    before anything is captured."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "prototype": it does not find everything
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
    """One for all captures: each stream that multiplies matrices keeps memory of its own for
    good, so graphs that are captured again cost none."""
    return torch.cuda.Stream(device)


def capture(step: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """The kernels of a step, which is not carried out, as a function that starts them all at once.

    torch.cuda.graph does the same, empties the memory cache before, and leaves the side stream in
    force where the capture fails.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.stream(side_stream(device)):
        graph.capture_begin(
            pool=pool, capture_error_mode="thread_local"
        )  # other threads may allocate meanwhile
        try:
            step()
        except BaseException:
            abandon(graph, device, pool)
            raise
        graph.capture_end()
    return graph.replay


def abandon(graph: Any, device: torch.device, pool: Any) -> None:
    """End a capture that broke off. `capture_end` raises before it tells the allocator, whose
    filter would go on sending to the pool what this thread allocates on the side stream, and would
    keep its memory for good."""
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(
        RuntimeError, AttributeError
    ):  # private names; the filter is also gone where the version has none
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
