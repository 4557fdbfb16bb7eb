"""Run the stages of a large study of `rlkit bench`, with one row for each run.

A study is a script that imports this file. Its rows are in one rows.csv. A run with a row is not
run again, so the study goes on where it stopped. All rows have the same code: the files of rlkit/
and conf/.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlkit.extras.bench import matrix as bench
from rlkit.extras.bench.rates import KEY
from rlkit.runs.comparing import ALPHA
from rlkit.system import owner

HERE = Path(__file__).parent
PAGES = 1000  # of permuted arms
ENDED = ("finished", "failed")
# The reason of a run that failed by its own numbers. A refusal before the first step is exit 2.
DIVERGED = re.compile(r"exit 1: .*(updates in a row had|log-prob that is not finite)")
COMMON = ("callbacks.completions.every=1000000",)  # no file of completions

Place = tuple[str, str]  # task, arm


class Planned(NamedTuple):
    """A run of a study: its stage, its rate ("" for the task's own), and the run itself."""

    stage: str
    rate: str
    run: bench.MatrixRun

    def key(self) -> tuple[str, ...]:
        return (self.stage, self.rate, self.run.task, self.run.arm, str(self.run.seed))

    def group(self) -> tuple[int, str]:
        """Return what the runs of one call of the bench have in common."""
        return (self.run.seed, self.rate)


def follow(
    about: str,
    out: Path,
    run_study: Callable[[Path, int, float], bool],
    write_page: Callable[[], None],
) -> None:
    """Follow the command line of a study: run what is missing, then write the page.

    Args:
      about: the script's docstring.
      out: the folder of rows.csv and the page.
      run_study: function from (parent of the runs, runs at a time, until) to whether no run is
        missing.
    """
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    folder = Path("runs") / out.name
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--folder", type=Path, default=folder, help="of the runs")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no group of runs after"
    )
    given = parser.parse_args()
    with owner.own_folder(given.folder):
        complete = run_study(given.folder, given.jobs, time.monotonic() + 60 * given.minutes)
    print(f"{len(read_rows(out))} rows in {out / 'rows.csv'}", flush=True)
    if not complete:
        raise SystemExit("runs are missing; the same command goes on")
    write_page()
    print((out / "README.md").read_text())


def plan(
    folder: Path,
    stage: str,
    places: Iterable[tuple[Place, str]],
    arms: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    steps: Mapping[tuple[Place, str], int] | None = None,
) -> list[Planned]:
    """Return the runs of a stage, seed by seed and rate by rate.

    Args:
      places: (task, arm) and the rate there.
      arms: the overrides of each arm.
      steps: number of RL steps of a place at a rate, if it is not the task's.
    """
    out = []
    for place, rate in places:
        task, arm = place
        words = [*COMMON, *([f"{KEY}={rate}"] if rate else [])]
        words += [f"trainer.steps={steps[place, rate]}"] if steps else []
        where = folder / stage.replace(" ", "_") / (rate or "own")
        for run in bench.matrix(where, [task], {arm: arms[arm]}, seeds, words):
            out.append(Planned(stage, rate, run._replace(note=f" {stage} {rate}")))
    return sorted(out, key=Planned.group)


def run_missing(
    planned: Sequence[Planned],
    out: Path,
    folder: Path,
    *,
    jobs: int,
    until: float,
    measure: Callable[[Path], bench.Row] = lambda folder: {},
) -> bool:
    """Run what has no row yet, group by group, and add the rows of each group. Return whether all
    have rows.

    Args:
      out: the folder of rows.csv.
      folder: the parent of the runs' folders.
      until: no group begins after this time of `time.monotonic`.
      measure: returns more columns of a run from its folder.
    """
    rows = read_rows(out)
    code = read_code(rows.values())
    missing = [p for p in planned if p.key() not in rows]
    for _, group in groupby(missing, key=Planned.group):
        if time.monotonic() > until:
            return False
        own = list(group)
        done, received = bench.run_all([p.run for p in own], folder, jobs=jobs, config_dir=None)
        ended = {p: job for p, job in zip(own, done, strict=True) if job.status in ENDED}
        found = {p: read_result(p, job.reason, measure) for p, job in ended.items()}
        rows |= {p.key(): row | code for p, row in found.items() if row}
        if rows:
            write_rows(out, list(rows.values()))
        if received:
            raise SystemExit(128 + received[0])
        for p, row in found.items():
            if not row:
                raise SystemExit(
                    f"{p.run.folder} failed: {ended[p].reason}. Mend the cause; then the"
                    " same command goes on."
                )
    return all(p.key() in rows for p in planned)


