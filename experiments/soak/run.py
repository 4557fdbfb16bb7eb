"""Does a long run leak memory, file handles or processes?

    python experiments/soak/run.py --out FOLDER [--steps 3000]

The script trains 3,000 steps of 2 × 4 short rollouts with tools, and checks the resources recorded
after every step. Exit status 1: a law is broken. `--steps 150` is the short version of the test
suite and does not check the time.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
OVERRIDES = (
    "batch.prompts=2",
    "batch.group_size=4",
    "generation.max_new_tokens=48",
    "task.max_samples=256",
    "evaluation.n=4",
    "evaluation.every=100",
    "callbacks.checkpoint.every=10",
    "callbacks.checkpoint.model=false",
    "callbacks.samples.every=10",
    "trainer.accelerator=cpu",
    "trainer.threads=1",
    "+callbacks.resources={_target_: resources.resources, _partial_: true}",
)


def main() -> int:
    """Train, read the recorded resources, print the broken laws, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument(
        "--out", type=Path, required=True, help="the run folder, which must not be there yet"
    )
    arguments = parser.parse_args()
    words = [
        "train",
        *OVERRIDES,
        f"trainer.steps={arguments.steps}",
        f"hydra.run.dir={arguments.out}",
    ]
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-m", "rlkit", *words], check=True, env=os.environ | {"PYTHONPATH": path}
    )
    rows = [
        json.loads(line) for line in (arguments.out / "resources.jsonl").read_text().splitlines()
    ]
    with (arguments.out / "resources.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    problems = broken(
        rows,
        settled=300 if arguments.steps >= 1000 else arguments.steps // 2,
        timed=arguments.steps >= 1000,
    )
    for problem in problems:
        print(f"broken: {problem}")
    return 1 if problems else 0


def broken(rows: list[dict], *, settled: int, timed: bool) -> list[str]:
    """Return the broken laws as sentences.

    Medians of the first third of the steps after `settled` are compared with medians of the last
    third. Medians are needed because resident memory changes by a percent from one step to the
    next.

    Args:
      rows: rows of resources.jsonl.
      settled: from this step on, memory may grow by 1 % at most, handles and children not at all.
      timed: whether to check the seconds per step too. They may grow by 10 % at most, measured in
        yardsticks: a fixed piece of work after every step, because a machine's speed varies.
    """
    third = (len(rows) - settled) // 3
    parts = rows[settled : settled + third], rows[-third:]
    was, now = (
        {key: median(row[key] for row in part) for key in ("rss", "handles", "children")}
        for part in parts
    )
    print(f"after step {settled}: {was}; at the end: {now}")
    problems = []
    if now["rss"] > 1.01 * was["rss"]:
        problems.append(f"resident memory grew from {was['rss']:.1f} to {now['rss']:.1f} MiB")
    problems += [
        f"{key} grew from {was[key]:g} to {now[key]:g}"
        for key in ("handles", "children")
        if now[key] > was[key]
    ]
    if timed:
        (early, was_fast), (late, is_fast) = (
            (
                median(b["seconds"] - a["seconds"] for a, b in pairwise(part)),
                median(row["yardstick"] for row in part),
            )
            for part in parts
        )
        print(
            f"seconds per step: {early:.3f}, at the end {late:.3f}; yardstick: {was_fast:.5f}, at"
            f" the end {is_fast:.5f}"
        )
        if late / is_fast > 1.1 * early / was_fast:
            problems.append(
                f"a step took {early / was_fast:.1f} yardsticks, and {late / is_fast:.1f} at"
                " the end"
            )
    return problems


if __name__ == "__main__":
    sys.exit(main())
