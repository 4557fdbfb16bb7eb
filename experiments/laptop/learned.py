"""Print which skills were learned, by the rule of the page.

python experiments/laptop/learned.py

A seed has learned if test accuracy rises by at least 0.2 and the 95 % interval at the end excludes
the start. A skill is learned if every seed has learned. The minutes of an arm include its warm-up.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import yaml

RISE = 0.2


def has_learned(row: Mapping[str, str]) -> bool:
    """Return whether a run has learned; `row` is a row of a study's results.csv."""
    start, end = float(row["base"]), float(row["final"])
    return round(end - start, 6) >= RISE and start < float(row["final_low"])


def main() -> None:
    print("| skill | arm | start | end | seeds that learned | planned | processor minutes a run |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(Path(__file__).parent.glob("*/results.csv")):
        study = yaml.safe_load((path.parent / "study.yaml").read_text())
        with path.open() as file:
            rows = list(csv.DictReader(file))
        for arm in study["variants"]:
            own = [row for row in rows if row["variant"] == arm]
            planned = 1 if arm in study.get("once", []) else len(study.get("seeds", range(3)))
            if not own:
                continue
            start, end = (fmean(float(row[key]) for row in own) for key in ("base", "final"))
            seconds = [float(row["cpu_seconds"]) for row in own if row["cpu_seconds"]]
            first = next((row["cpu_seconds"] for row in rows if row["variant"] == "warm-up"), "")
            begins = any("WARM_UP" in word for word in study["variants"][arm])
            before = float(first or 0) if begins else 0.0
            minutes = f"{(before + fmean(seconds)) / 60:.0f}" if seconds else "–"
            learned = sum(map(has_learned, own))
            print(
                f"| {path.parent.name} | {arm} | {start:.3f} | {end:.3f} | {learned} of {len(own)}"
                f" | {planned} | {minutes} |"
            )


if __name__ == "__main__":
    main()
