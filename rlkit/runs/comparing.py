"""Compare two arms (groups of runs that differ in a setting) and say how sure the result is. This
file computes paired differences, the change of one run, the seeds that a plan needs, and
corrections for several comparisons.

A figure is one number per run, for example its accuracy: a mean over the run's problems. Runs with
the same seed share problems, order and sampling noise. Therefore arms are paired by seed, and the
seeds are the independent units. Symbols: n seeds, M problems or tasks, m comparisons, α = 0.05
throughout. An interval needs three seeds, and a claim needs ten. tests/runs/test_sentences.py
checks by simulation that the sentences about results keep their promises.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
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
    while compute_power(high, n, comparisons=comparisons) < POWER:
        low = high
        high *= 2
    for _ in range(24):
        middle = (low + high) / 2
        if compute_power(middle, n, comparisons=comparisons) < POWER:
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


def compute_power(effect: float, n: int, *, comparisons: float = 1) -> float:
    """Compute the probability with which the paired t test at level α / comparisons finds a true
    difference `effect`, in units of the differences' standard deviation. The probability is
    `∫ [Φ(d - t s) + Φ(-d - t s)] f(s) ds`, and d is `effect √n`.

    s² ν has the χ² distribution of ν = n - 1 degrees of freedom. The integral is a sum over 200
    equal steps of s in 0 … 1 + 8/√(2ν).
    """
    freedom = n - 1
    d = effect * math.sqrt(n)
    t = student_quantile(1 - ALPHA / comparisons / 2, freedom)
    top = 1 + 8 / math.sqrt(2 * freedom)
    grid = (np.arange(200) + 0.5) * top / 200
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
    for rank, i in enumerate(order_ascending(values)):
        highest = max(highest, min(1.0, (m - rank) * values[i]))
        out[i] = highest
    return out


def holm_levels(values: Sequence[float]) -> list[float]:
    """Choose a confidence level for the interval of each comparison. With this level, the interval
    leaves out 0 exactly if Holm's rule makes the claim. For the i-th smallest p-value the level is
    `1 - α/(m - i + 1)`. The first comparison without a claim and all later comparisons have the
    same level."""
    order = order_ascending(values)
    m = len(order)
    stop = next((rank for rank, i in enumerate(order) if values[i] > ALPHA / (m - rank)), m)
    out = [1 - ALPHA / max(1, m)] * len(values)
    for rank, i in enumerate(order):
        out[i] = 1 - ALPHA / (m - min(rank, stop))
    return out


def order_ascending(values: Sequence[float]) -> list[int]:
    """Return the indices of all values except nan, smallest value first."""
    return sorted((i for i, p in enumerate(values) if not math.isnan(p)), key=lambda i: values[i])
