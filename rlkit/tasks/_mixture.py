"""Mix several tasks in one run. Weights set their shares of the prompts, and every row keeps the
reward and the environment of its own task."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

from rlkit.errors import ConfigError, DataError
from rlkit.tasks.splits import check_max_samples
from rlkit.types import Task, ranges, safe


@safe("parts", "weights")
@ranges(max_samples=(1, None))
def mixture(
    *,
    parts: Mapping[str, Callable[..., Sequence[Task]]],
    weights: Mapping[str, float] = {},
    max_samples: int | None = None,
) -> Callable[..., list[Task]]:
    """Return a factory that joins several named tasks. Called with `split`, it takes rows of the
    tasks in turn, and writes the task's name into `Task.part`.

    For every k, the first k rows hold `k · weight / Σ weights` rows of every part, with an error
    below one row. The prompt stream keeps the order of the parts (`rlkit.episodes.stream.take`), so
    a step of n prompts has the same shares. In "train", an epoch ends when all rows of every part
    have been used at least once. So if a part is too short for its weight, its rows repeat. In any
    other split no row is used twice: the split ends when one part has no more rows.

    Args:
      parts: factory of each task by name, called with `split`.
      weights: weight of each part by name, ≥ 0. A part's share of the prompts is its weight over
        the sum of all weights. A weight of 0 leaves the part out. A part without a weight has the
        weight 1.
      max_samples: largest number of rows, > 0; None for all.
    Raises: ConfigError if there are no parts, if a weight is below 0 or names an unknown part, or
      if max_samples is below 1. The factory raises DataError naming a part without rows.
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
    check_max_samples(max_samples, "all rows")
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
    """Set the row's part. In a mixture within a mixture, the part has both names, as in a/b."""
    return task._replace(part=f"{name}/{task.part}" if task.part else name)


def take_turns(weights: Mapping[str, float]) -> Iterator[str]:
    """Yield names in turn, without end. After any k turns, each name has had
    `k · weight / Σ weights` turns, with an error below one turn.

    Of the names behind their share, choose the one that would be first to fall a whole turn
    behind.

    Args:
      weights: weight of each name, > 0.
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
