"""Numbers as functions of the step, which is counted from 0.

The length `steps` may be left out in a schedule: there the function is given the steps that it spans, those of the run or, inside
a phase, those of the phase (`rlkit.training.schedules.at`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from rlkit.types import ranges


def constant(step: int, *, value: float) -> float:
    """The same at every step: in a phase, a number that differs from that of the whole run.

    >>> constant(7, value=0.5)
    0.5
    """
    return value


def linear(step: int, *, start: float, end: float, steps: int | None = None) -> float:
    """start + (end - start) · min(1, step / steps); `steps` > 0, step counts from 0.

    >>> linear(5, start=1.0, end=0.0, steps=10)
    0.5
    """
    return start + (end - start) * _share(step, steps)


def cosine(step: int, *, start: float, end: float, steps: int | None = None) -> float:
    """end + (start - end) · (1 + cos(π · min(1, step / steps))) / 2; `steps` > 0.

    >>> round(cosine(5, start=1.0, end=0.0, steps=10), 6)
    0.5
    """
    return end + (start - end) * (1 + math.cos(math.pi * _share(step, steps))) / 2


def exponential(step: int, *, start: float, end: float, steps: int | None = None) -> float:
    """start · (end / start)^min(1, step / steps): the same factor at every step; `steps` > 0, start and end of one sign and not 0.

    Raises: ValueError where start and end are not of one sign.
    >>> exponential(1, start=1.0, end=0.01, steps=2)
    0.1
    """
    if not start * end > 0:
        raise ValueError(f"start={start}, end={end}: must both be positive or both negative; to reach 0 choose linear or cosine")
    return start * (end / start) ** _share(step, steps)


def piecewise(step: int, *, points: Mapping[int, float] | Sequence[Sequence[float]], interpolate: bool = False) -> float:
    """The value of the last point that is not after `step`: steps, or lines between them with `interpolate`.

    Args:
      points: {step: value} or [[step, value], …], steps ascending. Before the first point the first value holds, after the last the last.
    Raises: ValueError where there is no point, or the steps do not ascend.
    >>> [piecewise(s, points={0: 1.0, 10: 0.0}) for s in (0, 5, 10, 99)]
    [1.0, 1.0, 0.0, 0.0]
    >>> piecewise(5, points=[[0, 1.0], [10, 0.0]], interpolate=True)
    0.5
    """
    pairs = [(float(s), v) for s, v in (points.items() if isinstance(points, Mapping) else points)]
    if not pairs or any(a >= b for (a, _), (b, _) in itertools.pairwise(pairs)):
        raise ValueError(f"points={points}: must be at least one [step, value], with ascending steps")
    before = [pair for pair in pairs if pair[0] <= step] or pairs[:1]
    (begun, value), after = before[-1], pairs[len(before) :]
    if not interpolate or not after or step <= begun:
        return value
    return value + (after[0][1] - value) * (step - begun) / (after[0][0] - begun)


@ranges(to=(0, None))
def decay(step: int, value: float, *, to: float, steps: int | None = None) -> float:
    """The configured value, falling along a line to `to` of itself: value · (1 - (1 - to) · min(1, step / steps)); `steps` > 0.

    >>> decay(5, 2.0, to=0.5, steps=10)
    1.5
    """
    return value * linear(step, start=1.0, end=to, steps=steps)


def _share(step: int, steps: int | None) -> float:
    if steps is None:
        raise ValueError("steps=None: outside a schedule, which knows the run's length, give the number of steps")
    if steps < 1:
        raise ValueError(f"steps={steps}: a schedule needs at least one step")
    return min(1.0, step / steps)
