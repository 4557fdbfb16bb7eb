"""Choose a learning rate for each arm on each task, from runs on seeds of their own.

Arms at one shared rate are compared unfairly, because each algorithm has its own best rate. The
rule is fixed before any run: of all rates whose runs have ended on every seed, take the rate with
the highest mean score. Of equal scores, take the lower rate. The seeds of the choice are never
seeds of a score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlkit.errors import ConfigError
from rlkit.extras.bench.matrix import (
    PLACEBOS,
    MatrixRun,
    Row,
    markdown,
    matrix,
    read_row,
    write_rows,
)

SEEDS = range(100, 106)  # seeds of the choice
FEWEST = 5  # fewest rates to choose from
NEAR = 3.0  # rates within this factor of the chosen rate count for `near`
ROUNDING = 1e-9  # of logarithms
DIGITS = 9  # of a mean score: the order of the seeds makes no two equal means differ
KEY = "optimizer.lr"
# Above the table of `tabulate_rates`.
NOTE = (
    f"Each arm has the rate of its highest mean score on seeds {SEEDS[0]} to {SEEDS[-1]}, which are"
    " in no other table. The numbers are the rate, this score, and the mean score over the rates"
    f" within a factor of {NEAR:g} of the rate. Rates count if all of their runs ended; * marks the"
    " lowest and the highest of them: a better rate may lie outside. † marks a mean that leaves out"
    " a rate with failed runs: the arm is less robust than the number says."
)


class Choice(NamedTuple):
    """The rate chosen for an arm on a task. The scores are means over SEEDS.

    Attributes:
      score: mean score at the rate.
      near: mean score over the rates between rate / NEAR and rate · NEAR whose runs all ended. It
        shows how much an arm loses at a rate that is not its best.
      edge: True if the rate is the lowest or the highest of the rates whose runs all ended, so a
        better rate may lie outside.
      partial: True if `near` leaves out a rate because a run failed there.
    """

    rate: str
    score: float
    near: float
    edge: bool
    partial: bool = False


def read_rates(text: str, arms: Mapping[str, Sequence[str]]) -> list[str]:
    """Read the rates of `rates=`, in ascending order.

    Raises: ConfigError for fewer than FEWEST rates, for anything but positive numbers, and for an
      arm with a rate of its own.
    """
    rates = list(dict.fromkeys(filter(None, text.split(","))))
    try:
        distinct = set(map(float, rates))
        good = len(distinct) == len(rates) >= FEWEST and all(0 < rate < 1 for rate in distinct)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            f"rates={text}: give {FEWEST} or more different learning rates between 0 and 1, such as"
            " rates=6e-4,1e-3,2e-3,4e-3,8e-3"
        )
    for arm, own in arms.items():
        if any(word.startswith(f"{KEY}=") for word in own):
            raise ConfigError(f"rates={text}: {arm} sets {KEY} itself; remove one of the two")
    return sorted(rates, key=float)


def list_trials(
    folder: Path,
    tasks: Sequence[str],
    arms: Mapping[str, Sequence[str]],
    rates: Sequence[str],
    common: Sequence[str],
) -> dict[MatrixRun, str]:
    """List the runs of the choice, each with its rate. Placebos have no rate to choose."""
    own = {arm: words for arm, words in arms.items() if arm not in PLACEBOS}
    return {
        run._replace(note=f" at {rate}"): rate
        for seed in SEEDS
        for rate in rates
        for run in matrix(folder / "rates" / rate, tasks, own, [seed], [*common, f"{KEY}={rate}"])
    }


def write_trials(folder: Path, trials: Mapping[MatrixRun, str]) -> list[tuple[str, Row]]:
    """Write rates.csv with a row for each finished run of the choice. Return the rows, each with
    its rate."""
    rows = [(rate, row) for run, rate in trials.items() if (row := read_row(run))]
    if rows:
        write_rows(folder / "rates.csv", [{"rate": rate} | row for rate, row in rows])
    return rows


def choose_rates(
    rows: Sequence[tuple[str, Row]], rates: Sequence[str]
) -> dict[tuple[str, str], Choice]:
    """Choose a rate for each arm on each task.

    Args:
      rows: (rate, row of a run) for every finished run of the choice.
      rates: all tried rates, in ascending order.
    Returns: (task, arm) → choice. An arm on a task is left out if no rate has runs on all SEEDS.
    """
    scores: dict[tuple[str, str], dict[str, list[float]]] = {}
    for rate, row in rows:
        own = scores.setdefault((row["task"], row["arm"]), {})
        own.setdefault(rate, []).append(1 - float(row["regret"]))
    out: dict[tuple[str, str], Choice] = {}
    for place, found in scores.items():
        means = {
            rate: round(math.fsum(found[rate]) / len(SEEDS), DIGITS)
            for rate in rates
            if len(found.get(rate, ())) == len(SEEDS)
        }
        if not means:
            continue
        best = max(means, key=means.__getitem__)  # the first of equal ones
        around = [
            rate
            for rate in rates
            if abs(math.log(float(rate) / float(best))) < math.log(NEAR) + ROUNDING
        ]
        near = [means[rate] for rate in around if rate in means]
        edge = best in (min(means, key=float), max(means, key=float))
        partial = len(near) < len(around)
        out[place] = Choice(best, means[best], sum(near) / len(near), edge, partial)
    return out


def with_rates(
    cells: Sequence[MatrixRun], chosen: Mapping[tuple[str, str], Choice]
) -> list[MatrixRun]:
    """Return the runs of the matrix at their chosen rates. Placebos keep the rate of the task. Runs
    of an arm without a choice are left out."""
    out = []
    for cell in cells:
        choice = chosen.get((cell.task, cell.arm))
        if choice is not None:
            cell = cell._replace(overrides=(*cell.overrides, f"{KEY}={choice.rate}"))
        if choice is not None or cell.arm in PLACEBOS:
            out.append(cell)
    return out


def tabulate_rates(
    chosen: Mapping[tuple[str, str], Choice], tasks: Sequence[str], arms: Sequence[str]
) -> str:
    """Write the chosen rates as a table."""

    def format_choice(choice: Choice | None) -> str:
        if choice is None:
            return "none"
        mark = "*" if choice.edge else ""
        missing = "†" if choice.partial else ""
        return f"{choice.rate}{mark}, {choice.score:.3f}, {choice.near:.3f}{missing}"

    lines = [
        [arm, *(format_choice(chosen.get((task, arm))) for task in tasks)]
        for arm in arms
        if arm not in PLACEBOS
    ]
    return markdown(["arm", *tasks], lines)
