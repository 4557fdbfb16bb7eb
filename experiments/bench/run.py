"""Does every task of the bench tell apart the pair that it was built for? Ten seeds, and two placebo arms beside each pair.

    python experiments/bench/run.py [--seeds 0 1 … 9] [--tasks chain proxy] [--jobs 2] [--placebo] [--folder outputs/pairs]

pairs.yaml names, for each task, two arms; the second is expected to be better. Runs that are finished are not repeated. A row a run in
results.csv, and one table in pairs.md: the difference of the scores (1 - regret) within seeds, and the false-discovery rate over
all tasks.
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


def rows_of(task: str, folder: Path, seeds: Sequence[int], jobs: int, placebo: bool) -> list[bench.Row]:
    """The rows of one task's arms, run where they are missing."""
    own = yaml.safe_load((HERE / "pairs.yaml").read_text())[task]
    arms = dict(own) | (bench.PLACEBOS if placebo else {})
    cells = bench.matrix(folder, [task], arms, seeds, [])
    for where, why in bench.run_all(cells, jobs=jobs, config_dir=None, tell=lambda line: print(line, flush=True)).items():
        print(f"failed: {where}: {why}", flush=True)
    return [row for cell in cells if (row := bench.read_row(cell))]


def merged(path: Path, new: Sequence[bench.Row]) -> list[bench.Row]:
    """The rows of the file, those of the same task, arm and seed replaced."""
    old = list(csv.DictReader(path.open())) if path.exists() else []
    by_name = {(row["task"], row["arm"], str(row["seed"])): row for row in [*old, *new]}
    return [by_name[key] for key in sorted(by_name, key=lambda key: (key[0], key[1], int(key[2])))]


def table(rows: Sequence[bench.Row]) -> str:
    """A line a task: the scores of both arms and of the placebos, their difference, and whether it is a claim."""
    named = yaml.safe_load((HERE / "pairs.yaml").read_text())
    lines, tests = [], []
    for task, own in named.items():
        scores = {
            arm: {int(row["seed"]): 1 - float(row["regret"]) for row in rows if row["task"] == task and row["arm"] == arm}
            for arm in [*own, *bench.PLACEBOS]
        }
        first, second = own
        seeds = sorted(scores[first].keys() & scores[second].keys())
        if len(seeds) < FEWEST:
            continue
        d = paired([scores[first][seed] for seed in seeds], [scores[second][seed] for seed in seeds])
        means = [f"{fmean(scores[arm].values()):.3f}" if scores[arm] else "–" for arm in scores]
        tests.append(d.p)
        lines.append((task, first, second, means, d, len(seeds)))
    out = []
    for (task, first, second, means, d, n), q in zip(lines, false_discovery(tests), strict=True):
        says = f"q = {q:.4f}" if q <= ALPHA else f"no claim; these {n} seeds see {detectable(d.spread, n):.2f}"
        cells = [task, first, second, *means, str(n), f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})", says]
        out.append(cells)
    columns = ["task", "first", "second", "first", "second", *bench.PLACEBOS, "seeds", "second - first, 95 %", "false-discovery rate"]
    return bench.markdown(columns, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--tasks", nargs="+", default=list(yaml.safe_load((HERE / "pairs.yaml").read_text())))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--placebo", action="store_true", help="runs the placebo arms, too")
    parser.add_argument("--folder", type=Path, default=Path("outputs/pairs"), help="of the runs")
    given = parser.parse_args()
    path = HERE / "results.csv"
    for task in given.tasks:
        rows = merged(path, rows_of(task, given.folder, given.seeds, given.jobs, given.placebo))
        bench.write_rows(path, rows)
    (HERE / "pairs.md").write_text(table(merged(path, [])) + "\n")
    print((HERE / "pairs.md").read_text())


if __name__ == "__main__":
    main()
