"""Do differences between algorithms on a small model have the same sign on a large one?

    rlkit get smollm2_135m
    python experiments/small_large/run.py [--sizes small large] [--jobs 2] [--keep runs/small_large]

Each algorithm first chooses its learning rate on two seeds, separately for each size. rates.csv has
these runs. Then each algorithm runs at its own rate on fresh seeds, ten for the small model and
five for the large one. results.csv has these runs. Runs with a row are not repeated. At the end the
command prints the pairs of algorithms with their differences on both models, and the counts that
README.md asks for.
"""

from __future__ import annotations

import argparse
import itertools
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
from rlkit.runs.comparing import (  # noqa: E402
    ALPHA,
    Difference,
    compare_pairs,
    find_smallest_step,
)

ARMS = ("grpo", "dr_grpo", "rloo", "ppo")
TRIED = (100, 101)  # seeds of the choice of rates
LADDER = ("1e-6", "3e-6", "1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2")
WIDER = 2  # how often the best rate may be the lowest or the highest, and one more is tried
COMMON = ("kl=none", "reference=none", "evaluation.n=128")


class Size(NamedTuple):
    """A model with its task, the lowest of the three rates to choose from, and the seeds of the
    comparison."""

    overrides: tuple[str, ...]
    lowest: str
    seeds: range

    def rates(self, arm: str) -> list[str]:
        """Return three rates. ppo makes four times the updates of grpo, so its rates begin one
        rung lower."""
        first = LADDER.index(self.lowest) - (arm == "ppo")
        return list(LADDER[first : first + 3])


