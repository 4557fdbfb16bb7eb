"""Read and replace the numbers in an experiment. A dotted path names a number, for example kl.coef
or algorithm.policy_loss.clip_high."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlkit.errors import list_parameters
from rlkit.types import Controller, is_record


def flatten_numbers(numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to one mapping with dotted keys. Empty inner mappings stay as
    values."""
    paths: dict[str, Any] = {}
    for key, value in numbers.items():
        paths |= (
            flatten_numbers(value, f"{prefix}{key}.")
            if isinstance(value, Mapping) and value
            else {f"{prefix}{key}": value}
        )
    return paths


def list_fields(node: Any) -> Mapping[str, Any]:
    """Return the fields of a node: a NamedTuple, a mapping, or the keywords of a partial
    function."""
    if isinstance(node, functools.partial):
        return node.keywords
    if is_record(node):
        return node._asdict()
    return node if isinstance(node, Mapping) else {}


def list_settable(node: Any) -> Mapping[str, Any]:
    """Return the value of `list_fields`. For a partial function, add the defaults of its unset
    keywords."""
    if not isinstance(node, functools.partial):
        return list_fields(node)
    defaults = {
        p.name: p.default for p in list_parameters(node).values() if p.default is not p.empty
    }
    return defaults | node.keywords


def replace(node: Any, keys: list[str], change: Callable[[Any], float], path: str) -> Any:
    """Copy nested NamedTuples, mappings and partial functions, and change one number or one
    Controller in the copy.

    The new value of a field declared as a whole number is rounded.

    Args:
      keys: the rest of the path, from this node on.
      change: old value → new value.
      path: the whole path, for messages.
    Raises: KeyError with the path if the path does not lead to a number.
    """
    key = keys[0]
    rest = keys[1:]
    known = list_settable(node)
    if key not in known:
        raise KeyError(
            f"'{path}' names no number: there is no '{key}'; there are:"
            f" {', '.join(map(str, known)) or 'no numbers'}"
        )
    old = known[key]
    if not rest and (isinstance(old, bool) or not isinstance(old, int | float | Controller)):
        raise KeyError(f"'{path}' is not a number")
    if rest:
        new = replace(old, rest, change, path)
    else:
        new = change(old)
        new = round(new) if _is_whole(node, key, old) else float(new)
    if isinstance(node, functools.partial):
        return functools.partial(node.func, *node.args, **{**node.keywords, key: new})
    return node._replace(**{key: new}) if is_record(node) else {**node, key: new}


def _is_whole(node: Any, key: str, old: Any) -> bool:
    """Return whether a field is declared as a whole number; without a declared number, whether its
    value `old` is one."""
    declared = None
    if not isinstance(node, Mapping):
        own = node.func if isinstance(node, functools.partial) else type(node)
        parameters = list_parameters(own)
        declared = parameters[key].annotation if key in parameters else None
    named = set(re.findall(r"\w+", str(declared)))
    return isinstance(old, int) if named.isdisjoint(("int", "float")) else "float" not in named
