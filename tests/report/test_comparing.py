"""Statistics that decide between arms: closed forms, and simulated data with a known effect. Sources: the functions' docstrings."""

import math

import numpy as np
import pytest

from laws import each
from rlkit.runs import comparing as c


@each("p, freedom, table", [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 9, 2.262), (0.975, 30, 2.042), (0.995, 7, 3.499)])
def test_students_t_is_that_of_the_tables(p, freedom, table):
    assert c.student_quantile(p, freedom) == pytest.approx(table, abs=1e-3)
    assert c.student_quantile(1 - p, freedom) == pytest.approx(-table, abs=1e-3)


def test_students_t_becomes_normal():
    assert c.student_cdf(1.0, 10_000) == pytest.approx(c.NORMAL.cdf(1.0), abs=1e-4)


# ------------------------------------------------------------------------------------------------------ pairs


def test_pairs_by_hand():
    """1, 2, 3: mean 2, s = 1, half width 4.3027 / √3, t = 2√3, and P(|T₂| > 2√3) = 1 - 2√3/√14."""
    found = c.paired([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert found == pytest.approx((2.0, 2 - half, 2 + half, 1 - 2 * math.sqrt(3) / math.sqrt(14), 1.0, 3), abs=1e-6)


def test_an_effect_of_the_seed_changes_nothing_and_an_arm_equals_itself():
    a, b, seed = np.random.default_rng(0).normal(size=(3, 6))
    assert c.paired(a + 5 * seed, b + 5 * seed) == pytest.approx(c.paired(a, b))
    assert c.paired(a, a)[:4] == (0.0, 0.0, 0.0, 1.0)


def test_correlated_arms_have_the_variance_of_the_formula():
    """Var D̄ = (σ_A² + σ_B² - 2c σ_A σ_B)/n; with c = 0 the unpaired one. σ = 2 and 1, c = 0.8."""
    rng = np.random.default_rng(1)
    common, own = rng.normal(size=(2, 40_000))
    a, b = 2 * common, 0.8 * common + 0.6 * own
    spread = c.paired(a, b).spread
    assert spread**2 == pytest.approx(4 + 1 - 2 * 0.8 * 2, rel=0.02)


def test_two_seeds_claim_nothing_and_an_interval_of_shares_stays_in_zero_to_one():
    """An accuracy of 0.906 [0.303, 1.504] was shown once, of two seeds."""
    assert all(math.isnan(v) for v in (*c.paired([0.1, 0.1], [0.9, 0.8])[1:4], *c.bounded_mean([0.88, 0.93])[1:]))
    for values in ([0.0, 0.0, 1.0], [0.999, 1.0, 1.0], [0.5] * 3, [0.0] * 4):
        mean, low, high = c.bounded_mean(values, resolution=0.01)
        assert 0 <= low <= mean <= high <= 1 and high > low


def test_differences_that_are_equal_by_rounding_are_not_certain():
    assert c.paired([0.5] * 3, [0.51] * 3).p < 1e-9
    assert c.paired([0.5] * 3, [0.51] * 3, resolution=0.01).low == pytest.approx(0.01 - 4.302653 * 0.01 / math.sqrt(36), abs=1e-6)


def test_intervals_cover_the_truth_95_times_in_100():
    """Of paired differences (normal, n = 5) and of accuracies of 0.9 over seeds (64 problems each)."""
    rng = np.random.default_rng(2)
    found = [c.paired([0.0] * 5, row) for row in rng.normal(0.3, 1.0, size=(2000, 5)).tolist()]
    assert np.mean([d.low <= 0.3 <= d.high for d in found]) == pytest.approx(0.95, abs=0.015)
    shares = [c.bounded_mean(row, resolution=1 / 64) for row in (rng.binomial(64, 0.9, size=(2000, 5)) / 64).tolist()]
    assert np.mean([low <= 0.9 <= high for _, low, high in shares]) == pytest.approx(0.95, abs=0.02)


# ------------------------------------------------------------------------------------------------------ seeds


def test_seeds_of_the_plan_have_its_power_and_no_effect_is_found_in_one_of_twenty():
    """σ_D = 0.0148: 7 seeds for 0.02, 20 for 0.01; half the effect takes nearly four times as many."""
    assert (c.seeds_needed(0.0148, 0.02), c.seeds_needed(0.0148, 0.01), c.seeds_needed(0.0, 0.1)) == (7, 20, c.FEWEST)
    rng = np.random.default_rng(3)
    for effect, n in ((0.02, 7), (0.01, 20)):
        simulated = [c.paired([0.0] * n, row).p < c.ALPHA for row in rng.normal(effect, 0.0148, size=(1500, n)).tolist()]
        assert c.power_of(0.0148, effect, n) == pytest.approx(0.82, abs=0.025)
        assert np.mean(simulated) == pytest.approx(c.power_of(0.0148, effect, n), abs=0.03)
    assert c.power_of(1.0, 0.0, 7) == pytest.approx(c.ALPHA, abs=1e-4)


def test_what_a_number_of_seeds_can_see_is_the_plan_read_backwards():
    assert c.seeds_needed(0.1, c.detectable(0.1, 12) * 1.0001) == 12


def test_the_bound_of_a_pilots_spread_holds_four_times_in_five():
    spreads = np.random.default_rng(4).normal(size=(4000, 5)).std(axis=1, ddof=1)
    assert np.mean([c.spread_bound(s, 5) >= 1 for s in spreads]) == pytest.approx(0.8, abs=0.02)


# ------------------------------------------------------------------------------------------------------ corrections


def test_corrections_by_hand():
    """Benjamini and Hochberg claim one of .01 .03 .04 .2 at 0.05, and all where all are at most 0.05."""
    assert [q <= 0.05 for q in c.false_discovery([0.2, 0.04, 0.01, 0.03])] == [False, False, True, False]
    assert all(q <= 0.05 for q in c.false_discovery([0.05, 0.04, 0.049]))
    assert c.false_discovery([0.01, 0.02], dependent=True) == pytest.approx([0.03, 0.03])
    assert c.holm([0.04, math.nan, 0.01])[::2] == pytest.approx([0.04, 0.02])


def test_no_effect_is_claimed_in_one_of_twenty_families():
    """Ten independent p-values without an effect: any claim, by either rule, in 5 % of the families."""
    families = np.random.default_rng(5).uniform(size=(4000, 10)).tolist()
    for rule in (c.holm, c.false_discovery):
        assert np.mean([min(rule(family)) <= 0.05 for family in families]) == pytest.approx(0.05, abs=0.012)


def test_an_interval_leaves_out_zero_where_holm_makes_the_claim():
    rng = np.random.default_rng(6)
    for _ in range(60):
        data = [(rng.normal(size=6) + shift).tolist() for shift in rng.choice([0.0, 1.0, 2.0], size=4)]
        p = [c.paired([0.0] * 6, own).p for own in data]
        claims = [value <= c.ALPHA for value in c.holm(p)]
        spans = [c.paired([0.0] * 6, own, level=level) for own, level in zip(data, c.holm_levels(p), strict=True)]
        assert [s.low > 0 or s.high < 0 for s in spans] == claims


# ------------------------------------------------------------------------------------------------------ over tasks


def test_the_interquartile_mean_by_hand():
    scores = np.random.default_rng(7).normal(size=(5, 4))
    assert (c.iqm([range(8)]), c.iqm([[0, 1, 2, 3, 100]])) == (3.5, 2.0)
    assert c.iqm(3 * scores + 1) == pytest.approx(3 * c.iqm(scores) + 1)


def test_the_bootstrap_redraws_whole_seeds():
    """D = [[1, -1], [-1, 1]]: over seeds the means are all 0; over both, the variance is 0.25. One column: (n-1)/n · s²/n."""
    square = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert c.bootstrap(square, np.mean) == (0.0, 0.0, 0.0)
    drawn: list[float] = []
    c.bootstrap(square, lambda x: drawn.append(float(x.mean())) or 0.0, problems=True, draws=4000)
    assert np.var(drawn) == pytest.approx(0.25, abs=0.02)
    drawn.clear()
    column = np.random.default_rng(8).normal(size=(5, 1))
    c.bootstrap(column, lambda x: drawn.append(float(x.mean())) or 0.0, draws=4000)
    assert np.var(drawn) == pytest.approx(4 / 5 * column.var(ddof=1) / 5, rel=0.08)
    assert c.bootstrap(np.full((4, 3), 0.7), c.iqm) == pytest.approx((0.7, 0.7, 0.7))


def test_the_profile_is_the_share_above_and_its_area_the_mean():
    scores = np.random.default_rng(9).uniform(size=(6, 3))
    assert c.profile(scores, [-1.0, scores.max()]) == [1.0, 0.0]
    assert np.mean(c.profile(scores, (np.arange(4000) + 0.5) / 4000)) == pytest.approx(scores.mean(), abs=1e-3)


def test_the_probability_of_improvement_by_hand():
    one, two = np.array([[2.0], [2.0], [0.0]]), np.array([[1.0], [2.0], [3.0]])
    assert (c.improvement(one, two), c.improvement(two, one)) == pytest.approx((2 / 3, 1 / 3))
    assert c.improvement(one, one) == 0.5 and c.improvement(one, one + 5) == 1.0


def test_ranks_share_ties():
    assert c.ranks(np.array([[0.9, 0.5, 0.9, 0.1]])).tolist() == [[1.5, 3.0, 1.5, 4.0]]
