"""Does every sentence of compare, plan, bench and the report keep its promised level?

    python experiments/sentences/run.py [--pages 500]
    python experiments/sentences/run.py --only 'rlkit plan' --out FOLDER

The script simulates runs with a known truth, lets the package's own functions print their
sentences, and counts how often these are true. It writes results.csv, a row for each promise and
setting, and prints the table of README.md. The random numbers are fixed.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simulate
from simulate import Count, Setting

from rlkit.runs.comparing import TO_CLAIM
from rlkit.system.extras import list_extras

HERE = Path(__file__).parent
SEEDS = (3, 5, 10, 20, 50)
ACCURACIES = (0.5, 0.9, 0.98, 0.995, 0.998)


class Promise(NamedTuple):
    """The level promised by one kind of sentence, and the function that checks it."""

    says: str  # words of the sentence
    statistic: str
    at_least: float | None  # the promised level, None if the promise is an upper limit
    at_most: float | None
    count: Callable[[Setting, int, np.random.Generator], Count | None]
    claims: bool = False  # below TO_CLAIM seeds the sentence is never printed


PROMISES = {
    "rlkit compare, claim": Promise(
        "B is better than A by …",
        "pages of four equal lines with a claim",
        None,
        0.05,
        simulate.compare_claims,
        True,
    ),
    "rlkit compare, interval": Promise(
        "(… to …)", "hold the difference", 0.95, None, simulate.compare_intervals
    ),
    "rlkit compare, seeds needed": Promise(
        "to see … you need N seeds", "N seeds find it", 0.8, None, simulate.compare_needs
    ),
    "rlkit compare, seen": Promise(
        "these n seeds see …", "find it", 0.8, None, simulate.compare_sees, True
    ),
    "rlkit compare, enough": Promise(
        "n seeds are enough to see …",
        "pages where they are not",
        None,
        0.2,
        simulate.compare_enough,
        True,
    ),
    "rlkit compare, fall": Promise(
        "A ends below its start",
        "pages of three unchanged lines with a claim",
        None,
        0.05,
        simulate.falls_claimed,
        True,
    ),
    "rlkit compare, fall's interval": Promise(
        "(… to …)", "hold the fall", 0.95, None, simulate.falls_intervals
    ),
    "rlkit plan, seeds": Promise(
        "B against A: N seeds", "N seeds find it", 0.8, None, simulate.plan_needs
    ),
    "rlkit plan, pilot's spread": Promise(
        "if it is no larger than the pilot's, N are enough",
        "N seeds find it",
        0.8,
        None,
        simulate.plan_likely,
    ),
    "rlkit plan, seen": Promise(
        "a difference of … is found 4 times in 5", "find it", 0.8, None, simulate.plan_sees
    ),
    "rlkit bench, claims": Promise(
        "B is better than A by …, q = …",
        "share of false claims, some arms equal",
        None,
        0.05,
        simulate.bench_claims,
        True,
    ),
    "rlkit bench, equal arms": Promise(
        "B is better than A by …, q = …",
        "pages of six equal arms with a claim",
        None,
        0.05,
        simulate.bench_nulls,
        True,
    ),
    "rlkit bench, claims' intervals": Promise(
        "(… to …)",
        "share of claims whose interval misses",
        None,
        0.05,
        simulate.bench_intervals,
        True,
    ),
    "rlkit bench, seen": Promise(
        "a difference of … would be seen", "find it", 0.8, None, simulate.bench_sees, True
    ),
    "rlkit bench, placebos": Promise(
        "above both placebos", "share of false claims", None, 0.05, simulate.bench_placebos, True
    ),
    "rlkit bench, scores": Promise(
        "0.846 (0.78 to 0.91)", "hold the mean", 0.95, None, simulate.bench_means
    ),
    "rlkit bench, IQM": Promise(
        "0.844 (0.783 to 0.911)",
        "hold the interquartile mean",
        0.95,
        None,
        simulate.bench_iqm,
        True,
    ),
    "report, seeds": Promise(
        "after 0.984 [0.961, 0.994]", "hold the mean over seeds", 0.95, None, simulate.report_means
    ),
    "report, change over seeds": Promise(
        "change +0.010 [-0.004, +0.024]", "hold the change", 0.95, None, simulate.report_changes
    ),
    "report, marks": Promise(
        "a change in green or red",
        "unchanged lines with a mark",
        None,
        0.05,
        simulate.report_marks,
        True,
    ),
    "report, one run": Promise(
        "after 0.984 [0.961, 0.994]",
        "hold the accuracy over problems",
        0.95,
        None,
        simulate.run_intervals,
    ),
    "report, change of one run": Promise(
        "change +0.010 [-0.004, +0.024]", "hold the change", 0.95, None, simulate.run_changes
    ),
    "report, health": Promise(
        "KL grew while the reward did not rise, …",
        "healthy runs with a warning",
        None,
        0.05,
        simulate.health,
    ),
}
if "bench" not in list_extras():
    PROMISES = {name: said for name, said in PROMISES.items() if not name.startswith("rlkit bench")}
if "report" not in list_extras():
    for name in ("report, seeds", "report, change over seeds", "report, marks"):
        del PROMISES[name]
ONE_RUN = {"report, one run", "report, change of one run", "report, health"}  # independent of seeds


def settings(name: str) -> list[Setting]:
    """Return the settings for the simulations of a promise."""
    if name in ONE_RUN:
        return [Setting(1, accuracy, True) for accuracy in ACCURACIES]
    return [
        Setting(n, accuracy, coarse)
        for n in SEEDS
        for accuracy in ACCURACIES
        for coarse in (True, False)
    ]


def simulated(name: str, setting: Setting, pages: int) -> Count | None:
    """Count a promise in one setting; return None if the sentence is not printed there."""
    key = [*name.encode(), setting.seeds, round(1000 * setting.accuracy), setting.coarse]
    return PROMISES[name].count(setting, pages, np.random.default_rng(key))


def kept(promise: Promise, setting: Setting, count: Count, errors: float = 3.5) -> bool:
    """Return whether a count agrees with the promise, up to the simulation's own error.

    errors: allowed deviation, in standard errors
    """
    level = promise.at_most if promise.at_least is None else promise.at_least
    assert level is not None
    if promise.claims and promise.at_most is not None and setting.seeds < TO_CLAIM:
        return count.hits == 0
    error = errors * math.sqrt(level * (1 - level) / max(1, count.of))
    share = count.hits / max(1, count.of)
    return share >= level - error if promise.at_least is not None else share <= level + error


# ---------------------------------------------------------------------------------------- the table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pages", type=int, default=500, help="draws of a setting")
    parser.add_argument("--only", default="", help="promises whose name begins so")
    parser.add_argument("--out", type=Path, default=HERE)
    given = parser.parse_args()
    if given.only and given.out == HERE:
        parser.error(
            "--only counts a part of the rows; give --out FOLDER, because the committed files"
            " hold all of them"
        )
    rows = []
    for name, promise in PROMISES.items():
        if not name.startswith(given.only):
            continue
        for setting in settings(name):
            count = simulated(name, setting, given.pages)
            if count is None or not count.of:
                continue
            row = {
                "promise": name,
                **setting._asdict(),
                "share": round(float(count.hits / count.of), 4),
                "of": count.of,
            }
            rows.append(row | {"kept": bool(kept(promise, setting, count))})
        print(name, [row["share"] for row in rows if row["promise"] == name], flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))


def table(rows: Sequence[dict]) -> str:
    """Return the table with a line for each promise and a column for each number of seeds.

    A cell is the worst share over all accuracies and kinds of scores.
    """
    lines = [["sentence", "says", "counted", "promised", *(f"{n} seeds" for n in SEEDS)]]
    lines.append(["---"] * len(lines[0]))
    for name in dict.fromkeys(str(row["promise"]) for row in rows):
        promise = PROMISES[name]
        level = (
            f"at least {promise.at_least:g}"
            if promise.at_least is not None
            else f"at most {promise.at_most:g}"
        )
        cells = []
        for n in SEEDS:
            own = [
                float(row["share"])
                for row in rows
                if row["promise"] == name and (int(row["seeds"]) == n or name in ONE_RUN)
            ]
            worst = min if promise.at_least is not None else max
            cells.append(f"{worst(own):.3f}" if own else "not said")
        if name in ONE_RUN:
            cells = [f"one run: {cells[0]}", "", "", "", ""]
        lines.append([name, promise.says, promise.statistic, level, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
