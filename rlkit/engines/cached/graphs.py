"""CUDA graphs of a decoding step: its kernels, hundreds of small ones, started all at once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar
from weakref import WeakSet

import torch

CAPTURED = ("cuda",)  # kinds of devices on which steps are captured
MOST_SHAPES = 24  # shapes that an engine captures in its life; what is left runs kernel by kernel


class Graphs:
    """Steps over buffers that stay where they are: started kernel by kernel the first time in a
    shape, captured the second, replayed then.

    They last as long as the engine: its cache and its weights stay where they are. At most
    `MOST_SHAPES` are captured; of others, the next larger one that was captured is replayed, whose
    further slots draw nothing.

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
        self.captured = 0  # shapes so far
        self.started: set[Any] = set()
        self.replays: dict[tuple[Any, int], Callable[[], None]] = {}  # (settings, slots) → replay

    def forget(self) -> None:
        """Buffers or weights have moved: what was captured reads where they were."""
        self.started = set()
        self.replays = {}

    def __call__(self, settings: Any, slots: int, step: Callable[[], None]) -> None:
        """The step for the first `slots` slots, captured for these settings."""
        shape = settings, slots
        if shape not in self.replays and self.captured >= MOST_SHAPES:
            larger = [n for own, n in self.replays if own == settings and n > slots]
            shape = settings, min(larger, default=slots)
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
    good."""
    return torch.cuda.Stream(device)


def capture(step: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """The kernels of a step, which is not carried out, as a function that starts them all at once.

    torch.cuda.graph does the same, empties the memory cache before, and leaves the side stream in
    force where the capture fails. Under autocast the weights have been cast, and the casts kept, by
    the passes before.
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
