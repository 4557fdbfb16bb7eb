"""The error messages for hyperparameters out of their ranges."""

from __future__ import annotations

import math


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ValueError naming the argument, its value and the allowed range, unless `holds`.

    Write the condition so that nan fails it: `0 < value`, not `not value <= 0`.

    >>> require(0 < -1, "clip_high", -1, "> 0")
    Traceback (most recent call last):
    ValueError: clip_high is -1; allowed: > 0
    """
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")


def require_positive(**numbers: float) -> None:
    """Raise a ValueError for the first of these arguments that is not > 0 and finite."""
    for name, number in numbers.items():
        require(0 < number < math.inf, name, number, "> 0 and finite")


def require_unsigned(**numbers: float) -> None:
    """Raise a ValueError for the first of these arguments that is not ≥ 0 and finite."""
    for name, number in numbers.items():
        require(0 <= number < math.inf, name, number, "≥ 0 and finite")
