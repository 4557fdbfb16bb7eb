"""Measure the score of GRPO as a function of staleness and learning rate, with three corrections.

    python experiments/bench/stale_rates.py [--jobs 2] [--folder runs/stale_rates] [--minutes 150]

The command can be repeated: it skips runs with a row in stale_rates/rows.csv, and stops after
`--minutes`. When no run is missing, it writes stale_rates/README.md, comparisons.csv and
scores.png. README.md of this folder has the rules, which were written before any run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import recorded

from rlkit.extras.bench import matrix as bench

HERE = Path(__file__).parent
OUT = HERE / "stale_rates"
TASKS = ("stale", "scales")
LAGS = (0, 2, 4, 8, 16)
RATES = ("2.23e-4", "6.67e-4", "2e-3", "6e-3", "1.8e-2")
SEEDS = range(300, 310)
CORRECTIONS = {
    "none": ("algorithm/correction=none",),
    "token_truncate": ("algorithm/correction=token_truncate",),
    "sampler": ("algorithm/correction=none", "algorithm.old=sampler"),
}
CENTRE = 2e-3  # of the surface
FACTOR = 3.0  # between two rates
DRAWS = 2000  # of seeds, for the intervals of the surface

# [seeds, lags, rates] scores of a (task, correction)
Grids = Mapping[tuple[str, str], np.ndarray]


class Surface(NamedTuple):
    """A quadratic fit to mean scores. `factor` is the change of the best rate for each doubling of
    1 + lag, nan if the fit has no maximum. `share` is the part of the variance between the 25 means
    that the fit explains."""

    factor: float
    share: float


# ---------------------------------------------------------------------------------------- the runs


def name_arm(lag: int, correction: str) -> str:
    """Without a lag, the three corrections differ by rounding alone, so one arm runs for all."""
    return f"lag {lag}, {correction}" if lag else "lag 0"


def list_arms() -> dict[str, tuple[str, ...]]:
    return {
        name_arm(lag, correction): (
            "algorithm=grpo",
            "asynchrony=lag",
            f"asynchrony.staleness={lag}",
            *words,
        )
        for lag in LAGS
        for correction, words in reversed(CORRECTIONS.items())  # "lag 0" has those of none
    }


def run_study(folder: Path, jobs: int, until: float) -> bool:
    """Run what is missing, seed by seed. Return whether nothing is missing."""
    arms = list_arms()
    places = [((task, arm), rate) for rate in RATES for task in TASKS for arm in arms]
    planned = recorded.plan(folder, "score", places, arms, SEEDS)
    return recorded.run_missing(planned, OUT, folder, jobs=jobs, until=until)


# -------------------------------------------------------------------------------------- the figures


def read_grids() -> Grids:
    """Return the scores of each task and correction, [seeds, lags, rates]."""
    scores = {
        (row["task"], row["arm"], row["rate"], int(row["seed"])): 1 - float(row["regret"])
        for row in recorded.read_rows(OUT).values()
    }
    return {
        (task, correction): np.array(
            [
                [
                    [scores[task, name_arm(lag, correction), rate, seed] for rate in RATES]
                    for lag in LAGS
                ]
                for seed in SEEDS
            ]
        )
        for task in TASKS
        for correction in CORRECTIONS
    }


def choose_for_each_seed(scores: np.ndarray) -> np.ndarray:
    """Choose a rate for each seed: the rate with the highest mean score on the other seeds, or the
    lowest of equal ones.

    Args:
      scores: [seeds, rates].
    Returns: [seeds] indices of rates. The choice for a seed does not depend on the seed's scores.
    """
    others = scores.sum(0) - scores
    return others.round(9).argmax(1)


def score_at_own_rates(scores: np.ndarray) -> np.ndarray:
    """Return the score of each seed [seeds] at the rate that the other seeds choose."""
    return scores[np.arange(len(scores)), choose_for_each_seed(scores)]


def fit_surface(means: np.ndarray) -> Surface:
    """Fit c0 + c1 x + c2 x² + c3 z + c4 z² + c5 x z to mean scores [lags, rates] by least squares.

    x is the logarithm of rate / CENTRE to the base FACTOR, and z is log2(1 + lag). If c2 < 0, the
    best rate is at x = -(c1 + c5 z) / 2 c2, so each doubling of 1 + lag multiplies it by FACTOR to
    the power -c5 / 2 c2.
    """
    x = np.log([float(rate) / CENTRE for rate in RATES]) / math.log(FACTOR)
    z = np.log2([1 + lag for lag in LAGS])
    z, x = (own.ravel() for own in np.meshgrid(z, x, indexing="ij"))
    terms = np.stack([np.ones_like(x), x, x**2, z, z**2, x * z], 1)
    own = means.ravel()
    found = np.linalg.lstsq(terms, own, rcond=None)[0]
    left = ((own - terms @ found) ** 2).sum() / ((own - own.mean()) ** 2).sum()
    factor = FACTOR ** (-found[5] / (2 * found[2])) if found[2] < 0 else math.nan
    return Surface(factor, 1 - left)


def find_factor_interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the surface's factor, by drawing seeds with replacement. Both
    bounds are nan if more than 2.5 % of the surfaces have no maximum."""
    generator = np.random.default_rng(0)
    n = len(scores)
    factors = [
        fit_surface(scores[generator.integers(n, size=n)].mean(0)).factor for _ in range(DRAWS)
    ]
    if np.isnan(factors).mean() > 0.025:
        return math.nan, math.nan
    low, high = np.nanquantile(factors, [0.025, 0.975])
    return float(low), float(high)


# ---------------------------------------------------------------------------------------- the page


