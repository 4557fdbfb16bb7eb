"""Copy rows and episodes, so that a user's function may change its copy without affecting other
code."""

from __future__ import annotations

import copy
from types import MappingProxyType, NoneType
from typing import Any, TypeVar

T = TypeVar("T")
ATOMS = frozenset((str, int, float, bool, bytes, complex, NoneType))
SHORT = 16  # only the two ends of a longer tuple are looked at


def copy_value(value: T) -> T:
    """Copy a value so that no changeable part is shared with the original.

    Mappings, lists, sets and (named) tuples are copied at every depth, other objects with
    `copy.deepcopy`. An object that cannot be copied, for example a lock, is shared. A long tuple
    with a number at both ends holds token ids or log-probs, so its entries are not visited. The
    cost of copying an episode therefore grows with its messages, not with its tokens.
    """
    try:
        return _copy_value(value)
    except RecursionError:  # it contains itself
        return _copy_deeply(value)


def _copy_value(value: Any) -> Any:
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {key: own if type(own) in ATOMS else _copy_value(own) for key, own in value.items()}
    if kind is tuple and len(value) > SHORT and {type(value[0]), type(value[-1])} <= {int, float}:
        return value
    if kind is list or kind is tuple:
        return kind([own if type(own) in ATOMS else _copy_value(own) for own in value])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*map(_copy_value, value))
    if kind is MappingProxyType:
        return MappingProxyType(_copy_value(dict(value)))
    return _copy_deeply(value)


def _copy_deeply(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:
        return value
