"""Seed, save and restore the random generators of Python, numpy and torch. A saved state has plain
types.

rlkit's own sampling does not draw from these generators; it is a function of seed, step, prompt and
sample. A user's reward or environment may draw from them. Then its draws are a function of the same
four numbers (`await_with_seed`, `seed_block`), whatever else runs, in any process.
"""

from __future__ import annotations

import random
import types
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rlkit.system.shared_state import get_current_watch

T = TypeVar("T")


def seed(value: int) -> None:
    """Seed every generator with any integer."""
    _seed_on_host(value)
    if torch.accelerator.is_available():  # else torch keeps three tracebacks, which takes 2 ms
        torch.manual_seed(value)


def _seed_on_host(value: int) -> None:
    """Seed all generators except the GPU generators. This takes a tenth of the time of `seed` (9
    us)."""
    import numpy as np

    random.seed(value)
    np.random.seed(value % 2**32)
    torch.default_generator.manual_seed(value)


def state() -> dict[str, Any]:
    """Return the state of every generator, as numbers and tensors that
    `torch.load(weights_only=True)` can load."""
    import numpy as np

    version, keys, gauss = random.getstate()
    name, mersenne, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(keys), gauss],
        "numpy": [
            str(name),
            torch.tensor(np.asarray(mersenne).astype("int64")),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore(saved: dict[str, Any]) -> None:
    """Restore every generator to a result of `state`. Generators of missing devices are left
    out."""
    import numpy as np

    version, keys, gauss = saved["python"]
    random.setstate((version, tuple(keys), gauss))
    name, mersenne, *rest = saved["numpy"]
    np.random.set_state((name, mersenne.numpy().astype("uint32"), *rest))
    torch.set_rng_state(saved["torch"].cpu())
    for device, cuda in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda.cpu(), device)


@contextmanager
def seed_block(value: int) -> Iterator[None]:
    """Seed every generator at the start of this block, and restore all of them after it."""
    with keep_generators():
        seed(value)
        yield


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore every generator after this block."""
    before = state()
    try:
        yield
    finally:
        restore(before)


@types.coroutine
def await_with_seed(value: int, coroutine: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await a coroutine, and make its random draws depend on this seed alone, whatever runs while
    it waits.

    The generators are not restored after it; put one `keep_generators` around all coroutines of a
    loop. If the coroutine waits for a thread, this thread has no generators of its own. Whenever
    the coroutine waits, any process-wide state it has changed is put back
    (`rlkit.system.shared_state`).
    """
    _seed_on_host(value)
    resume = coroutine.send
    given = None
    watch = get_current_watch()
    while True:
        try:
            waits_for = resume(given)
        except StopIteration as end:
            return end.value
        finally:
            watch.look()
        own = state()
        try:
            resume = coroutine.send
            given = yield waits_for
        except BaseException as error:  # cancelled, or closed
            resume = coroutine.throw
            given = error
        restore(own)