def arrange_corrections(grids: Grids) -> bench.Scores:
    """Arrange the scores at own rates to compare the corrections at each lag."""
    return arrange_scores(
        (f"{task}, lag {lag}", correction, grids[task, correction][:, i])
        for task in TASKS
        for i, lag in enumerate(LAGS)
        for correction in CORRECTIONS
        if lag
    )


def arrange_lags(grids: Grids) -> bench.Scores:
    """Arrange the scores at own rates to compare the lags under each correction."""
    return arrange_scores(
        (f"{task}, {correction}", f"lag {lag}", scores[:, i])
        for (task, correction), scores in grids.items()
        for i, lag in enumerate(LAGS)
    )


def arrange_scores(cells: Iterable[tuple[str, str, np.ndarray]]) -> bench.Scores:
    """Arrange cells (column, arm, scores [seeds, rates]), each seed at its own rate."""
    return bench.arrange_scores(
        [
            {"task": column, "arm": arm, "seed": seed, "regret": 1 - score}
            for column, arm, scores in cells
            for seed, score in zip(SEEDS, score_at_own_rates(scores), strict=True)
        ]
    )


def tabulate_means(grids: Grids) -> str:
    """Return the mean score at each lag and rate, the highest of a lag in bold, and the score at
    own rates with the rate that most seeds are given."""
    lines = []
    for (task, correction), scores in grids.items():
        for i, lag in enumerate(LAGS):
            own = scores[:, i]
            means = own.mean(0)
            cells = [f"{mean:.3f}" for mean in means]
            cells[int(means.argmax())] = f"**{means.max():.3f}**"
            (usual, times), *_ = Counter(choose_for_each_seed(own).tolist()).most_common()
            edge = "*" if usual in (0, len(RATES) - 1) else ""
            at = f"{score_at_own_rates(own).mean():.3f} at {RATES[usual]}{edge}"
            at += f" ({times} of {len(own)})"
            lines.append([task, correction, str(lag), *cells, at])
    return bench.markdown(["task", "correction", "lag", *RATES, "own rate"], lines)


def tabulate_surfaces(grids: Grids) -> str:
    lines = []
    for (task, correction), scores in grids.items():
        fit = fit_surface(scores.mean(0))
        low, high = find_factor_interval(scores)
        factor = "no maximum" if math.isnan(low) else f"{fit.factor:.2f} ({low:.2f} to {high:.2f})"
        lines.append([task, correction, factor, f"{fit.share:.2f}"])
    head = ["task", "correction", "best rate for each doubling of 1 + lag", "variance explained"]
    return bench.markdown(head, lines)


def draw_scores(grids: Grids, path: Path) -> None:
    """Draw the mean scores over rates: a panel for each task and correction, a line for each
    lag."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(TASKS),
        len(CORRECTIONS),
        figsize=(11, 6),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    rates = [float(rate) for rate in RATES]
    for panel, ((task, correction), scores) in zip(panels.flat, grids.items(), strict=True):
        for i, lag in enumerate(LAGS):
            own = scores[:, i]
            error = own.std(0, ddof=1) / math.sqrt(len(own))
            panel.errorbar(
                rates, own.mean(0), yerr=error, marker="o", capsize=2, label=f"lag {lag}"
            )
        panel.set(title=f"{task}, {correction}", xscale="log")
        panel.axhline(0, color="grey", linewidth=0.8)
    for panel in panels[-1]:
        panel.set_xlabel("learning rate")
    for panel in panels[:, 0]:
        panel.set_ylabel("score (mean and standard error)")
    panels[0, 0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def write_page() -> None:
    grids = read_grids()
    rows = list(recorded.read_rows(OUT).values())
    tables = {"corrections": arrange_corrections(grids), "lags": arrange_lags(grids)}
    compared = [
        {"between": name}
        | {k: round(v, 5) if isinstance(v, float) else v for k, v in pair._asdict().items()}
        for name, scores in tables.items()
        for pair in bench.compare_arms(scores)
    ]
    bench.write_rows(OUT / "comparisons.csv", compared)
    draw_scores(grids, OUT / "scores.png")
    shares = [[name, f"{recorded.count_null_pages(scores):.1%}"] for name, scores in tables.items()]
    parts = [
        "# Staleness × learning rate\n\n`python experiments/bench/stale_rates.py` writes this page"
        " from rows.csv. [The rules](../README.md#staleness--learning-rate) were written before any"
        " run.",
        recorded.describe_runs(rows),
        "![scores over rates](scores.png)",
        "## Mean scores",
        f"Over seeds {SEEDS[0]} to {SEEDS[-1]}; the highest of a row in bold. At its own rate, each"
        " seed is scored at the rate that is best on the other nine seeds. The last column has the"
        " rate that most seeds are given; * marks the lowest and the highest rate: a better one may"
        " lie outside. The rows of lag 0 are one set of runs.",
        tabulate_means(grids),
        "## The best rate",
        "From a quadratic surface over the logarithms of rate and 1 + lag, with 95 % intervals over"
        " seeds.",
        tabulate_surfaces(grids),
        "## Corrections at each lag, at own rates",
        bench.tabulate_by_task(tables["corrections"]),
        bench.list_claims(tables["corrections"]),
        "## Lags under each correction, at own rates",
        bench.tabulate_by_task(tables["lags"]),
        bench.list_claims(tables["lags"]),
        "## Control",
        f"The share of {recorded.PAGES} pages with a claim if the arms of each seed are permuted at"
        " random:",
        bench.markdown(["page", "with a claim"], shares),
        *recorded.list_failed(rows),
    ]
    (OUT / "README.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    recorded.follow(__doc__ or "", OUT, run_study, write_page)
