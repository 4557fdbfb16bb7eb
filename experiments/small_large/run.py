"""Do differences between algorithms on a small model have the same sign on a large one?

    rlkit get smollm2_135m
    python experiments/small_large/run.py [--sizes small large] [--jobs 2] [--keep runs/small_large]

Each algorithm first chooses its learning rate on two seeds, separately for each size. rates.csv has
these runs. Then each algorithm runs at its own rate on fresh seeds, ten for the small model and
five for the large one. results.csv has these runs. Runs with a row are not repeated. At the end the
command prints the pairs of algorithms with their differences on both models.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))
import study  # noqa: E402

from rlkit.extras.bench.over_tasks import compare_together  # noqa: E402
from rlkit.runs.comparing import find_smallest_step  # noqa: E402

ARMS = ("grpo", "dr_grpo", "rloo", "ppo")
TRIED = (100, 101)  # seeds of the choice of rates
FALSE = 0.05  # false-discovery rate of the claims on the small model
COMMON = ("kl=none", "reference=none", "evaluation.n=128")


class Size(NamedTuple):
    """A model with its task, the rates to choose from, and the seeds of the comparison."""

    overrides: tuple[str, ...]
    rates: tuple[str, ...]
    seeds: range


SMALL = (
    *("model=tiny", "task._target_=skills.answered", "task.max_samples=1024"),
    *("environment=single_turn", "generation.max_new_tokens=8"),
)
SIZES = {
    "small": Size(
        (
            *(*SMALL, "model.path=WARM_UP", "batch.prompts=16"),
            *("trainer.steps=100", "evaluation.every=25"),
        ),
        ("3e-5", "1e-4", "3e-4"),
        range(10),
    ),
    "large": Size(
        ("experiment=laptop", "trainer.steps=10", "evaluation.every=5"),
        ("1e-4", "3e-4", "1e-3"),
        range(5),
    ),
}
# The embedded model gives no right answer at first, so it imitates solutions for 150 steps.
WARM_UP = (
    *(*SMALL, *COMMON, "algorithm=sft", "batch.group_size=1", "batch.prompts=32"),
    *("optimizer.lr=1e-3", "trainer.steps=150", "evaluation.every=50"),
    "callbacks.checkpoint.model=true",
)


class Run(NamedTuple):
    """A run of an algorithm at a rate."""

    size: str
    arm: str
    rate: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.size}, {self.arm}, {self.rate}"


def run_all(runs: Sequence[Run], path: Path, *, jobs: int, keep: Path | None) -> list[study.Row]:
    """Train the runs without a row, and return the rows of all."""
    rows = study.read(path)
    known = {(row["variant"], int(row["seed"])) for row in rows}

    def train(run: Run) -> study.Row:
        kept = keep / run.size / f"{run.arm}_{run.rate}" / str(run.seed) if keep else None
        words = [*SIZES[run.size].overrides, *COMMON]
        words += [f"algorithm={run.arm}", f"optimizer.lr={run.rate}"]
        return study.one_run(run.name, words, run.seed, FOLDER, modules=FOLDER, kept=kept)

    left = [run for run in runs if (run.name, run.seed) not in known]
    with ThreadPoolExecutor(jobs) as pool:
        for row in study.collect([pool.submit(train, run) for run in left]):
            rows.append(row)
            study.write(path, rows, [run.name for run in runs])
            print(
                f"{row['variant']}, seed {row['seed']}: {row['base']} → {row['final']}", flush=True
            )
    return rows


def choose_rate(rows: Sequence[study.Row], size: str, arm: str) -> str:
    """Return the rate with the highest mean validation accuracy after the last step; of equal ones,
    the lowest rate. The test problems are left to the comparison."""

    def mean(rate: str) -> float:
        name = Run(size, arm, rate, 0).name
        curves = [row["curve"] for row in rows if row["variant"] == name]
        return statistics.fmean(float(curve.rpartition(":")[2]) for curve in curves)

    return max(SIZES[size].rates, key=mean)


def report(rows: Sequence[study.Row]) -> Iterator[str]:
    """Yield a line for each pair of algorithms, with its differences on both models."""
    scores = {
        (size, arm): {
            int(row["seed"]): float(row["final"])
            for row in rows
            if row["variant"].startswith(f"{size}, {arm}, ")
        }
        for size in SIZES
        for arm in ARMS
    }
    pairs = list(itertools.combinations(ARMS, 2))
    found = {}
    for size in SIZES:
        sides = []
        for pair in pairs:
            first, second = (scores[size, arm] for arm in pair)
            seeds = sorted(first.keys() & second.keys())
            one = [first[seed] for seed in seeds]
            other = [second[seed] for seed in seeds]
            sides.append((one, other, find_smallest_step([*one, *other], 2e-5)))
        if all(len(first) > 1 for first, _, _ in sides):
            found[size] = compare_together(sides)
    yield "| pair: second - first | small, 95 % | q | large, 95 % | same sign |"
    yield "|---|---|---|---|---|"
    for i, (a, b) in enumerate(pairs):
        cells = []
        signs = []
        for size in SIZES:
            d, q, _ = found[size][i] if size in found else (None, math.nan, None)
            cells.append(f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})" if d else "")
            cells += [f"{q:.3f}{' *' if q <= FALSE else ''}"] if size == "small" else []
            signs += [d.mean > 0] if d else []
        same = "" if len(signs) < 2 else "yes" if signs[0] == signs[1] else "no"
        yield f"| {b} - {a} | {' | '.join(cells)} | {same} |"


def main() -> None:
    """Choose the rates, run the comparison, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep", type=Path, help="folder in which the runs stay")
    arguments = parser.parse_args()
    places = {"jobs": arguments.jobs, "keep": arguments.keep and arguments.keep.resolve()}
    warm_up = FOLDER / "warm_up"
    if "small" in arguments.sizes and not list(warm_up.glob("outputs/*/*/model")):
        words = [*study.COMMON, *WARM_UP, f"seed={study.WARM_UP_SEED}"]
        study.trained(words, modules=FOLDER, kept=warm_up)
    tried = [
        Run(size, arm, rate, seed)
        for size in arguments.sizes
        for seed in TRIED
        for arm in ARMS
        for rate in SIZES[size].rates
    ]
    trials = run_all(tried, FOLDER / "rates.csv", **places)
    final = [
        Run(size, arm, choose_rate(trials, size, arm), seed)
        for size in arguments.sizes
        for seed in SIZES[size].seeds
        for arm in ARMS
    ]
    print("\n".join(report(run_all(final, FOLDER / "results.csv", **places))))


if __name__ == "__main__":
    main()
