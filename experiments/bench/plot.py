"""Draw the rows of a matrix: a panel for each task and a line for each arm.

    python experiments/bench/plot.py [FOLDER …]

A dot is a seed, and a diamond is the mean with its 95 % interval. Without folders, the script draws
the matrix and all studies. It reads results.csv of each folder and writes scores.png beside it.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from rlkit.extras.bench import matrix as bench
from rlkit.runs.comparing import find_smallest_step

HERE = Path(__file__).parent


def plot(folder: Path) -> None:
    """Write scores.png of one folder."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(csv.DictReader((folder / "results.csv").open()))
    tasks, arms = (list(dict.fromkeys(row[key] for row in rows)) for key in ("task", "arm"))
    figure, panels = pyplot.subplots(
        1,
        len(tasks),
        figsize=(2.6 + 2.4 * len(tasks), 0.32 * len(arms) + 1.1),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for panel, task in zip(panels[0], tasks, strict=True):
        for place, arm in enumerate(arms):
            scores = [
                1 - float(row["regret"]) for row in rows if (row["task"], row["arm"]) == (task, arm)
            ]
            if not scores:
                continue
            color = "grey" if arm.startswith("placebo") else f"C{place % 10}"
            mean, low, high = bench.score_interval(
                scores, find_smallest_step(scores, bench.ROUNDED)
            )
            panel.plot(scores, [place] * len(scores), "o", color=color, alpha=0.3, markersize=4)
            panel.errorbar(
                mean,
                place,
                xerr=[[mean - low], [high - mean]],
                fmt="D",
                color=color,
                capsize=3,
                markersize=5,
            )
        panel.axvline(0, color="grey", linewidth=0.8)
        panel.set(title=task, xlim=(min(-0.2, panel.get_xlim()[0]), 1.02))
    panels[0][0].set_yticks(range(len(arms)), arms, fontsize=8)
    panels[0][0].invert_yaxis()
    shared = ", every arm at one shared rate" if bench.shares_rate(rows) else ""
    figure.supxlabel(f"score: 0 random, 1 the best possible{shared}", fontsize=9)
    figure.savefig(folder / "scores.png", dpi=110)
    pyplot.close(figure)


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]] or [
        HERE / "matrix",
        *sorted((HERE / "studies").glob("*/")),
    ]
    for folder in folders:
        plot(folder)
        print(folder / "scores.png")


if __name__ == "__main__":
    main()
