"""Which of two is better, and how sure that is: paired differences, corrections for several comparisons, and summaries over tasks.

A figure of a run is a mean over its problems. Runs of one seed share problems, order and sampling noise, so arms are paired by seed,
and the seeds are the independent units. n seeds, M problems or tasks, m comparisons, α = 0.05 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

ALPHA, POWER = 0.05, 0.8
FEWEST = 3  # seeds for an interval: Student's t of one degree of freedom is 12.7, and its interval says nothing
NORMAL = NormalDist()


class Difference(NamedTuple):
    """The mean of paired differences, its interval and its two-sided p-value; nan below `FEWEST` pairs."""

    mean: float
    low: float
    high: float
    p: float
    spread: float  # standard deviation of the differences
    n: int


# ------------------------------------------------------------------------------------------------------ Student's t


def student_cdf(t: float, freedom: int) -> float:
    """P(T ≤ t) of Student's t with a whole number of degrees of freedom ≥ 1, exact.

    With θ = atan(t / √ν), P(|T| ≤ t) is, for even ν, sin θ (1 + 1/2 cos²θ + 1·3/(2·4) cos⁴θ + … up to cos^(ν-2)), and for odd ν
    2/π (θ + sin θ (cos θ + 2/3 cos³θ + … up to cos^(ν-2))). Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.

    >>> round(student_cdf(2.262157, 9), 6)
    0.975
    """
    theta = math.atan(t / math.sqrt(freedom))
    first = 1 + freedom % 2
    term = 1.0 if first == 1 else math.cos(theta)
    total = 0.0
    for power in range(first, freedom, 2):
        total += term
        term *= power / (power + 1) * math.cos(theta) ** 2
    inside = math.sin(theta) * total
    if freedom % 2:
        inside = 2 / math.pi * (theta + inside)
    return 0.5 + inside / 2


def student_quantile(p: float, freedom: int) -> float:
    """The t with P(T ≤ t) = p, 0 < p < 1, by bisection of `student_cdf`.

    >>> round(student_quantile(0.975, 2), 3)
    4.303
    """
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def paired(first: Sequence[float], second: Sequence[float], *, level: float = 1 - ALPHA, resolution: float = 0.0) -> Difference:
    """The mean of second - first over the seeds, with Student's t of n - 1 degrees of freedom.

    D̄ ± t · s/√n. Seeds that share their noise have Var D̄ = (σ_A² + σ_B² - 2c σ_A σ_B)/n, c the correlation, so pairing gains where c > 0.

    Args:
      first, second: [n] figures, one a seed, in the same order of seeds.
      level: of the interval, in (0, 1).
      resolution: the smallest step of a figure, such as 1 / problems. Differences that are equal by rounding alone have at least the
        spread of it, resolution / √12. 0: no floor.
    Returns: nan for interval and p-value of fewer than `FEWEST` pairs.
    Raises: ValueError without pairs, or where the lengths differ.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    n = len(differences)
    if not n:
        raise ValueError("paired: no pairs")
    mean = math.fsum(differences) / n
    spread = math.sqrt(math.fsum((d - mean) ** 2 for d in differences) / (n - 1)) if n > 1 else math.nan
    if n < FEWEST:
        return Difference(mean, math.nan, math.nan, math.nan, spread, n)
    error = max(spread, resolution / math.sqrt(12)) / math.sqrt(n)
    half = student_quantile((1 + level) / 2, n - 1) * error
    t = abs(mean) / error if error else math.inf if mean else 0.0
    return Difference(mean, mean - half, mean + half, 2 * (1 - student_cdf(t, n - 1)), spread, n)


def bounded_mean(values: Sequence[float], *, level: float = 1 - ALPHA, resolution: float = 0.0) -> tuple[float, float, float]:
    """Mean over seeds of figures in 0 … 1, and an interval that stays there.

    Student's t of asin √x, which has nearly equal variance at all x, taken back by sin². nan for the bounds below `FEWEST` seeds.

    Args:
      resolution: the smallest step of a figure, as for `paired`.
    Raises: ValueError for a value outside 0 … 1, or none.

    >>> tuple(round(v, 3) for v in bounded_mean([0.85, 0.9, 0.97]))
    (0.907, 0.699, 1.0)
    """
    if not values or not all(0 <= v <= 1 for v in values):
        raise ValueError("bounded_mean: needs values within 0 … 1")
    mean = math.fsum(values) / len(values)
    step = _angle(mean + resolution / 2) - _angle(mean - resolution / 2)
    angles = paired([0.0] * len(values), [_angle(v) for v in values], level=level, resolution=step)
    if math.isnan(angles.low):
        return mean, math.nan, math.nan
    low, high = (math.sin(min(max(angle, 0.0), math.pi / 2)) ** 2 for angle in (angles.low, angles.high))
    return mean, min(low, mean), max(high, mean)


