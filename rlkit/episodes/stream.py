"""The endless stream of prompts: an order that the seed and the epoch fix, and a position in it.

The state is two numbers, so it fits into a checkpoint, and a resumed run draws what the interrupted one would have.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rlkit.errors import DataError
from rlkit.types import Task


class StreamState(NamedTuple):
    """Where the stream stands: `position` tasks of this epoch's order have been drawn."""

    epoch: int = 0
    position: int = 0


def order(seed: int, epoch: int, n: int) -> list[int]:
    """A permutation of 0 … n-1: a function of seed, epoch and n alone, the same on every machine."""
    indices = list(range(n))
    random.Random(f"prompt stream/{seed}/{epoch}").shuffle(indices)
    return indices


def order_of_parts(tasks: Sequence[Task], seed: int, epoch: int) -> list[int]:
    """The same for tasks of a mixture: shuffled within parts, so that every position keeps its part and a step the shares of the mixture.

    Tasks of one part, or of no mixture, come in `order`.
    """
    positions: dict[str, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        positions[task.part].append(i)
    out = [0] * len(tasks)
    for own in positions.values():
        for index, j in zip(own, order(seed, epoch, len(own)), strict=True):
            out[index] = own[j]
    return out


def take(tasks: Sequence[Task], state: StreamState, n: int, *, seed: int) -> tuple[list[Task], StreamState]:
    """The next n tasks, and the state after them.

    Within an epoch no task is drawn twice; an epoch that runs out is followed by the next one, in its own order, in the
    same call if need be. So n may exceed the number of tasks, and drawing a and then b tasks equals drawing a + b.

    Args:
      tasks: the same ones, in the same order, in every call of a run.
      state: StreamState() at the start of a run.
      n: how many, 0 or more.
      seed: the run's.
    Raises: DataError for no tasks, or a state that lies beyond them (they changed since it was saved).
    """
    epoch, position = state
    if not tasks:
        raise DataError("there are no tasks to draw prompts from; check task.path and task.max_samples")
    if not 0 <= position <= len(tasks):
        raise DataError(
            f"the prompt stream stands at {position} of {len(tasks)} tasks; the tasks changed since the checkpoint was "
            "written, so restore task.path, task.max_samples and the data, or start a new run"
        )
    drawn: list[Task] = []
    while len(drawn) < n:
        if position == len(tasks):
            epoch, position = epoch + 1, 0
        rest = order_of_parts(tasks, seed, epoch)[position : position + n - len(drawn)]
        drawn += [tasks[i] for i in rest]
        position += len(rest)
    return drawn, StreamState(epoch=epoch, position=position)
