"""Keep the running mean and standard deviation of the rewards of all episodes so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rlkit.types import Rollout


class Moments(NamedTuple):
    """Hold the running moments of total rewards, as plain numbers for a checkpoint."""

    n: float = 0.0  # number of rewards
    mean: float = 0.0
    squares: float = 0.0  # sum of squared deviations from the mean

    @property
    def std(self) -> float:
        """Return the standard deviation of the population; 0 before the first reward."""
        return math.sqrt(self.squares / self.n) if self.n else 0.0


def update_moments(moments: Moments, rollouts: Sequence[Rollout]) -> Moments:
    """Return the moments updated with these episodes. Unscored episodes do not count.

    Source: Chan, Golub and LeVeque 1979, Updating formulae and a pairwise algorithm for computing
    sample variances, equation 2.1.
    """
    totals = [total for r in rollouts if (total := r.total_reward) is not None]
    if not totals:
        return moments
    n = len(totals)
    mean = fmean(totals)
    count = moments.n + n
    shift = mean - moments.mean
    squares = (
        moments.squares
        + math.fsum((t - mean) ** 2 for t in totals)
        + shift**2 * moments.n * n / count
    )
    return Moments(count, moments.mean + shift * n / count, squares)
