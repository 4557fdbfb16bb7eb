"""an algorithm's expected update, by enumeration, against the true gradient: algorithm=grpo,rloo"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlkit.algorithm import PARTS
from rlkit.commands.arguments import Arguments, drop, find_option
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.extras.bench.prove import Figures

# key → path of a user's function in the experiment; the critic is perfect and has no loss
OWN = {name: path for name, (path, _, _) in PARTS.items() if name != "value_loss"}
OWN["loss"] = "algorithm.policy_loss"
# Everything else around a user's own part is exact. An estimator needs a KL with a coefficient.
AROUND = {"algorithm": "rloo", "kl": "none"}
AROUND_ESTIMATOR = {"algorithm": "rloo", "kl": "k3"}
HEAD = """| | 2, fresh | 3, fresh | 2, stale | 3, stale | easy, turns 1 to 3 | hard, turns 1 to 3 |
|---|---|---|---|---|---|---|"""


def command(arguments: Arguments) -> int:
    """Compute an algorithm's expected update by enumeration, beside the true gradient.

    KEY=VALUE       overrides of a run; several values by commas make a line each
    advantage=NAME  a function of your own, as my_module.my_function, in the place of this part;
                    likewise loss=, aggregation= and the other parts

        rlkit prove algorithm=grpo,rloo kl=none
        rlkit prove advantage=rlkit.functional.group_mean
    """
    from rlkit.runs.sweeps import expand

    own = {key: path for key, path in OWN.items() if find_option(arguments.overrides, key)}
    parts = {path: str(find_option(arguments.overrides, key)) for key, path in own.items()}
    words = drop(arguments.overrides, *own)
    print("each cell: angle, scale, bias, noise; by turn: scale, groups of 3, fresh\n")
    print(HEAD)
    named = [f"{key}={parts[path]}" for key, path in own.items()]
    for job in expand(words):
        label = shlex.join([*job, *named]) or "the defaults"
        print(row(label, job, parts, arguments.config_dir), flush=True)
    return 0


def row(
    label: str,
    words: Sequence[str],
    parts: dict[str, str] | None = None,
    config_dir: str | None = None,
) -> str:
    """Compute a line of the table.

    Args:
      words: overrides of a run.
      parts: path in the experiment → dotted name of the user's function in its place.
    Raises: ConfigError for an estimator of a KL without weight.
    """
    from rlkit.config.experiment import experiment
    from rlkit.config.problems.schedules import build_first_steps
    from rlkit.config.schema import resolve
    from rlkit.extras.bench.prove import SIZES, STALENESS, prove

    given = {path: resolve(name) for path, name in (parts or {}).items()}
    around = AROUND_ESTIMATOR if "kl.estimator" in given else AROUND
    usual = {"generation.max_new_tokens": "1"} | (around if given else {})
    words = [f"{key}={value}" for key, value in usual.items() if not find_option(words, key)] + [
        *words
    ]
    keywords: dict[str, Any] = {path.replace(".", "__"): part for path, part in given.items()}
    x = experiment(*words, config_dir=config_dir, **keywords)
    x = next(iter(build_first_steps(x).values()))
    if "kl.estimator" in given and not x.kl.active:
        raise ConfigError(
            f"{label}: this estimator has no effect without a KL; leave kl= out, or set kl.coef"
            " above 0"
        )
    figures = [prove(x, size, staleness) for staleness in STALENESS for size in SIZES]
    turns = [" ".join(map(format_hundredths, own)) for own in figures[1].turns]
    return f"| `{label}` | {' | '.join([*map(cell, figures), *turns])} |"


def cell(figures: Figures) -> str:
    """Write angle, scale, bias and noise as cells of the table."""
    if math.isnan(figures.angle):
        return "no update"
    numbers = " ".join(map(format_hundredths, (figures.scale, figures.bias)))
    return f"{round(figures.angle, 6):.1f}° {numbers} {round(figures.noise, 6):.0f}"


def format_hundredths(number: float) -> str:
    """Write a figure with two decimals. It is first rounded to six, because float64 may miss a tie
    or a 0 by a tiny amount."""
    return f"{round(number, 6) + 0.0:.2f}"