def read_result(
    planned: Planned, reason: str, measure: Callable[[Path], bench.Row]
) -> bench.Row | None:
    """Return the row of a run that has ended. A run whose numbers were no longer finite has a
    regret of 1, as a policy that learned nothing; `failed` says why. None for any other failure,
    which says nothing about the algorithm."""
    run = planned.run
    row = {"stage": planned.stage, "rate": planned.rate}
    found = bench.read_row(run)
    if found is not None:
        return row | found | measure(run.folder)
    own = {"task": run.task, "arm": run.arm, "seed": run.seed, "regret": 1.0}
    return row | own | {"failed": reason} if DIVERGED.match(reason) else None


def read_code(rows: Iterable[bench.Row]) -> bench.Row:
    """Return the columns that name the code of the next runs.

    Raises: SystemExit if the code is not committed, or is not that of the rows: a table whose arms
      ran different code compares the code too.
    """

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE, capture_output=True, text=True, check=True
        ).stdout

    if ask("status", "--porcelain", ":/rlkit", ":/conf"):
        raise SystemExit("rlkit/ or conf/ has changes that are not committed; commit them first")
    trees = ask("rev-parse", "HEAD:rlkit", "HEAD:conf").split()
    code = "-".join(tree[:10] for tree in trees)
    others = {row["code"] for row in rows} - {code}
    if others:
        raise SystemExit(
            f"rows.csv has runs of other code ({', '.join(sorted(others))}; now {code}). Check out"
            " their commit in a clone of its own, or move rows.csv away"
        )
    return {"code": code, "date": date.today().isoformat(), "torch": version("torch")}


def read_rows(out: Path) -> dict[tuple[str, ...], bench.Row]:
    """Return the rows of all runs so far, by `Planned.key`."""
    path = out / "rows.csv"
    rows = []
    if path.exists():
        with path.open() as file:
            rows = list(csv.DictReader(file))
    return {tuple(row[k] for k in ("stage", "rate", "task", "arm", "seed")): row for row in rows}


def write_rows(out: Path, rows: Sequence[bench.Row]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    out.mkdir(exist_ok=True)
    bench.write_rows(out / "rows.csv", [dict.fromkeys(names, "") | row for row in rows])


def describe_runs(rows: Sequence[bench.Row]) -> str:
    """Say how many runs there are, when and with which code they ran, and what they cost."""
    dates = sorted({row["date"] for row in rows})
    hours = sum(float(row["processor_s"] or 0) for row in rows if not row.get("failed")) / 3600
    codes = ", ".join(sorted({f"{row['code']} with torch {row['torch']}" for row in rows}))
    return (
        f"{len(rows)} runs, {' to '.join(sorted({dates[0], dates[-1]}))}, {hours:.1f} processor"
        f" hours. Trees of rlkit/ and conf/: {codes}."
    )


def list_failed(rows: Iterable[bench.Row]) -> list[str]:
    """Return a section on the runs whose numbers were no longer finite, or nothing."""
    keys = ("stage", "rate", "task", "arm", "seed", "failed")
    failed = [[row[key] for key in keys] for row in rows if row.get("failed")]
    if not failed:
        return []
    head = "## Runs whose numbers were no longer finite, which count as a score of 0"
    return [head, bench.markdown([*keys[:-1], "why"], failed)]


def count_null_pages(scores: bench.Scores) -> float:
    """Return the share of PAGES pages with a claim if the arms of each seed are permuted."""
    draws = np.random.default_rng(0)
    claiming = 0
    for _ in range(PAGES):
        of = {arm: own.copy() for arm, own in scores.of.items()}
        for t in range(len(scores.tasks)):
            there = list(scores.select_task(t))
            cube = np.stack([scores.of[arm][:, t] for arm in there])
            mixed = draws.permuted(cube, axis=0)
            for arm, own in zip(there, mixed, strict=True):
                of[arm][:, t] = own
        claiming += any(p.q <= ALPHA for p in bench.compare_arms(scores._replace(of=of)))
    return claiming / PAGES