def _angle(share: float) -> float:
    """asin √x, of x cut to 0 … 1."""
    return math.asin(math.sqrt(min(max(share, 0.0), 1.0)))


# ------------------------------------------------------------------------------------------------------ seeds to plan


def seeds_needed(spread: float, effect: float, *, power: float = POWER, comparisons: int = 1) -> int:
    """Seeds for a paired comparison that finds a difference `effect` with probability `power`, at least `FEWEST`.

    n = (z + z_power)² (σ_D/δ)² + z²/2, z that of 1 - α/2; with power 0.8: 7.849 (σ_D/δ)² + 1.92. The last term is the cost of not
    knowing σ_D. Source: Guenther 1981, The American Statistician 35.

    Args:
      spread: standard deviation σ_D of the paired differences, ≥ 0. effect: δ > 0, in the same unit.
      comparisons: how many are made at once, ≥ 1; each then has α / comparisons.

    >>> seeds_needed(0.0148, 0.02), seeds_needed(0.0148, 0.01)
    (7, 20)
    """
    if not (effect > 0 and spread >= 0 and math.isfinite(spread)):
        raise ValueError(f"seeds_needed: effect={effect} must be above 0, and spread={spread} at least 0")
    z = NORMAL.inv_cdf(1 - ALPHA / comparisons / 2)
    return max(FEWEST, math.ceil((z + NORMAL.inv_cdf(power)) ** 2 * (spread / effect) ** 2 + z**2 / 2))


def detectable(spread: float, n: int, *, power: float = POWER, comparisons: int = 1) -> float:
    """The difference that n ≥ `FEWEST` seeds find with probability `power`, by `seeds_needed`; inf where n is too few."""
    z = NORMAL.inv_cdf(1 - ALPHA / comparisons / 2)
    return spread * (z + NORMAL.inv_cdf(power)) / math.sqrt(n - z**2 / 2) if n > z**2 / 2 else math.inf


def spread_bound(spread: float, n: int, *, confidence: float = POWER) -> float:
    """An upper bound of the true standard deviation, from one of n ≥ 2 values: s √((n - 1)/χ²), χ² its lower quantile.

    A pilot of few seeds underestimates the spread half of the time; a plan by this bound has its power with the given probability.
    The quantile by Wilson and Hilferty 1931, which is within 2 % from four values on.
    """
    freedom = n - 1
    root = 1 - 2 / (9 * freedom) + NORMAL.inv_cdf(1 - confidence) * math.sqrt(2 / (9 * freedom))
    return spread / math.sqrt(max(root, 0.05) ** 3)


def power_of(spread: float, effect: float, n: int, *, draws: int = 400) -> float:
    """P(the paired t test at α finds a true difference `effect`): ∫ [Φ(d - t s) + Φ(-d - t s)] f(s) ds, d = δ√n/σ.

    s² ν is χ² of ν = n - 1 degrees of freedom; its quantiles by integration over `draws` equal steps of s in 0 … 1 + 8/√(2ν).
    """
    if spread == 0:
        return 1.0
    freedom, d = n - 1, effect * math.sqrt(n) / spread
    t = student_quantile(1 - ALPHA / 2, freedom)
    top = 1 + 8 / math.sqrt(2 * freedom)
    grid = (np.arange(draws) + 0.5) * top / draws
    density = np.exp((freedom - 1) * np.log(grid) - freedom * grid**2 / 2)
    beyond = np.array([NORMAL.cdf(d - t * s) + NORMAL.cdf(-d - t * s) for s in grid])
    return float((density * beyond).sum() / density.sum())


