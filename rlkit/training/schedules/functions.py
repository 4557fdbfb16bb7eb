"""Numbers as functions of the step, counted from 0.

The length `steps` may be left out in a schedule: there the function is given the steps it
spans, the run's or, inside a phase, the phase's (`rlkit.training.schedules.at`).
"""

from __future__ import annotations

import math

from rlkit.types import ranges


def constant(step: int, *, value: float) -> float:
    """The same at every step: in a phase, a number other than the whole run's.

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


@ranges(to=(0, None))
def decay(step: int, value: float, *, to: float, steps: int | None = None) -> float:
    """The configured value, falling along a line to `to` of itself: value · (1 - (1 - to) · min(1,
    step / steps)); `steps` > 0.

    >>> decay(5, 2.0, to=0.5, steps=10)
    1.5
    """
    return value * linear(step, start=1.0, end=to, steps=steps)


def _share(step: int, steps: int | None) -> float:
    if steps is None:
        raise ValueError(
            "steps=None: outside a schedule, which knows the run's length, give the number of steps"
        )
    if steps < 1:
        raise ValueError(f"steps={steps}: a schedule needs at least one step")
    return min(1.0, step / steps)
