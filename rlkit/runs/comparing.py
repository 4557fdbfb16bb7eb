"""Compare two arms (groups of runs that differ in a setting) and say how sure the result is. This
file computes paired differences, corrections for several comparisons, and summaries over tasks.

A figure is one number per run, for example its accuracy: a mean over the run's problems. Runs with
the same seed share problems, order and sampling noise. Therefore arms are paired by seed, and the
seeds are the independent units. Symbols: n seeds, M problems or tasks, m comparisons, α = 0.05
throughout. An interval needs three seeds, and a claim needs ten. tests/runs/test_sentences.py
checks by simulation that the sentences about results keep their promises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from rlkit.statistics import FEWEST, LEVEL, bounded_interval, student_cdf, student_quantile

ALPHA = 0.05
POWER = 0.8
TO_CLAIM = 10  # smallest number of seeds for a claim; with fewer, a difference is only shown
NORMAL = NormalDist()
ERF = np.frompyfunc(math.erf, 1, 1)


class Difference(NamedTuple):
    """Hold the mean of paired differences, with its interval and its two-sided p-value. Interval
    and p-value are nan for fewer than `FEWEST` pairs."""

    mean: float
    low: float
    high: float
    p: float
    spread: float  # standard deviation of the differences, at least the one of rounding errors
    n: int

    def evidence(self) -> float:
        """Return the p-value for a claim. With fewer than `TO_CLAIM` pairs the result is nan.
        Corrections for several comparisons skip nan."""
        return self.p if self.n >= TO_CLAIM else math.nan


# -------------------------------------------------------------------------------------------- pairs


def compare_pairs(
    first: Sequence[float],
    second: Sequence[float],
    *,
    level: float = LEVEL,
    resolution: float = 0.0,
) -> Difference:
    """Compute the mean of second - first over the seeds, with an interval and a p-value by
    Student's t of n - 1 degrees of freedom.

    D̄ ± t · s/√n, with the mean D̄ and the standard deviation s of the n differences

    With shared noise, `Var D̄ = (σ_A² + σ_B² - 2c σ_A σ_B)/n`. Here σ_A and σ_B are the standard
    deviations of the two arms over the seeds, and c is their correlation. Therefore pairing helps
    if c > 0.

    Args:
      first, second: [n] figures, one per seed, in the same order of seeds.
      level: the confidence level of the interval, in (0, 1).
      resolution: the smallest step of a figure, for example 1 / problems. The spread of the
        differences is taken to be at least `resolution / √12`, the spread of rounding, even if all
        differences are equal. 0 sets no such floor.
    Returns: the Difference; interval and p-value are nan for fewer than `FEWEST` pairs.
    Raises: ValueError without pairs, or if the lengths differ.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    n = len(differences)
    if not n:
        raise ValueError("compare_pairs: no pairs")
    mean = math.fsum(differences) / n
    if n < 2:
        return Difference(mean, math.nan, math.nan, math.nan, math.nan, n)
    spread = compute_spread(differences, resolution)
    if n < FEWEST:
        return Difference(mean, math.nan, math.nan, math.nan, spread, n)
    error = spread / math.sqrt(n)
    half = student_quantile((1 + level) / 2, n - 1) * error
    t = math.inf if mean else 0.0
    if error:
        t = abs(mean) / error
    return Difference(mean, mean - half, mean + half, 2 * (1 - student_cdf(t, n - 1)), spread, n)


def compute_spread(values: Sequence[float], resolution: float = 0.0) -> float:
    """Compute the standard deviation of n ≥ 2 values. The result is at least `resolution / √12`,
    the standard deviation of errors from rounding to `resolution`."""
    mean = math.fsum(values) / len(values)
    square = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return max(math.sqrt(square), resolution / math.sqrt(12))


def find_smallest_step(figures: Sequence[float], rounding: float = 1e-9) -> float:
    """Estimate the step of a score with few possible values. The estimate is the smallest
    difference between two figures that is larger than a rounding error.

    The estimate is never smaller than the true step. If all figures are equal, the step is unknown
    and the result is 0.

    >>> round(find_smallest_step([0.5, 0.75, 0.5, 0.625]), 3), find_smallest_step([0.5, 0.5])
    (0.125, 0.0)
    """
    places = sorted(figures)
    return min((b - a for a, b in pairwise(places) if b - a > rounding), default=0.0)


