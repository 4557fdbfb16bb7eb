"""Draw prompts from an endless stream of tasks. The seed and the epoch fix the order of the tasks.
The state holds a position in this order.

The state consists of two numbers and a sampler's state (`rlkit.episodes.samplers`), so it fits into
a checkpoint. A resumed run draws the same tasks as a run without interruption.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rlkit.episodes.samplers import State, TaskSampler, choose_tasks, uniform_sampler
from rlkit.errors import DataError
from rlkit.types import Task

CHANGED = (
    "the checkpoint has groups whose problems are no longer in the task's data; restore task.path"
    " and the data, or start a new run"
)


class StreamState(NamedTuple):
    """Hold a position in the stream: the first `position` tasks in the order of this epoch have
    been drawn."""

    epoch: int = 0
    position: int = 0
    sampler: State | None = None  # None: tasks are drawn in the order of the epoch


@functools.lru_cache(8)
def order(seed: int, epoch: int, n: int) -> Sequence[int]:
    """Return a permutation of 0 … n-1. The permutation depends only on seed, epoch and n, so every
    machine gets the same."""
    indices = list(range(n))
    random.Random(f"prompt stream/{seed}/{epoch}").shuffle(indices)
    return tuple(indices)


def order_of_parts(tasks: Sequence[Task], seed: int, epoch: int) -> list[int]:
    """Permute the tasks of each part of a mixture among the positions of this part. A position
    always holds a task of the same part, so every step keeps the shares of the mixture.

    Without a mixture, the result is that of `order`.
    """
    positions: dict[str, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        positions[task.part].append(i)
    out = [0] * len(tasks)
    for own in positions.values():
        for index, j in zip(own, order(seed, epoch, len(own)), strict=True):
            out[index] = own[j]
    return out


UNIFORM = uniform_sampler()


def take(
    tasks: Sequence[Task], state: StreamState, n: int, *, seed: int, sampler: TaskSampler = UNIFORM
) -> tuple[list[Task], StreamState]:
    """Draw the next n tasks. Return these tasks and the new state.

    Within an epoch no task is drawn twice. When an epoch ends, the call goes on with the next
    epoch, in another order. Therefore n may exceed the number of tasks. Two calls for a and then b
    tasks draw the same tasks as one call for a + b tasks.

    Args:
      tasks: the same tasks, in the same order, in every call of a run.
      state: the position so far; StreamState() at the start of a run.
      n: number of tasks, ≥ 0.
      seed: the run's seed.
      sampler: rule for choosing problems. If the rule has weights, it chooses the problems, and the
        order only decides which part of a mixture comes next. Such a rule draws no problem twice in
        a step, unless the step needs more problems than the part has.
    Raises: DataError if there are no tasks, or if the position exceeds the number of tasks. This
    happens if the tasks have changed since the state was saved.
    """
    epoch, position = state[:2]
    if not tasks:
        raise DataError(
            "there are no tasks to draw prompts from; check task.path and task.max_samples"
        )
    if not 0 <= position <= len(tasks):
        raise DataError(
            f"the prompt stream stands at {position} of {len(tasks)} tasks; the tasks changed since"
            " the checkpoint was written, so restore task.path, task.max_samples and the data, or"
            " start a new run"
        )
    drawn: list[Task] = []
    while len(drawn) < n:
        if position == len(tasks):
            epoch += 1
            position = 0
        rest = order_of_parts(tasks, seed, epoch)[position : position + n - len(drawn)]
        drawn += [tasks[i] for i in rest]
        position += len(rest)
    if sampler.weigh is None:
        return drawn, StreamState(epoch, position)
    known = choose_tasks(sampler, tasks, [task.part for task in drawn], state.sampler, seed=seed)
    return [tasks[i] for i in known["step"][len(known["step"]) - n :]], StreamState(
        epoch, position, known
    )


def take_again(
    tasks: Sequence[Task], before: StreamState, after: StreamState, n: int, *, seed: int
) -> list[Task]:
    """Return the n tasks of a past step, from the stream's states before and after this step.
    Raises DataError if the tasks have changed since."""
    if after.sampler is None:
        drawn, state = take(tasks, before, n, seed=seed)
        same = state[:2] == after[:2]
    else:
        same = len(after.sampler["table"]) == len(tasks)
        drawn = [tasks[i] for i in after.sampler["asked"][:n]] if same else []
    if not same or len(drawn) < n:
        raise DataError(CHANGED)
    return drawn
