"""Conditions on what a step measures: `reward/mean > 0.8 for 5`."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

GRAMMAR = "METRIC > NUMBER or METRIC > NUMBER for N, with >, >=, < or <=, N at least 1; for example 'reward/mean > 0.8 for 5'"
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


class Condition(NamedTuple):
    """`metric operator bound`, on `times` steps in a row."""

    metric: str
    operator: str
    bound: float
    times: int = 1


@functools.lru_cache(maxsize=64)
def condition(text: str) -> Condition:
    """Reads a condition: METRIC, one of > >= < <=, NUMBER, and perhaps `for N`, the steps in a row on which it has to hold.

    Raises: ValueError with the grammar.
    >>> condition("reward/mean > 0.8 for 5")
    Condition(metric='reward/mean', operator='>', bound=0.8, times=5)
    """
    found = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:\s+for\s+(\d+))?\s*", text)
    if not found or int(found[4] or 1) < 1:
        raise ValueError(f"'{text}' is no condition; write {GRAMMAR}")
    return Condition(found[1], found[2], float(found[3]), int(found[4] or 1))


def streak(condition: Condition, before: float, metrics: Mapping[str, float]) -> int:
    """Steps in a row on which a condition has held, after one more step. nan does not hold.

    A step without the metric is passed over, so that `eval/accuracy > 0.9 for 2` asks for two evaluations in a row.
    """
    if condition.metric not in metrics:
        return int(before)
    return int(before) + 1 if OPERATORS[condition.operator](metrics[condition.metric], condition.bound) else 0