def estimate_bounded_mean(
    values: Sequence[float],
    *,
    level: float = LEVEL,
    resolution: float = 0.0,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[float, float, float]:
    """Compute the mean over seeds of figures between two bounds, and an interval for it within the
    bounds.

    The interval is Wilson's, with Student's t and the variance over the seeds (`bounded_interval`).
    Near a bound, the side away from the bound is longer, because a few wrong answers in a few seeds
    may be luck.

    Args:
      resolution: the smallest step of a figure, as for `compare_pairs`.
    Returns: (mean, low, high). low and high are nan for fewer than `FEWEST` seeds. With
      resolution=0 they are also nan if all values are equal, because equal values do not show how
      much figures vary.
    Raises: ValueError for a value outside the bounds, or without values.

    >>> tuple(round(v, 3) for v in estimate_bounded_mean([0.85, 0.9, 0.97]))
    (0.907, 0.466, 0.98)
    """
    bottom, top = bounds
    if not values or not all(bottom <= value <= top for value in values):
        raise ValueError(f"estimate_bounded_mean: needs values within {bottom:g} … {top:g}")
    n = len(values)
    mean = min(top, max(bottom, math.fsum(values) / n))
    if n < FEWEST or (not resolution and min(values) == max(values)):
        return mean, math.nan, math.nan
    variance = compute_spread(values, resolution) ** 2
    factor = student_quantile((1 + level) / 2, n - 1) ** 2 / n
    chance = resolution / (top - bottom)
    return mean, *bounded_interval(mean, variance, factor, chance=chance, bounds=bounds)


# --------------------------------------------------------------------------------- before and after


class WithInterval(NamedTuple):
    """Hold a value and its 95 % interval. A number that is unknown is nan."""

    value: float
    low: float
    high: float


def newcombe(before: WithInterval, after: WithInterval) -> WithInterval:
    """Compute a change and its interval from the intervals before and after it (Newcombe 1998,
    method 10, for independent samples).

    `d = after - before`, `low = d - √((after - after_low)² + (before_high - before)²)`, high
    likewise

    >>> tuple(
    ...     round(v, 3) for v in newcombe(WithInterval(0.5, 0.4, 0.6), WithInterval(0.9, 0.8, 0.95))
    ... )
    (0.4, 0.259, 0.512)
    """
    change = after.value - before.value
    low = change - math.hypot(after.value - after.low, before.high - before.value)
    return WithInterval(
        change, low, change + math.hypot(after.high - after.value, before.value - before.low)
    )


def estimate(value: float | None, interval: Sequence[float | None]) -> WithInterval:
    """Read a value and its interval from a summary. Null becomes nan."""
    return WithInterval(*(math.nan if v is None else float(v) for v in (value, *interval)))


# ------------------------------------------------------------------------------------ seeds to plan


def count_needed_seeds(spread: float, effect: float, *, comparisons: float = 1) -> int:
    """Count the seeds that a paired t test needs to find a difference `effect` with probability
    POWER. The result is at least `TO_CLAIM`.

    Up to 300 seeds the count comes from `compute_power`, which is exact for normal differences.
    Above 300 seeds, the count is `(z + z_power)² (σ_D/δ)² + z²/2` (Guenther 1981, The American
    Statistician 35). Pass an estimated spread through `spread_bound` first. If the estimated spread
    itself is used, half of all plans have less power than planned.

    Args:
      spread: standard deviation σ_D of the paired differences, ≥ 0. effect: the difference δ > 0 to
        find, in the same unit.
      comparisons: number of comparisons made together, ≥ 1; each is tested at α / comparisons.

    >>> count_needed_seeds(0.0148, 0.02), count_needed_seeds(0.0148, 0.01)
    (10, 20)
    """
    if not (effect > 0 and spread >= 0 and math.isfinite(spread)):
        raise ValueError(
            f"count_needed_seeds: effect={effect} must be above 0, and spread={spread} at least 0"
        )
    z = NORMAL.inv_cdf(1 - ALPHA / comparisons / 2)
    about = (z + NORMAL.inv_cdf(POWER)) ** 2 * (spread / effect) ** 2 + z**2 / 2
    if about > 300:
        return math.ceil(about)
    low = TO_CLAIM - 1  # a number of seeds that is too small, or one below the minimum
    high = TO_CLAIM
    while find_detectable_effect(spread, high, comparisons=comparisons) > effect:
        low = high
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if find_detectable_effect(spread, middle, comparisons=comparisons) > effect:
            low = middle
        else:
            high = middle
    return high


def find_detectable_effect(spread: float, n: int, *, comparisons: float = 1) -> float:
    """Return the smallest difference that n seeds find with probability POWER (`compute_power`).
    With fewer than `TO_CLAIM` seeds the result is inf, because nothing can be claimed."""
    return spread * compute_visible_effect(n, comparisons) if n >= TO_CLAIM else math.inf


@functools.lru_cache(4096)
def compute_visible_effect(n: int, comparisons: float) -> float:
    """Return the smallest difference that n seeds find with probability POWER, in units of the
    differences' standard deviation."""
    low = 0.0
    high = 1.0
    while compute_power(1.0, high, n, comparisons=comparisons) < POWER:
        low = high
        high *= 2
    for _ in range(24):
        middle = (low + high) / 2
        if compute_power(1.0, middle, n, comparisons=comparisons) < POWER:
            low = middle
        else:
            high = middle
    return high


def spread_bound(spread: float, n: int) -> float:
    """Return an upper bound of the true standard deviation: `s √((n - 1)/χ²)`. s is the standard
    deviation of n ≥ 2 values, and χ² is a lower quantile of the χ² distribution with n - 1 degrees
    of freedom.

    A pilot with few seeds underestimates the spread about half of the time. A plan with this bound
    reaches its power with the probability POWER. The quantile is approximated as in Wilson
    and Hilferty 1931, to within 2 % from four values on.
    """
    freedom = n - 1
    root = 1 - 2 / (9 * freedom) + NORMAL.inv_cdf(1 - POWER) * math.sqrt(2 / (9 * freedom))
    return spread / math.sqrt(max(root, 0.05) ** 3)


def compute_power(
    spread: float, effect: float, n: int, *, comparisons: float = 1, draws: int = 200
) -> float:
    """Compute the probability with which the paired t test at level α / comparisons finds a true
    difference δ = `effect`. The probability is `∫ [Φ(d - t s) + Φ(-d - t s)] f(s) ds`, and d
    is `δ√n/σ`.

    s² ν has the χ² distribution of ν = n - 1 degrees of freedom. The integral is a sum over `draws`
    equal steps of s in 0 … 1 + 8/√(2ν).
    """
    if spread == 0:
        return 1.0
    freedom = n - 1
    d = effect * math.sqrt(n) / spread
    t = student_quantile(1 - ALPHA / comparisons / 2, freedom)
    top = 1 + 8 / math.sqrt(2 * freedom)
    grid = (np.arange(draws) + 0.5) * top / draws
    logs = (freedom - 1) * np.log(grid) - freedom * grid**2 / 2
    density = np.exp(logs - logs.max())
    inside = ERF((d + t * grid) / math.sqrt(2)) - ERF((d - t * grid) / math.sqrt(2))
    return float(1 - (density * np.asarray(inside, dtype=float)).sum() / density.sum() / 2)


# ------------------------------------------------------------------------------ several comparisons


def holm(values: Sequence[float]) -> list[float]:
    """Adjust m p-values by Holm's rule. If all differences with an adjusted value ≤ α are claimed,
    the chance of any false claim is ≤ α. The i-th smallest p-value becomes the maximum over j ≤ i
    of `(m - j + 1) p_(j)`, at most 1.

    A nan stays nan and does not count as a comparison. Source: Holm 1979, Scandinavian Journal of
    Statistics 6.

    >>> [round(p, 3) for p in holm([0.01, 0.03, 0.04, 0.2])]
    [0.04, 0.09, 0.09, 0.2]
    """
    out = list(values)
    m = sum(not math.isnan(p) for p in values)
    highest = 0.0
    for rank, i in enumerate(_order_ascending(values)):
        highest = max(highest, min(1.0, (m - rank) * values[i]))
        out[i] = highest
    return out


def false_discovery(values: Sequence[float], *, dependent: bool = False) -> list[float]:
    """Adjust m p-values to control the false-discovery rate. If all differences with an adjusted
    value ≤ α are claimed, the expected share of false claims is ≤ α. The i-th smallest p-value
    becomes the minimum over j ≥ i of `m/j p_(j)`.

    Args:
      dependent: whether to multiply by Σ 1/i. With this factor the result is valid under any
        dependence of the tests (Benjamini and Yekutieli 2001). Without the factor, the tests must
        be independent or positively dependent (Benjamini and Hochberg 1995).

    >>> [round(q, 3) for q in false_discovery([0.01, 0.03, 0.04, 0.2])]
    [0.04, 0.053, 0.053, 0.2]
    """
    order = _order_ascending(values)
    m = len(order)
    factor = math.fsum(1 / i for i in range(1, m + 1)) if dependent else 1.0
    out = list(values)
    lowest = 1.0
    for rank in range(m, 0, -1):
        lowest = min(lowest, factor * (m / rank) * values[order[rank - 1]])
        out[order[rank - 1]] = lowest
    return out


def holm_levels(values: Sequence[float]) -> list[float]:
    """Choose a confidence level for the interval of each comparison. With this level, the interval
    leaves out 0 exactly if Holm's rule makes the claim. For the i-th smallest p-value the level is
    `1 - α/(m - i + 1)`. The first comparison without a claim and all later comparisons have the
    same level."""
    order = _order_ascending(values)
    m = len(order)
    stop = next((rank for rank, i in enumerate(order) if values[i] > ALPHA / (m - rank)), m)
    out = [1 - ALPHA / max(1, m)] * len(values)
    for rank, i in enumerate(order):
        out[i] = 1 - ALPHA / (m - min(rank, stop))
    return out


def _order_ascending(values: Sequence[float]) -> list[int]:
    """Return the indices of all values except nan, smallest value first."""
    return sorted((i for i, p in enumerate(values) if not math.isnan(p)), key=lambda i: values[i])


class Tested(NamedTuple):
    """Hold the result of one comparison among several."""

    difference: Difference
    q: float  # false-discovery rate of the claim; nan below `TO_CLAIM` seeds
    # difference that these seeds would find with probability `POWER`; inf below `TO_CLAIM` seeds
    sees: float


def compare_together(
    sides: Sequence[tuple[Sequence[float], Sequence[float], float]],
) -> list[Tested]:
    """Make several paired comparisons, correct the p-values together by `false_discovery`, and give
    intervals that agree with the claims.

    With R claims among m comparisons, each interval is at the level `1 - max(1, R) α/m`. Then on
    average 5 % of the claims' intervals miss the truth (Benjamini and Yekutieli 2005, JASA 100),
    and an interval leaves out 0 exactly if a claim is made. The next claim would have needed a
    p-value of at most (R + 1) α/m. `sees` is computed for tests at this level, with the upper bound
    of the spread. If no comparison has enough seeds for a claim, each interval is at the level 95
    %.

    Args:
      sides: for each comparison a tuple: [n] figures of the first arm, [n] figures of the second
        arm, and the smallest step of a figure, as for `compare_pairs`.
    """
    tests = [compare_pairs(first, second, resolution=step) for first, second, step in sides]
    rates = false_discovery([test.evidence() for test in tests])
    m = sum(not math.isnan(q) for q in rates)
    claimed = sum(q <= ALPHA for q in rates)
    level = 1 - ALPHA * max(1, claimed) / m if m else LEVEL
    out = []
    for (first, second, step), test, q in zip(sides, tests, rates, strict=True):
        if math.isnan(q):
            out.append(Tested(test, q, math.inf))
            continue
        bound = spread_bound(test.spread, test.n)
        sees = find_detectable_effect(bound, test.n, comparisons=max(1.0, m / (claimed + 1)))
        out.append(Tested(compare_pairs(first, second, level=level, resolution=step), q, sees))
    return out


# --------------------------------------------------------------------------------------- over tasks


def iqm(scores: Sequence[Sequence[float]] | np.ndarray) -> float:
    """Compute the interquartile mean of n · M scores: the mean without the ⌊nM/4⌋ lowest and the
    ⌊nM/4⌋ highest scores. Agarwal et al. 2021, arXiv:2108.13264.

    >>> iqm([range(8)]), iqm([[0, 1, 2, 3, 100]])
    (3.5, 2.0)
    """
    flat = np.sort(np.asarray(scores, dtype=float).ravel())
    cut = len(flat) // 4
    return float(flat[cut : len(flat) - cut].mean())


def seeds_interval(
    scores: np.ndarray, statistic: Callable[[np.ndarray], float], *, resolution: float = 0.0
) -> tuple[float, float, float]:
    """Compute a statistic of scores [n seeds, M] that trims extremes, for example `iqm`, and its 95
    % interval. The interval is nan below `TO_CLAIM` seeds.

    Each end is the wider end of two intervals: Student's t with the jackknife (one seed left out at
    a time), and `bootstrap`. The bootstrap alone is too narrow for few seeds (it covers the truth
    in 0.88 to 0.91 of cases at ten seeds). The jackknife alone is too narrow if the scores take few
    values. In one column, ⌊n/4⌋ seeds on either side are trimmed, so there are `n-2⌊n/4⌋-1` degrees
    of freedom (Tukey and McLaughlin 1963, Sankhyā 25).

    Args:
      resolution: the smallest step of a score. The standard error is at least the rounding error of
        a mean over the scores left in one column after trimming.
    """
    scores = np.asarray(scores, dtype=float)
    n = len(scores)
    value = statistic(scores)
    if n < TO_CLAIM:
        return value, math.nan, math.nan
    without = np.array([statistic(np.delete(scores, seed, axis=0)) for seed in range(n)])
    kept = n - 2 * (n // 4)
    error = math.sqrt((n - 1) / n * float(((without - without.mean()) ** 2).sum()))
    error = max(error, resolution / math.sqrt(12 * kept))
    half = student_quantile((1 + LEVEL) / 2, kept - 1) * error
    low, high = bootstrap(scores, statistic)
    return value, min(low, value - half), max(high, value + half)


def bootstrap(
    scores: np.ndarray,
    statistic: Callable[[np.ndarray], float],
    *,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the 95 % percentile interval of a statistic of scores [n seeds, M], by drawing whole
    seeds with replacement.

    All columns share the seeds, so whole rows (one row per seed) are drawn. It would be wrong here
    to draw each column separately, as rliable does.
    """
    rng = np.random.default_rng(seed)
    n = len(scores)
    found = [statistic(scores[rng.integers(n, size=n)]) for _ in range(draws)]
    low, high = np.quantile(found, [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


def profile(
    scores: Sequence[Sequence[float]] | np.ndarray, thresholds: Sequence[float]
) -> list[float]:
    """Compute the performance profile: the share of scores above each threshold. For scores in 0 …
    1, its integral over 0 … 1 is their mean."""
    flat = np.asarray(scores, dtype=float).ravel()
    return [float((flat > threshold).mean()) for threshold in thresholds]


def improvement(first: np.ndarray, second: np.ndarray) -> float:
    """Estimate P(second > first). For each task this is the share of pairs of runs in which
    `second` has the higher score; a tie counts as ½. The result is the average over tasks. The
    scores are [n, M] and [m, M]."""
    a = np.asarray(first, dtype=float)[:, None]
    b = np.asarray(second, dtype=float)[None]
    return float(((b > a) + 0.5 * (b == a)).mean())


def ranks(scores: np.ndarray) -> np.ndarray:
    """Rank scores along the last axis; the highest has rank 1. Equal scores share the mean of their
    ranks.

    >>> ranks(np.array([[0.9, 0.5, 0.9]])).tolist()
    [[1.5, 3.0, 1.5]]
    """
    scores = np.asarray(scores, dtype=float)
    higher = (scores[..., None, :] > scores[..., :, None]).sum(-1)
    same = (scores[..., None, :] == scores[..., :, None]).sum(-1)
    return higher + (same + 1) / 2