SMALL = (
    *("model=tiny", "task._target_=skills.answered", "task.max_samples=1024"),
    *("environment=single_turn", "generation.max_new_tokens=8"),
)
SIZES = {
    "small": Size(
        (
            *(*SMALL, "model.path=WARM_UP", "batch.prompts=16"),
            *("trainer.steps=100", "evaluation.every=50"),
        ),
        "3e-5",
        range(200, 210),
    ),
    "large": Size(
        ("experiment=laptop", "trainer.steps=10", "evaluation.every=10"),
        "1e-4",
        range(200, 205),
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
    """Train the runs without a row, and return the rows of all. Rows with other overrides are not
    counted."""
    rows = study.read(path)

    def words_of(run: Run) -> list[str]:
        words = [*SIZES[run.size].overrides, *COMMON]
        return [*words, f"algorithm={run.arm}", f"optimizer.lr={run.rate}"]

    def train(run: Run) -> study.Row:
        kept = keep / run.size / f"{run.arm}_{run.rate}" / str(run.seed) if keep else None
        return study.one_run(run.name, words_of(run), run.seed, FOLDER, modules=FOLDER, kept=kept)

    def key(row: study.Row) -> tuple[str, str, str]:
        return row["variant"], row["seed"], row["overrides"]

    wanted = {(run.name, str(run.seed), " ".join(words_of(run))): run for run in runs}
    known = set(map(key, rows))
    left = [run for name, run in wanted.items() if name not in known]
    with ThreadPoolExecutor(jobs) as pool:
        for row in study.collect([pool.submit(train, run) for run in left]):
            rows.append(row)
            study.write(path, rows, [run.name for run in runs])
            print(f"{row['variant']}, seed {row['seed']}: validation {row['curve']}", flush=True)
    return [row for row in rows if key(row) in wanted]


def choose_rate(rows: Sequence[study.Row], size: str, arm: str, rates: Sequence[str]) -> str:
    """Return the rate with the highest mean validation accuracy after the last step; of equal ones,
    the lowest rate. The test problems are left to the comparison."""

    def mean(rate: str) -> float:
        name = Run(size, arm, rate, 0).name
        curves = [row["curve"] for row in rows if row["variant"] == name]
        return statistics.fmean(float(curve.rpartition(":")[2]) for curve in curves)

    return max(rates, key=mean)


def choose_rates(
    sizes: Sequence[str], *, jobs: int, keep: Path | None
) -> dict[tuple[str, str], str]:
    """Return the rate of each algorithm on each size, after the trials. While the best rate is the
    lowest or the highest tried one, a further rate is tried, `WIDER` times at most."""
    rates = {(size, arm): SIZES[size].rates(arm) for size in sizes for arm in ARMS}
    for widened in range(WIDER + 1):
        tried = [
            Run(*place, rate, seed)
            for seed in TRIED
            for place, own in rates.items()
            for rate in own
        ]
        rows = run_all(tried, FOLDER / "rates.csv", jobs=jobs, keep=keep)
        chosen = {place: choose_rate(rows, *place, own) for place, own in rates.items()}
        for place, own in rates.items():
            at_edge = chosen[place] in (own[0], own[-1])
            if at_edge and widened == WIDER:
                print(f"{', '.join(place)}: {chosen[place]} is the edge of the tried rates")
            elif at_edge and chosen[place] == own[0]:
                own.insert(0, LADDER[LADDER.index(own[0]) - 1])
            elif at_edge:
                own.append(LADDER[LADDER.index(own[-1]) + 1])
    return chosen


class Answer(NamedTuple):
    """A pair of algorithms on both models, second - first. `q` is the false-discovery rate of the
    difference on the small model."""

    first: str
    second: str
    small: Difference
    q: float
    large: Difference

    @property
    def same(self) -> str:
        """Say whether the difference on the large model has the sign of that on the small one:
        "same" or "opposite" if the interval on the large model excludes 0, else "undecided"."""
        if self.large.low <= 0 <= self.large.high:
            return "undecided"
        return "same" if self.large.mean * self.small.mean > 0 else "opposite"


def compare_sizes(rows: Sequence[study.Row]) -> list[Answer]:
    """Compare all pairs of algorithms on both models, by Student's t within seeds."""
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        size, arm, _ = row["variant"].split(", ")
        scores.setdefault((size, arm), {})[int(row["seed"])] = float(row["final"])
    pairs = list(itertools.combinations(ARMS, 2))
    found: dict[str, list[Difference]] = {}
    qs: list[float] = []
    for size in SIZES:
        sides = []
        for pair in pairs:
            first, second = (scores[size, arm] for arm in pair)
            seeds = sorted(first.keys() & second.keys())
            one = [first[seed] for seed in seeds]
            other = [second[seed] for seed in seeds]
            sides.append((one, other, find_smallest_step([*one, *other], 2e-5)))
        found[size] = [compare_pairs(one, two, resolution=step) for one, two, step in sides]
        if size == "small":
            qs = [q for _, q, _ in compare_together(sides)]
    return [
        Answer(*pair, small, q, large)
        for pair, small, q, large in zip(pairs, found["small"], qs, found["large"], strict=True)
    ]


def report(answers: Sequence[Answer]) -> Iterator[str]:
    """Yield a line for each pair, then the counts over the pairs claimed on the small model."""

    def say(d: Difference) -> str:
        return f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f})"

    yield "| second - first | embedded, 95 % | q | SmolLM2, 95 % | sign on SmolLM2 |"
    yield "|---|---|---|---|---|"
    for own in answers:
        claim = f"{own.q:.4f}{' *' if own.q <= ALPHA else ''}"
        cells = [f"{own.second} - {own.first}", say(own.small), claim, say(own.large), own.same]
        yield f"| {' | '.join(cells)} |"
    claimed = [own for own in answers if own.q <= ALPHA]
    counts = [
        f"{sum(own.same == kind for own in claimed)} {kind}"
        for kind in ("same", "opposite", "undecided")
    ]
    signs = sum(own.small.mean * own.large.mean > 0 for own in claimed)
    yield f"claimed on the embedded model: {len(claimed)} of {len(answers)}"
    yield f"of these on SmolLM2: {', '.join(counts)}; means of the same sign: {signs}"


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
    chosen = choose_rates(arguments.sizes, **places)
    final = [
        Run(*place, rate, seed) for place, rate in chosen.items() for seed in SIZES[place[0]].seeds
    ]
    rows = run_all(final, FOLDER / "results.csv", **places)
    if set(arguments.sizes) == set(SIZES):
        print("\n".join(report(compare_sizes(rows))))


if __name__ == "__main__":
    main()
