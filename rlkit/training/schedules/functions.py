"""Compute numbers as functions of the step. Steps count from 0.

In a schedule, `steps` may be left out. The value is then the length of the run or, inside a phase,
the length of the phase (`rlkit.training.schedules.resolve_schedules`).
"""

from __future__ import annotations

import math

from rlkit.types import ranges


def constant(step: int, *, value: float) -> float:
    """Return the same value at every step, for example to give a phase its own number.

    >>> constant(7, value=0.5)
    0.5
    """
    return value


def linear(step: int, *, start: float, end: float, steps: int | None = None) -> float:
    """Change linearly from `start` to `end`: `start + (end - start) · min(1, step / steps)`.
    `steps` must be greater than 0.

    >>> linear(5, start=1.0, end=0.0, steps=10)
    0.5
    """
    return start + (end - start) * _share(step, steps)


def cosine(step: int, *, start: float, end: float, steps: int | None = None) -> float:
    """Change along a half cosine from `start` to `end`: `end + (start - end) · (1 + cos(π · min(1,
    step / steps))) / 2`. `steps` must be greater than 0.

    >>> round(cosine(5, start=1.0, end=0.0, steps=10), 6)
    0.5
    """
    return end + (start - end) * (1 + math.cos(math.pi * _share(step, steps))) / 2


@ranges(to=(0, None))
def decay(step: int, value: float, *, to: float, steps: int | None = None) -> float:
    """Change linearly from the configured value to `to` times this value: `value · (1 - (1 - to) ·
    min(1, step / steps))`. `steps` must be greater than 0.

    >>> decay(5, 2.0, to=0.5, steps=10)
    1.5
    """
    return value * linear(step, start=1.0, end=to, steps=steps)


def _share(step: int, steps: int | None) -> float:
    if steps is None:
        raise ValueError(
            "steps=None: only a schedule knows the run's length; outside a schedule give the number"
            " of steps"
        )
    if steps < 1:
        raise ValueError(f"steps={steps}: a schedule needs at least one step")
    return min(1.0, step / steps)
