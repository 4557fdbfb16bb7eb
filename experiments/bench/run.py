"""Does every task of the bench tell its two arms apart, and again on ten other seeds?

    python experiments/bench/run.py [--tasks chain proxy] [--jobs 2] [--folder outputs/pairs]
    python experiments/bench/run.py --seeds 100 101 102 --also model.opinions=1 \\
        model.init_std=0.18 --to outputs/pilot

The second form is a pilot: the overrides of `--also` go to every run, and the rows and the page are
written to the folder of `--to`.

pairs.yaml names the arms of each task and the pairs of arms to compare. The second arm of a pair is
expected to be better. A third entry is the pair's first seed, 0 without it. Without --seeds, both
arms of a pair run on twenty seeds from its first seed on. Finished runs are not repeated.

results.csv has a row for each run. pairs.md has two tables, for the first ten seeds of every pair
and for the next ten. They give the differences of the scores (1 - regret) within seeds, and the
false-discovery rate over all pairs of the table. pairs.png shows the differences, a dot for each
seed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from rlkit.extras.bench import matrix as bench
from rlkit.extras.bench.over_tasks import compare_together
from rlkit.runs.comparing import ALPHA, Difference, compare_pairs, find_smallest_step
from rlkit.statistics import FEWEST
from rlkit.system import owner

HERE = Path(__file__).parent


def named() -> dict[str, Any]:
    """Return the contents of pairs.yaml, by task."""
    return yaml.safe_load((HERE / "pairs.yaml").read_text())


def rows_of(
    task: str, folder: Path, seeds: Sequence[int], jobs: int, also: Sequence[str]
) -> list[bench.Row]:
    """Return the rows of the arms in one task's pairs, and run missing ones first.

    Without `seeds`, each pair runs on its own twenty seeds.
    """
    own = named()[task]
    cells = [
        cell
        for other, better, *since in own["pairs"]
        for cell in bench.matrix(
            folder,
            [task],
            {arm: own["arms"][arm] for arm in (other, better)},
            seeds or range(sum(since), sum(since) + 20),
            also,
        )
    ]
    cells = list(dict.fromkeys(cells))
    with owner.own_folder(folder):
        _, received = bench.run_all(cells, folder, jobs=jobs, config_dir=None)
    if received:
        raise SystemExit(128 + received[0])
    return [row for cell in cells if (row := bench.read_row(cell))]


def merged(path: Path, new: Sequence[bench.Row]) -> list[bench.Row]:
    """Return the rows of the file; new rows replace rows with the same task, arm and seed."""
    old = list(csv.DictReader(path.open())) if path.exists() else []
    by_name = {(row["task"], row["arm"], str(row["seed"])): row for row in [*old, *new]}
    return [by_name[key] for key in sorted(by_name, key=lambda key: (key[0], key[1], int(key[2])))]


class Compared(NamedTuple):
    """A pair of arms on ten seeds."""

    task: str
    other: str
    better: str
    seeds: list[int]
    scores: list[tuple[float, float]]  # (score of `other`, score of `better`) for each seed

    def sides(self) -> tuple[list[float], list[float], float]:
        """Return the scores of either arm, and the smallest step of a score."""
        first, second = map(list, zip(*self.scores, strict=True))
        return first, second, find_smallest_step([*first, *second], bench.ROUNDED)

    def difference(self) -> Difference:
        """Return the difference of the arms, second minus first, judged without the other pairs."""
        first, second, step = self.sides()
        return compare_pairs(first, second, resolution=step)


def compared(rows: Sequence[bench.Row], ten: int) -> list[Compared]:
    """Return every pair on ten of its seeds.

    ten: 0 for the pair's first ten seeds, 1 for its next ten
    """
    of = {(row["task"], row["arm"], int(row["seed"])): 1 - float(row["regret"]) for row in rows}
    out = []
    for task, own in named().items():
        for other, better, *since in own["pairs"]:
            first = sum(since) + 10 * ten
            seeds = [
                seed
                for seed in range(first, first + 10)
                if {(task, other, seed), (task, better, seed)} <= of.keys()
            ]
            if len(seeds) >= FEWEST:
                out.append(
                    Compared(
                        task,
                        other,
                        better,
                        seeds,
                        [(of[task, other, seed], of[task, better, seed]) for seed in seeds],
                    )
                )
    return out


def table(pairs: Sequence[Compared]) -> str:
    """Return the table with a line for each pair: both scores and their difference within seeds.

    The last column says whether the difference is a claim, judged over all lines of the table.
    """
    out = []
    for pair, (d, q, sees) in zip(
        pairs, compare_together([pair.sides() for pair in pairs]), strict=True
    ):
        says = (
            bench.rate(q)
            if q <= ALPHA
            else f"no claim; {sees:.2f} would be seen by these {d.n} seeds"
        )
        means = [f"{fmean(arm):.3f}" for arm in zip(*pair.scores, strict=True)]
        seeds, interval = (
            f"{pair.seeds[0]} to {pair.seeds[-1]}",
            f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})",
        )
        out.append([pair.task, pair.other, pair.better, seeds, *means, interval, says])
    return bench.markdown(
        [
            "task",
            "A",
            "B",
            "seeds",
            "score of A",
            "score of B",
            "B - A, 95 %",
            "false-discovery rate",
        ],
        out,
    )


def page(rows: Sequence[bench.Row]) -> str:
    """Return the page with both tables.

    The first ten seeds make a claim, and the next ten confirm or refute it.
    """
    tables = {
        "The first ten seeds of each pair": compared(rows, 0),
        "The next ten": compared(rows, 1),
    }
    return (
        "\n\n".join(f"{name}:\n\n{table(pairs)}" for name, pairs in tables.items() if pairs) + "\n"
    )


def plot(rows: Sequence[bench.Row], path: Path) -> None:
    """Draw the difference of each pair, with one line for each ten seeds.

    A dot is a seed; the diamond is the mean with its 95 % interval.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = sorted(
        [*compared(rows, 0), *compared(rows, 1)],
        key=lambda pair: (pair.task, pair.better, pair.seeds),
    )
    tasks = list(dict.fromkeys(pair.task for pair in pairs))
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(pairs) + 1.2), layout="constrained")
    for place, pair in enumerate(pairs):
        d, color = pair.difference(), f"C{tasks.index(pair.task)}"
        axes.plot(
            [b - a for a, b in pair.scores],
            [place] * len(pair.scores),
            "o",
            color=color,
            alpha=0.35,
        )
        axes.errorbar(
            d.mean,
            place,
            xerr=[[d.mean - d.low], [d.high - d.mean]],
            fmt="D",
            color=color,
            capsize=4,
        )
    axes.axvline(0, color="grey", linewidth=0.8)
    names = [
        f"{pair.task}: {pair.other} → {pair.better}; seeds {pair.seeds[0]} to {pair.seeds[-1]}"
        for pair in pairs
    ]
    axes.set_yticks(range(len(pairs)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set(
        xlabel="score of the second arm - of the first", title="dots: seeds; diamonds: means, 95 %"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[])
    parser.add_argument("--tasks", nargs="+", default=list(named()))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=Path("outputs/pairs"), help="of the runs")
    parser.add_argument("--also", nargs="+", default=[], help="overrides of every run")
    parser.add_argument(
        "--to", type=Path, help="folder of the runs, the rows and the page of a pilot"
    )
    given = parser.parse_args()
    if given.also and not given.to:
        parser.error(
            "--also changes what is measured: give --to, so that its rows do not replace those that"
            " are committed"
        )
    folder, out = given.to or given.folder, given.to or HERE
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.csv"
    for task in given.tasks:
        rows = merged(path, rows_of(task, folder, given.seeds, given.jobs, given.also))
        bench.write_rows(path, rows)
    rows = merged(path, [])
    (out / "pairs.md").write_text(page(rows))
    plot(rows, out / "pairs.png")
    print((out / "pairs.md").read_text())


if __name__ == "__main__":
    main()
