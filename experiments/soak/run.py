"""Does a long run leak? `python experiments/soak/run.py` trains 3,000 steps of 2 × 4 short rollouts
with tools and checks what it holds.

Exit status 1 where a law is broken. `--steps 150` is the short version of the test suite, which
does not look at the time.
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
    """Trains, reads what the callback has noted, prints the laws and whether they hold."""
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
    """The laws that do not hold, as sentences.

    Medians of the first third of the steps after `settled` are held against those of the last
    third: what is resident at the end of a step moves by a percent from one step to the next.

    Args:
      rows: of resources.jsonl.
      settled: the step from which on nothing may grow: memory by 1 % at most, handles and children
        not at all.
      timed: whether seconds per step have to be flat too, counted in yardsticks (a fixed piece of
        work, done after every step), since machines are not equally fast all the time: 10 % slower
        at most.
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
