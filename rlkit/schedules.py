"""Numbers as functions of progress. A schedule never edits an experiment: it gives the experiment of a step."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Schedule(NamedTuple):
    """`numbers` maps a path (kl.coef, optimizer.lr, algorithm.policy_loss.clip_high) to a function.

    A path is a dotted key, {"kl.coef": f}, or nested mappings, {"kl": {"coef": f}}, which a command line can override.
    The function takes the step, counted from 0; where its second positional parameter is `value`, also the configured number.
    """

    numbers: Mapping[str, Any] = {}

    @property
    def paths(self) -> dict[str, Callable[..., float]]:
        """Dotted path → function."""
        return _flat(self.numbers)


def _flat(numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Callable[..., float]]:
    paths: dict[str, Callable[..., float]] = {}
    for key, value in numbers.items():
        paths |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return paths


def linear(step: int, *, start: float, end: float, steps: int) -> float:
    """start + (end - start) · min(1, step / steps); `steps` > 0, step counts from 0.

    >>> linear(5, start=1.0, end=0.0, steps=10)
    0.5
    """
    return start + (end - start) * min(1.0, step / _positive(steps))


def cosine(step: int, *, start: float, end: float, steps: int) -> float:
    """end + (start - end) · (1 + cos(π · min(1, step / steps))) / 2; `steps` > 0.

    >>> round(cosine(5, start=1.0, end=0.0, steps=10), 6)
    0.5
    """
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, step / _positive(steps)))) / 2


def decay(step: int, value: float, *, to: float, steps: int) -> float:
    """The configured value, falling along a line to `to` of itself: value · (1 - (1 - to) · min(1, step / steps)); `steps` > 0.

    >>> decay(5, 2.0, to=0.5, steps=10)
    1.5
    """
    return value * linear(step, start=1.0, end=to, steps=steps)


def _positive(steps: int) -> int:
    if steps < 1:
        raise ValueError(f"steps={steps}: a schedule needs at least one step")
    return steps


def at(experiment: Any, step: int) -> Any:
    """The experiment with every scheduled number as it is at `step`.

    Raises: KeyError naming the path that binds nothing.
    """
    for path, function in experiment.schedule.paths.items():
        experiment = replace(experiment, path.split("."), functools.partial(_value, function, step), path)
    return experiment


def _value(function: Callable[..., float], step: int, configured: float) -> float:
    positional = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return function(step, configured) if len(positional) > 1 else function(step)


def replace(node: Any, keys: list[str], change: Callable[[Any], float], path: str) -> Any:
    """A copy of nested NamedTuples, mappings and partial functions with one number changed."""
    key, rest = keys[0], keys[1:]
    known: Mapping[str, Any]
    if isinstance(node, functools.partial):
        known = node.keywords
    elif hasattr(node, "_asdict"):
        known = node._asdict()
    elif isinstance(node, Mapping):
        known = node
    else:
        known = {}
    if key not in known:
        raise KeyError(f"'{path}' binds nothing: there is no '{key}'; here are: {', '.join(map(str, known)) or 'no numbers'}")
    if not rest and not isinstance(known[key], int | float):
        raise KeyError(f"'{path}' is not a number")
    new = replace(known[key], rest, change, path) if rest else type(known[key])(change(known[key]))
    if isinstance(node, functools.partial):
        return functools.partial(node.func, *node.args, **{**known, key: new})
    return node._replace(**{key: new}) if hasattr(node, "_replace") else {**node, key: new}
