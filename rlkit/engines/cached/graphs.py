"""Run decoding steps as CUDA graphs. A step has hundreds of small GPU kernels, and one call of a
graph starts all of these kernels."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

MOST_SHAPES = 48  # the most captured shapes kept at once


class Shape(NamedTuple):
    """Hold the settings and sizes that a captured graph cannot change. Each combination is captured
    once."""

    settings: Any  # the sampling parameters that change a captured step
    slots: int  # number of slots in a step
    pages: tuple[int, ...]  # for each range of slots: number of pages to read for every slot

    def covers(self, other: Shape) -> bool:
        """Return whether a step of this shape can replace a step of the other shape. No token is
        sampled in the additional slots, and the additional pages are masked."""
        return (
            self.settings == other.settings
            and self.slots >= other.slots
            and len(self.pages) == len(other.pages)
            and all(own >= its for own, its in zip(self.pages, other.pages, strict=True))
        )


class Graphs:
    """Run decoding steps over buffers at fixed addresses. The first step of a shape runs kernel by
    kernel, the second step is captured as a graph, and later steps replay the graph.

    A graph is valid as long as its buffers and weights stay in place. At most `MOST_SHAPES` graphs
    are kept. Once this number is reached, a step of a new shape replays the smallest graph with at
    least as many slots and pages. If no graph is large enough, the step runs kernel by kernel.

    A model cannot be captured if, for example, its step makes the host wait for the GPU. In this
    case the first step or the capture fails, and the model decodes without graphs after one
    warning.
    """

    refused: ClassVar[WeakSet[Any]] = WeakSet()  # models that cannot be captured

    def __init__(self, model: Any, device: torch.device):
        self.model = model
        self.device = device
        # All graphs share this memory. No graph reads values left in it by another graph.
        self.pool: Any = None
        self.captured = 0  # number of captures so far, including graphs dropped since
        self.started: set[Shape] = set()
        self.replays: dict[Shape, Callable[[], None]] = {}

    def forget(self) -> None:
        """Drop all graphs. Call this function when the buffers or weights of the graphs have
        moved."""
        self.started = set()
        self.replays = {}
        self.pool = None  # the allocator frees a pool when its last graph is freed

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
            except RuntimeError as error:  # an error of CUDA, or no memory
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
    """Return whether steps on this device can be captured."""
    return device.type == "cuda"


@contextmanager
def refuse_host_waits(device: torch.device) -> Iterator[None]:
    """Return a context manager for code in which the host must not wait for the GPU. If the code
    waits, it raises RuntimeError. A wait during a capture would make the capture fail."""
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
    """Return the stream used for all captures on this device. Every stream keeps memory for good
    once it has multiplied matrices, so a new stream for each capture would use more and more
    memory."""
    return torch.cuda.Stream(device)


def capture(step: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """Capture the GPU kernels of a step without running them. Return a function that starts all
    captured kernels.

    torch.cuda.graph is not used for two reasons. It would first empty the memory cache, and it
    would leave the side stream in use after a failed capture.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.stream(side_stream(device)):
        # "thread_local": other threads may allocate memory during the capture
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            step()
            graph.capture_end()
        except BaseException:
            abandon(graph, device, pool)
            raise
    return graph.replay


def abandon(graph: Any, device: torch.device, pool: Any) -> None:
    """End a broken capture.

    `capture_end` raises an error before it tells the allocator that the capture has ended. Without
    the private calls below, the allocator would still take this thread's memory on the side stream
    from the pool. The pool would then keep its memory for good.
    """
    with contextlib.suppress(RuntimeError):
        graph.capture_end()
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    # private functions of torch; a version without them needs no calls
    with contextlib.suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