# ------------------------------------------------------------------------------------------------------ several comparisons


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted so that the chance of any false claim among m stays ≤ α: max over j ≤ i of (m - j + 1) p_(j), at most 1.

    nan stays nan and is no comparison. Source: Holm 1979, Scandinavian Journal of Statistics 6.

    >>> [round(p, 3) for p in holm([0.01, 0.03, 0.04, 0.2])]
    [0.04, 0.09, 0.09, 0.2]
    """
    out, m, highest = list(values), sum(not math.isnan(p) for p in values), 0.0
    for rank, i in enumerate(_ascending(values)):
        highest = max(highest, min(1.0, (m - rank) * values[i]))
        out[i] = highest
    return out


def false_discovery(values: Sequence[float], *, dependent: bool = False) -> list[float]:
    """p-values adjusted so that the expected share of false claims among the claims stays ≤ α: min over j ≥ i of m/j p_(j).

    Args:
      dependent: times Σ 1/i, which holds under any dependence (Benjamini and Yekutieli 2001); else for independent or positively
        dependent tests (Benjamini and Hochberg 1995).
    nan stays nan and is no comparison.

    >>> [round(q, 3) for q in false_discovery([0.01, 0.03, 0.04, 0.2])]
    [0.04, 0.053, 0.053, 0.2]
    """
    order = _ascending(values)
    m = len(order)
    factor = math.fsum(1 / i for i in range(1, m + 1)) if dependent else 1.0
    out, lowest = list(values), 1.0
    for rank in range(m, 0, -1):
        lowest = min(lowest, factor * (m / rank) * values[order[rank - 1]])
        out[order[rank - 1]] = lowest
    return out


def holm_levels(values: Sequence[float]) -> list[float]:
    """The level of each interval that leaves out 0 exactly where Holm's rule makes the claim: 1 - α/(m - i + 1) for the i-th smallest
    p-value; from the first that makes none on, its level for all."""
    order = _ascending(values)
    m = len(order)
    stop = next((rank for rank, i in enumerate(order) if values[i] > ALPHA / (m - rank)), m)
    out = [1 - ALPHA / max(1, m)] * len(values)
    for rank, i in enumerate(order):
        out[i] = 1 - ALPHA / (m - min(rank, stop))
    return out


def _ascending(values: Sequence[float]) -> list[int]:
    """Places of the values that are numbers, smallest first."""
    return sorted((i for i, p in enumerate(values) if not math.isnan(p)), key=lambda i: values[i])


# ------------------------------------------------------------------------------------------------------ over tasks


def iqm(scores: Sequence[Sequence[float]] | np.ndarray) -> float:
    """Interquartile mean: of all nM scores, without the ⌊nM/4⌋ lowest and as many highest. Agarwal et al. 2021, arXiv:2108.13264.

    >>> iqm([range(8)]), iqm([[0, 1, 2, 3, 100]])
    (3.5, 2.0)
    """
    flat = np.sort(np.asarray(scores, dtype=float).ravel())
    cut = len(flat) // 4
    return float(flat[cut : len(flat) - cut].mean())


def bootstrap(
    scores: np.ndarray, statistic: Callable[[np.ndarray], float], *, problems: bool = False, draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """A statistic of scores [n seeds, M] and its 95 % percentile interval, by redrawing whole seeds with replacement.

    A seed is shared by all columns, so its row stays together; redrawing each column on its own, as rliable does, is wrong for that. The
    bootstrap variance of a mean is (n-1)/n · s²/n: too narrow for few seeds, so that below ten Student's t is to be preferred for means.

    Args:
      problems: columns are redrawn too (the pigeonhole bootstrap, Owen 2007, arXiv:0712.1111), for a claim about other problems of the
        same kind. Conservative: its variance counts the interaction of seeds and problems three times.
    """
    scores = np.asarray(scores, dtype=float)
    rng = np.random.default_rng(seed)
    n, columns = scores.shape
    found = []
    for _ in range(draws):
        drawn = scores[rng.integers(n, size=n)]
        found.append(statistic(drawn[:, rng.integers(columns, size=columns)] if problems else drawn))
    low, high = np.quantile(found, [ALPHA / 2, 1 - ALPHA / 2])
    return statistic(scores), float(low), float(high)


def profile(scores: Sequence[Sequence[float]] | np.ndarray, thresholds: Sequence[float]) -> list[float]:
    """Performance profile: the share of scores above each threshold. Its integral over 0 … 1 is the mean of scores in 0 … 1."""
    flat = np.asarray(scores, dtype=float).ravel()
    return [float((flat > threshold).mean()) for threshold in thresholds]


def improvement(first: np.ndarray, second: np.ndarray) -> float:
    """P(second > first): mean over tasks of the share of pairs of runs in which second is higher, ties ½. [n, M] and [m, M]."""
    a, b = np.asarray(first, dtype=float)[:, None], np.asarray(second, dtype=float)[None]
    return float(((b > a) + 0.5 * (b == a)).mean())


def ranks(scores: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, 1 the highest; equal scores share the mean of their ranks.

    >>> ranks(np.array([[0.9, 0.5, 0.9]])).tolist()
    [[1.5, 3.0, 1.5]]
    """
    scores = np.asarray(scores, dtype=float)
    higher = (scores[..., None, :] > scores[..., :, None]).sum(-1)
    same = (scores[..., None, :] == scores[..., :, None]).sum(-1)
    return higher + (same + 1) / 2
