"""Claims of many comparisons and summaries over tasks: closed forms, and simulated data with a
known effect. Sources: the functions' docstrings."""

import math

import numpy as np
import pytest

from rlkit.extras.bench.over_tasks import (
    bootstrap,
    compare_together,
    false_discovery,
    improvement,
    iqm,
    profile,
    ranks,
    seeds_interval,
)
from rlkit.runs.comparing import ALPHA


def test_the_false_discovery_rate_by_hand():
    """Benjamini and Hochberg claim one of .01 .03 .04 .2 at 0.05, and all where all are at most
    0.05."""
    assert [q <= 0.05 for q in false_discovery([0.2, 0.04, 0.01, 0.03])] == [
        False,
        False,
        True,
        False,
    ]
    assert all(q <= 0.05 for q in false_discovery([0.05, 0.04, 0.049]))


def test_no_effect_is_claimed_in_one_of_twenty_families():
    """Ten independent p-values without an effect: any claim in 5 % of the families."""
    families = np.random.default_rng(5).uniform(size=(4000, 10)).tolist()
    assert np.mean([min(false_discovery(family)) <= 0.05 for family in families]) == pytest.approx(
        0.05, abs=0.012
    )


def test_the_interquartile_mean_by_hand():
    scores = np.random.default_rng(7).normal(size=(5, 4))
    assert (iqm([range(8)]), iqm([[0, 1, 2, 3, 100]])) == (3.5, 2.0)
    assert iqm(3 * scores + 1) == pytest.approx(3 * iqm(scores) + 1)


def test_the_bootstrap_redraws_whole_seeds():
    """D = [[1, -1], [-1, 1]]: over seeds the means are all 0. One column: its variance is (n-1)/n ·
    s²/n."""
    square = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert bootstrap(square, np.mean) == (0.0, 0.0)
    drawn: list[float] = []
    column = np.random.default_rng(8).normal(size=(5, 1))
    bootstrap(column, lambda x: drawn.append(float(x.mean())) or 0.0, draws=4000)
    assert np.var(drawn) == pytest.approx(4 / 5 * column.var(ddof=1) / 5, rel=0.08)


def test_the_interval_of_a_middle_mean_needs_ten_seeds_and_is_at_least_that_of_redrawn_seeds():
    """Of one column and ten seeds, two on either side are left out: t of five degrees of
    freedom."""
    scores = np.random.default_rng(10).normal(size=(10, 1))
    value, low, high = seeds_interval(scores, iqm)
    redrawn = bootstrap(scores, iqm)
    assert low <= redrawn[0] < value < redrawn[1] <= high and math.isnan(
        seeds_interval(scores[:9], iqm)[1]
    )
    equal = seeds_interval(np.full((10, 2), 0.7), iqm, resolution=0.1)
    assert equal[2] - equal[0] == pytest.approx(2.570582 * 0.1 / math.sqrt(12 * 6))


def test_claims_that_are_tested_together_have_intervals_to_match():
    """An interval leaves out 0 exactly where Benjamini and Hochberg's rule makes the claim; nine
    seeds make none."""
    rng = np.random.default_rng(14)
    for _ in range(20):
        sides = [
            ([0.0] * 10, (shift + rng.normal(size=10)).tolist(), 0.0)
            for shift in rng.choice([0.0, 1.0, 2.0], size=6)
        ]
        found = compare_together(sides)
        assert [own.difference.low > 0 or own.difference.high < 0 for own in found] == [
            own.q <= ALPHA for own in found
        ]
        few = compare_together([(first[:9], second[:9], 0.0) for first, second, _ in sides])
        assert all(math.isnan(own.q) and own.sees == math.inf for own in few)


def test_the_profile_is_the_share_above_and_its_area_the_mean():
    scores = np.random.default_rng(9).uniform(size=(6, 3))
    assert profile(scores, [-1.0, scores.max()]) == [1.0, 0.0]
    assert np.mean(profile(scores, (np.arange(4000) + 0.5) / 4000)) == pytest.approx(
        scores.mean(), abs=1e-3
    )


def test_the_probability_of_improvement_by_hand():
    one, two = np.array([[2.0], [2.0], [0.0]]), np.array([[1.0], [2.0], [3.0]])
    assert (improvement(one, two), improvement(two, one)) == pytest.approx((2 / 3, 1 / 3))
    assert improvement(one, one) == 0.5 and improvement(one, one + 5) == 1.0


def test_ranks_share_ties():
    assert ranks(np.array([[0.9, 0.5, 0.9, 0.1]])).tolist() == [[1.5, 3.0, 1.5, 4.0]]
