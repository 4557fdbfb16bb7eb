"""Estimates of accuracy with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054  # the 97.5 % quantile of the normal distribution


def wilson(successes: int, n: int) -> tuple[float, float]:
    """95 % interval of a proportion.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), p = successes / n

    Args:
      successes: 0 … n. n: independent trials, > 0.
    Returns: lower and upper bound, within 0 … 1.
    Raises: ValueError where the counts are impossible.
    Source: Wilson 1927, J. Am. Stat. Assoc. 22.

    >>> tuple(round(bound, 3) for bound in wilson(50, 100))
    (0.404, 0.596)
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"wilson: successes={successes} must lie in 0 … n={n}, and n be at least 1")
    p, z2 = successes / n, Z95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is right.

    1 - C(n - c, k) / C(n, k)

    Args:
      n: samples drawn, >= k. c: how many of them are right, 0 … n. k: >= 1.
    Raises: ValueError where the counts are impossible.
    Source: Chen et al. 2021, arXiv:2107.03374, section 2.1.

    >>> pass_at_k(4, 2, 1), round(pass_at_k(4, 2, 2), 4)
    (0.5, 0.8333)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k: needs 0 <= c <= n and 1 <= k <= n, has n={n}, c={c}, k={k}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean over tasks and its 95 % interval, mean ± z · s/√n with s the sample standard deviation.

    The tasks are the independent units: samples of one task are averaged before. With one task the interval is the mean itself.
    Raises: ValueError without values.

    >>> tuple(round(v, 3) for v in mean_interval([0.0, 1.0, 1.0, 0.0]))
    (0.5, -0.066, 1.066)
    """
    if not values:
        raise ValueError("mean_interval: no values")
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1) if n > 1 else 0.0
    half = Z95 * math.sqrt(variance / n)
    return mean, mean - half, mean + half
