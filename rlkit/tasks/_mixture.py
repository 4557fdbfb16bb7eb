"""Several tasks in one run: weights set their shares of the prompts, and every row keeps its own
task's reward and environment."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

from rlkit.errors import ConfigError, DataError
from rlkit.types import Task, ranges, safe


@safe("parts", "weights")
@ranges(max_samples=(1, None))
def mixture(
    *,
    parts: Mapping[str, Callable[..., Sequence[Task]]],
    weights: Mapping[str, float] = {},
    max_samples: int | None = None,
) -> Callable[..., list[Task]]:
    """Join named tasks: `(split=…)` → their rows in turn, each with `Task.part`.

    For every k, the first k rows hold k · weight / Σ weights rows of every part, to within one. The
    prompt stream keeps this (`rlkit.tasks.take`), so a step of n prompts has its shares too. In
    "train", an epoch ends when every part has been gone through whole, so rows of a part too short
    for its weight repeat. In any other split no row stands twice: it ends when a part ends.

    Args:
      parts: name → factory of a task, called with `split`.
      weights: name → share of the prompts, relative to the sum, ≥ 0. 0 leaves the part out; a part
        without a weight has 1.
      max_samples: rows at most, > 0; None for all.
    Raises: ConfigError for no parts, a weight below 0 or of an unknown part, or max_samples below
      1. DataError, when called, that names a part without rows.
    """
    unknown = [name for name in weights if name not in parts]
    if unknown:
        raise ConfigError(
            f"task.weights.{unknown[0]}: there is no such part; the parts are"
            f" {', '.join(parts) or 'none'}"
        )
    for name, weight in weights.items():
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not 0 <= weight < math.inf
        ):
            raise ConfigError(
                f"task.weights.{name} is {weight!r}; it must be a number of at least 0"
            )
    if max_samples is not None and max_samples < 1:
        raise ConfigError(
            f"task.max_samples is {max_samples}; it must be at least 1, or null for all rows"
        )
    used = {name: weights.get(name, 1.0) for name in parts if weights.get(name, 1.0) > 0}
    if not used:
        raise ConfigError(
            "task=mixture has no part of a weight above 0; add one with"
            " +task@task.parts.NAME=OPTION"
        )

    def tasks(*, split: str) -> list[Task]:
        rows = {name: [_set_part(task, name) for task in parts[name](split=split)] for name in used}
        empty = [name for name in rows if not rows[name]]
        if empty:
            raise DataError(
                f"task.parts.{empty[0]} has no rows in split={split}; give it some, or set"
                f" task.weights.{empty[0]}=0"
            )
        drawn = dict.fromkeys(rows, 0)
        mixed: list[Task] = []
        for name in take_turns(used):
            spent = (
                drawn[name] == len(rows[name])
                if split != "train"
                else all(drawn[n] >= len(rows[n]) for n in rows)
            )
            if spent or len(mixed) == max_samples:
                return mixed
            mixed.append(rows[name][drawn[name] % len(rows[name])])
            drawn[name] += 1
        raise AssertionError("turns never end")

    return tasks


def _set_part(task: Task, name: str) -> Task:
    """Set the row's part. In a mixture within a mixture it has both names."""
    return task._replace(part=f"{name}/{task.part}" if task.part else name)


def take_turns(weights: Mapping[str, float]) -> Iterator[str]:
    """Yield names in turn, without end. After any k turns, each name has had k · weight / Σ weights
    of them, to within one.

    Among the names behind their share, choose the one that would be first to fall a whole turn
    behind.

    Args:
      weights: > 0.
    Source: Tijdeman 1980, The chairman assignment problem, Discrete Mathematics 32.
    """
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    scale = math.lcm(*(w.denominator for w in exact.values()))
    whole = {name: int(w * scale) for name, w in exact.items()}
    total = sum(whole.values())
    common = math.lcm(*whole.values())
    counts = dict.fromkeys(whole, 0)
    for k in itertools.count(1):
        behind = [name for name, w in whole.items() if k * w > counts[name] * total]
        name = min(behind, key=lambda name: (counts[name] + 1) * (common // whole[name]))
        counts[name] += 1
        yield name
