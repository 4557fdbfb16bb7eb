"""Write the bench's pages again from the committed rows, without any run.

    python experiments/bench/pages.py

Use it after a change of a page's text or of the way it counts. The script reads results.csv of the
matrix, of every study and of the pairs, and writes README.md, comparisons.csv, scores.png, pairs.md
and pairs.png.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import plot
import run

from rlkit.extras.bench import matrix as bench

HERE = Path(__file__).parent


def write_again(folder: Path) -> None:
    """Write the page, the comparisons and the plot of one folder.

    Failed runs are listed only on the old page, and their list is copied to the new one.
    """
    rows = list(csv.DictReader((folder / "results.csv").open()))
    old = (folder / "README.md").read_text()
    failed = re.search(r"Failed:\n\n(.*?)\n\n", old, re.DOTALL)
    text = bench.format_page(rows, {})
    if failed:
        text = text.replace(
            "\n\n## Scores by task", f"\n\n{failed[0].strip()}\n\n## Scores by task", 1
        )
    (folder / "README.md").write_text(text)
    compared = []
    for pair in bench.compare_arms(bench.arrange_scores(rows)):
        compared.append(
            {
                key: round(value, 5) if isinstance(value, float) else value
                for key, value in pair._asdict().items()
            }
        )
    bench.write_rows(folder / "comparisons.csv", compared)
    plot.plot(folder)


def main() -> None:
    for folder in (HERE / "matrix", *sorted((HERE / "studies").glob("*/"))):
        write_again(folder)
        print(folder)
    rows = run.merged(HERE / "results.csv", [])
    (HERE / "pairs.md").write_text(run.page(rows))
    run.plot(rows, HERE / "pairs.png")


if __name__ == "__main__":
    main()
