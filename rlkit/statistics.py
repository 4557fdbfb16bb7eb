"""Means, accuracies and their intervals: Student's t, Wilson's interval, and intervals of bounded
means."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution
LEVEL = 0.95  # default level of an interval
# fewest runs for an interval: with two, Student's t is 12.7, and the interval says nothing
FEWEST = 3


def wilson(successes: float, n: float) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a proportion.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = successes / n

    Args:
      successes: number of successes, 0 … n.
      n: number of independent trials, ≥ 1. Repeated rows count as fewer trials than rows
        (`count_independent`), so neither number has to be whole.
    Returns: lower and upper bound, within 0 … 1.
    Raises: ValueError if the counts are impossible.
    Source: Wilson 1927, J. Am. Stat. Assoc. 22.

    >>> tuple(round(bound, 3) for bound in wilson(50, 100))
    (0.404, 0.596)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(
            f"wilson: successes={successes} must lie in 0 … n={n}, and n be at least 1"
        )
    p = successes / n
    z2 = Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def share_interval(successes: float, n: float) -> tuple[float, float]:
    """Compute a 95 % interval of a proportion that is valid near 0 and 1 too. It is `wilson`,
    widened if there are at most three successes or at most three failures.

    With few failures, Wilson's interval is too short towards 1: for a true share of 0.995 and
    samples of 35, it covers the truth in only 0.84 to 0.91 of cases. Then the bound is the exact
    Poisson bound, λ/n with P(Poisson(λ) ≥ failures) = 2.5 %.
    Source: Brown, Cai and DasGupta 2001, Statistical Science 16, section 4.1.1.

    >>> (
    ...     share_interval(50, 100) == wilson(50, 100),
    ...     round(share_interval(34, 35)[1], 4),
    ...     round(wilson(34, 35)[1], 4),
    ... )
    (True, 0.9993, 0.9949)
    """
    low, high = wilson(successes, n)
    failures = n - successes
    if 0 < failures <= 3:
        high = max(high, 1 - _fewest_expected(failures) / n)
    if 0 < successes <= 3:
        low = min(low, _fewest_expected(successes) / n)
    return low, high


def _fewest_expected(count: float) -> float:
    """Find the λ with P(Poisson(λ) ≥ count) = 2.5 %, for a count > 0 that need not be whole. The
    probability is the incomplete gamma function, computed by its series."""
    low = 0.0
    high = count
    for _ in range(60):
        middle = (low + high) / 2
        terms = (
            math.exp((count + k) * math.log(middle) - middle - math.lgamma(count + k + 1))
            for k in range(40)
        )
        if math.fsum(terms) < (1 - LEVEL) / 2:
            low = middle
        else:
            high = middle
    return low


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k)

    Args:
      n: number of samples drawn, >= k.
      c: number of right samples, 0 … n.
      k: samples per attempt, >= 1.
    Raises: ValueError if the counts are impossible.
    Source: Chen et al. 2021, arXiv:2107.03374, section 2.1.

    >>> pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4)
    (0.5, 0.8333)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: needs 0 <= c <= n and 1 <= k <= n, has n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def count_independent(weights: Sequence[float]) -> float:
    """Compute the effective number of weighted values, (Σw)² / Σw². The mean of this many equally
    weighted values would be just as uncertain.

    For example, 294 rows of 42 distinct problems, each problem in 7 rows, count as 42.
    Source: Kish 1965, Survey Sampling, 11.7.

    >>> count_independent([7] * 42), count_independent([41, 1])
    (42.0, 1.0487514863258025)
    """
    return math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)


def mean_interval(
    values: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """Compute the mean over distinct problems and its 95 % interval. The interval stays within 0 …
    1, or within the range of the values if this is wider.

    This is `bounded_interval` with the range [min(0, lowest), max(1, highest)]. A single problem
    may have any value in the range, so chance alone can give the binomial variance. For zeros and
    ones the result is Wilson's interval with Student's t.

    Args:
      values: one value for each problem; average the samples of a problem first.
      weights: number of rows of each problem; None means one row each.
    Returns: (mean, low, high). For a single problem the interval is the whole range.
    Raises: ValueError without values.

    >>> tuple(round(v, 3) for v in mean_interval([0.0, 1.0, 1.0, 0.0]))
    (0.5, 0.061, 0.939)
    """
    if not values:
        raise ValueError("mean_interval: no values")
    own = [1.0] * len(values) if weights is None else list(weights)
    total = math.fsum(own)
    mean = math.fsum(w * v for w, v in zip(own, values, strict=True)) / total
    n = count_independent(own)
    bottom = min(0.0, *values)
    top = max(1.0, *values)
    if len(values) < 2:
        return mean, bottom, top
    square = math.fsum(w * (v - mean) ** 2 for w, v in zip(own, values, strict=True)) / total
    variance = square * n / (n - 1)
    freedom = min(1000, max(1, math.floor(n + 1e-9) - 1))  # beyond, t equals t of 1000 to 0.2 %
    t = student_quantile((1 + LEVEL) / 2, freedom)
    return mean, *bounded_interval(mean, variance, t**2 / n, chance=1.0, bounds=(bottom, top))


def bounded_interval(
    mean: float, variance: float, factor: float, *, chance: float, bounds: tuple[float, float]
) -> tuple[float, float]:
    """Compute an interval of a mean of values between two bounds. The interval has all μ with
    `(mean - μ)² ≤ factor · V(μ)`.

    Near a bound the variance V depends on the mean, so V is a function of μ. With μ as a share of
    the range, and with `r(μ) = μ(1 - μ) / (mean (1 - mean))`:

      V(μ) = c · r(μ) + e · max(r(μ), r(μ)²)

    c is the part of the variance due to counting, at most `chance · mean (1 - mean)`, and e is the
    rest. With e = 0 this is Wilson's interval. r² describes figures whose distance from the bound
    varies by a factor.

    Args:
      mean, variance: mean and variance of the values, which are within the bounds.
      factor: t² / n for n values, t the quantile of Student's t.
      chance: counting alone gives a value with mean μ, as a share of the range, a variance of at
        most `chance · μ(1 - μ)`. It is 1 / problems for an accuracy, and 1 for a single reply.
    Returns: lower and upper bound, with the mean between them.
    """
    bottom, top = bounds
    span = top - bottom
    share = (mean - bottom) / span
    room = share * (1 - share)
    if room < 1e-12:  # all values are at a bound: only counting is left
        counted = chance
        rest = 0.0
    else:
        by_chance = min(variance / span**2, chance * room)
        counted = by_chance / room
        rest = (variance / span**2 - by_chance) / room
    ends = []
    for edge in (0.0, 1.0):
        inside = share
        outside = edge
        for _ in range(60):
            middle = (inside + outside) / 2
            own = middle * (1 - middle)
            grown = max(1.0, own / room) if rest else 1.0
            if (share - middle) ** 2 <= factor * own * (counted + rest * grown):
                inside = middle
            else:
                outside = middle
        ends.append(bottom + span * inside)
    return min(ends[0], mean), max(ends[1], mean)


# -------------------------------------------------------------------------------------- Student's t


def student_cdf(t: float, freedom: int) -> float:
    """Compute P(T ≤ t) of Student's t exactly, for a whole number of degrees of freedom ≥ 1.

    Let ν be `freedom` and θ = atan(t / √ν). The sums below go up to cos^(ν-2).

    even ν: `P(|T| ≤ t) = sin θ (1 + 1/2 cos²θ + 1·3/(2·4) cos⁴θ + …)`
    odd ν: `P(|T| ≤ t) = 2/π (θ + sin θ (cos θ + 2/3 cos³θ + …))`

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.

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


@functools.lru_cache(4096)
def student_quantile(p: float, freedom: int) -> float:
    """Find the t with P(T ≤ t) = p, 0 < p < 1, by bisection of `student_cdf`.

    >>> round(student_quantile(0.975, 2), 3)
    4.303
    """
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    low = 0.0
    high = 1.0
    while student_cdf(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2
