"""Make claims and summaries of many comparisons: correct several comparisons together, and
summarise scores over tasks. Symbols are those of rlkit/runs/comparing.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rlkit.runs.comparing import (
    ALPHA,
    TO_CLAIM,
    Difference,
    compare_pairs,
    find_detectable_effect,
    order_ascending,
    spread_bound,
)
from rlkit.statistics import LEVEL, student_quantile


def false_discovery(values: Sequence[float]) -> list[float]:
    """Adjust m p-values to control the false-discovery rate. If all differences with an adjusted
    value ≤ α are claimed, the expected share of false claims is ≤ α. The i-th smallest p-value
    becomes the minimum over j ≥ i of `m/j p_(j)`. The tests must be independent or positively
    dependent. Source: Benjamini and Hochberg 1995, JRSS B 57.

    >>> [round(q, 3) for q in false_discovery([0.01, 0.03, 0.04, 0.2])]
    [0.04, 0.053, 0.053, 0.2]
    """
    order = order_ascending(values)
    m = len(order)
    out = list(values)
    lowest = 1.0
    for rank in range(m, 0, -1):
        lowest = min(lowest, (m / rank) * values[order[rank - 1]])
        out[order[rank - 1]] = lowest
    return out


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
) -> tuple[float, float]:
    """Compute the 95 % percentile interval of a statistic of scores [n seeds, M], by drawing whole
    seeds with replacement.

    All columns share the seeds, so whole rows (one row per seed) are drawn. It would be wrong here
    to draw each column separately, as rliable does.
    """
    rng = np.random.default_rng(0)
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
