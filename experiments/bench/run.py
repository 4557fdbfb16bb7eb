"""Does every task of the bench tell apart the pair that it was built for? Ten seeds, and two placebo arms beside each pair.

    python experiments/bench/run.py [--seeds 0 1 … 9] [--tasks chain proxy] [--jobs 2] [--placebo] [--folder outputs/pairs]
    python experiments/bench/run.py --seeds 100 101 102 --also model.opinions=1 model.init_std=0.18 --to outputs/pilot

The second form is a pilot: `--also` goes to every run, and the rows and the page are written elsewhere.

pairs.yaml names, for each task, its arms and its pairs, of which the second is expected to be better, and from which seed on a pair
counts. Runs that are finished are not repeated. A row a run in results.csv, and a table for every ten seeds in pairs.md: the differences
of the scores (1 - regret) within seeds, and the false-discovery rate over all pairs and placebos. pairs.png shows the differences of the
pairs, a dot a seed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import yaml

from rlkit.runs import bench
from rlkit.runs.comparing import ALPHA, FEWEST, detectable, false_discovery, paired

HERE = Path(__file__).parent


def rows_of(task: str, folder: Path, seeds: Sequence[int], jobs: int, placebo: bool, also: Sequence[str]) -> list[bench.Row]:
    """The rows of one task's arms, run where they are missing."""
    arms = yaml.safe_load((HERE / "pairs.yaml").read_text())[task]["arms"] | (bench.PLACEBOS if placebo else {})
    cells = bench.matrix(folder, [task], arms, seeds, also)
    for where, why in bench.run_all(cells, jobs=jobs, config_dir=None, tell=lambda line: print(line, flush=True)).items():
        print(f"failed: {where}: {why}", flush=True)
    return [row for cell in cells if (row := bench.read_row(cell))]


def merged(path: Path, new: Sequence[bench.Row]) -> list[bench.Row]:
    """The rows of the file, those of the same task, arm and seed replaced."""
    old = list(csv.DictReader(path.open())) if path.exists() else []
    by_name = {(row["task"], row["arm"], str(row["seed"])): row for row in [*old, *new]}
    return [by_name[key] for key in sorted(by_name, key=lambda key: (key[0], key[1], int(key[2])))]


def comparisons(task: str, rows: Sequence[bench.Row]) -> list[tuple[str, str]]:
    """What is compared on a task: its pairs, from the seed on at which they were named, and each arm with each placebo that was run."""
    own, first = yaml.safe_load((HERE / "pairs.yaml").read_text())[task], min(int(row["seed"]) for row in rows)
    there = {row["arm"] for row in rows if row["task"] == task}
    named = [(other, better) for other, better, *since in own["pairs"] if not since or first >= since[0]]
    return named + [(placebo, arm) for arm in own["arms"] for placebo in bench.PLACEBOS if placebo in there]


def table(rows: Sequence[bench.Row]) -> str:
    """A line a comparison: both scores, their difference within seeds, and whether it is a claim over all lines of the table."""
    lines, tests = [], []
    for task in dict.fromkeys(row["task"] for row in rows):
        for lower, higher in comparisons(task, rows):
            of_lower, of_higher = (
                {int(row["seed"]): 1 - float(row["regret"]) for row in rows if (row["task"], row["arm"]) == (task, arm)}
                for arm in (lower, higher)
            )
            seeds = sorted(of_lower.keys() & of_higher.keys())
            if len(seeds) < FEWEST:
                continue
            d = paired([of_lower[seed] for seed in seeds], [of_higher[seed] for seed in seeds])
            tests.append(d.p)
            lines.append((task, lower, higher, fmean(of_lower[s] for s in seeds), fmean(of_higher[s] for s in seeds), d))
    out = []
    for (task, lower, higher, one, other, d), q in zip(lines, false_discovery(tests), strict=True):
        says = f"q = {q:.4f}" if q <= ALPHA else f"no claim; these {d.n} seeds see {detectable(d.spread, d.n):.2f}"
        out.append([task, lower, higher, f"{one:.3f}", f"{other:.3f}", f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})", says])
    return bench.markdown(["task", "A", "B", "score of A", "score of B", "B - A, 95 %", "false-discovery rate"], out)


def page(rows: Sequence[bench.Row]) -> str:
    """A table for every ten seeds: the first ten make a claim, the next ten confirm it or do not."""
    tens = sorted({int(row["seed"]) // 10 for row in rows})
    parts = []
    for ten in tens:
        own = [row for row in rows if int(row["seed"]) // 10 == ten]
        seeds = sorted({int(row["seed"]) for row in own})
        parts.append(f"Seeds {seeds[0]} to {seeds[-1]}:\n\n{table(own)}")
    return "\n\n".join(parts) + "\n"


def plot(rows: Sequence[bench.Row], path: Path) -> None:
    """The difference of each pair: a dot a seed, the mean with its 95 % interval, a line for every ten seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    scores = {(row["task"], row["arm"], int(row["seed"])): 1 - float(row["regret"]) for row in rows}
    places: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for task in tasks:
        for ten in sorted({int(row["seed"]) // 10 for row in rows}):
            own = [row for row in rows if row["task"] == task and int(row["seed"]) // 10 == ten]
            for first, best in comparisons(task, own) if own else ():
                seeds = [seed for seed in range(10 * ten, 10 * ten + 10) if (task, first, seed) in scores and (task, best, seed) in scores]
                if len(seeds) >= FEWEST and first not in bench.PLACEBOS:
                    both = [(scores[task, first, seed], scores[task, best, seed]) for seed in seeds]
                    places[task, f"{first}, {best}", ten] = both
    figure, axes = pyplot.subplots(figsize=(9, 0.45 * len(places) + 1.2), layout="constrained")
    for place, ((task, _, _), both) in enumerate(places.items()):
        d, color = paired(*map(list, zip(*both, strict=True))), f"C{tasks.index(task)}"
        axes.plot([b - a for a, b in both], [place] * len(both), "o", color=color, alpha=0.35)
        axes.errorbar(d.mean, place, xerr=[[d.mean - d.low], [d.high - d.mean]], fmt="D", color=color, capsize=4)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(places)), [f"{task}: {pair}; seeds {10 * ten} to {10 * ten + 9}" for task, pair, ten in places], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="score of the second arm - of the first", title="dots: seeds; diamonds: means, 95 %")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--tasks", nargs="+", default=list(yaml.safe_load((HERE / "pairs.yaml").read_text())))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--placebo", action="store_true", help="runs the placebo arms, too")
    parser.add_argument("--folder", type=Path, default=Path("outputs/pairs"), help="of the runs")
    parser.add_argument("--also", nargs="+", default=[], help="overrides of every run")
    parser.add_argument("--to", type=Path, help="folder of the runs, the rows and the page of a pilot")
    given = parser.parse_args()
    if given.also and not given.to:
        parser.error("--also changes what is measured: give --to, so that its rows do not replace those that are committed")
    folder, out = given.to or given.folder, given.to or HERE
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.csv"
    for task in given.tasks:
        rows = merged(path, rows_of(task, folder, given.seeds, given.jobs, given.placebo, given.also))
        bench.write_rows(path, rows)
    rows = merged(path, [])
    (out / "pairs.md").write_text(page(rows))
    plot(rows, out / "pairs.png")
    print((out / "pairs.md").read_text())


if __name__ == "__main__":
    main()
