"""Statistics that decide between arms: closed forms, and simulated data with a known effect.
Sources: the functions' docstrings."""

import math

import numpy as np
import pytest

from parametrise import each
from rlkit.runs import comparing as c
from rlkit.statistics import wilson


@each(
    "p, freedom, table",
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.995, 7, 3.499),
    ],
)
def test_students_t_is_that_of_the_tables(p, freedom, table):
    assert c.student_quantile(p, freedom) == pytest.approx(table, abs=1e-3)
    assert c.student_quantile(1 - p, freedom) == pytest.approx(-table, abs=1e-3)


def test_students_t_becomes_normal():
    assert c.student_cdf(1.0, 10_000) == pytest.approx(c.NORMAL.cdf(1.0), abs=1e-4)


# -------------------------------------------------------------------------------------------- pairs


def test_pairs_by_hand():
    """1, 2, 3: mean 2, s = 1, half width 4.3027 / √3, t = 2√3, and P(|T₂| > 2√3) = 1 - 2√3/√14."""
    found = c.compare_pairs([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert found == pytest.approx(
        (2.0, 2 - half, 2 + half, 1 - 2 * math.sqrt(3) / math.sqrt(14), 1.0, 3), abs=1e-6
    )


def test_an_effect_of_the_seed_changes_nothing_and_an_arm_equals_itself():
    a, b, seed = np.random.default_rng(0).normal(size=(3, 6))
    assert c.compare_pairs(a + 5 * seed, b + 5 * seed) == pytest.approx(c.compare_pairs(a, b))
    assert c.compare_pairs(a, a)[:4] == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.slow
def test_correlated_arms_have_the_variance_of_the_formula():
    """Var D̄ = (σ_A² + σ_B² - 2c σ_A σ_B)/n; with c = 0 the unpaired one. σ = 2 and 1, c = 0.8."""
    rng = np.random.default_rng(1)
    common, own = rng.normal(size=(2, 40_000))
    a, b = 2 * common, 0.8 * common + 0.6 * own
    spread = c.compare_pairs(a, b).spread
    assert spread**2 == pytest.approx(4 + 1 - 2 * 0.8 * 2, rel=0.02)


def test_two_seeds_claim_nothing_and_an_interval_of_shares_stays_in_zero_to_one():
    """An accuracy of 0.906 [0.303, 1.504] was shown once, of two seeds."""
    assert all(
        math.isnan(v)
        for v in (
            *c.compare_pairs([0.1, 0.1], [0.9, 0.8])[1:4],
            *c.estimate_bounded_mean([0.88, 0.93])[1:],
        )
    )
    for values in ([0.0, 0.0, 1.0], [0.999, 1.0, 1.0], [0.5] * 3, [0.0] * 4):
        mean, low, high = c.estimate_bounded_mean(values, resolution=0.01)
        assert 0 <= low <= mean <= high <= 1 and high > low
    assert (
        c.estimate_bounded_mean([0.5, 0.75], bounds=(-1, 1))[0] == 0.625
        and c.estimate_bounded_mean([3.0] * 3, bounds=(0, 3), resolution=0.1)[2] == 3.0
    )


def test_differences_that_are_equal_by_rounding_are_not_certain():
    assert c.compare_pairs([0.5] * 3, [0.51] * 3).p < 1e-9
    assert c.compare_pairs([0.5] * 3, [0.51] * 3, resolution=0.01).low == pytest.approx(
        0.01 - 4.302653 * 0.01 / math.sqrt(36), abs=1e-6
    )


def test_intervals_cover_the_truth_95_times_in_100():
    """Of paired differences (normal, n = 5) and of accuracies of 0.9 over seeds (64 problems
    each)."""
    rng = np.random.default_rng(2)
    found = [
        c.compare_pairs([0.0] * 5, row) for row in rng.normal(0.3, 1.0, size=(2000, 5)).tolist()
    ]
    assert np.mean([d.low <= 0.3 <= d.high for d in found]) == pytest.approx(0.95, abs=0.015)
    shares = [
        c.estimate_bounded_mean(row, resolution=1 / 64)
        for row in (rng.binomial(64, 0.9, size=(2000, 5)) / 64).tolist()
    ]
    assert np.mean([low <= 0.9 <= high for _, low, high in shares]) == pytest.approx(0.95, abs=0.02)


def test_the_interval_of_an_accuracy_is_about_its_mean():
    """Of asin √x it was about another quantity: 0.78 of fifty seeds' intervals held an accuracy of
    0.98 that varies over seeds."""
    rng = np.random.default_rng(12)
    odds = math.log(0.98 / 0.02) + 1.0 * rng.normal(size=(400, 50))
    figures = 1 / (1 + np.exp(-odds))
    truth = float((1 / (1 + np.exp(-math.log(0.98 / 0.02) - rng.normal(size=400_000)))).mean())
    found = [c.estimate_bounded_mean(row) for row in figures.tolist()]
    assert np.mean([low <= truth <= high for _, low, high in found]) == pytest.approx(
        0.95, abs=0.04
    )  # standard error 0.011


def test_a_step_is_the_smallest_difference_that_is_more_than_rounding():
    assert c.find_smallest_step([0.99, 0.995, 0.985, 0.99 + 1e-12]) == pytest.approx(0.005)
    assert c.find_smallest_step([0.33333, 0.33334, 0.66667], 2e-5) == pytest.approx(0.33333)


# --------------------------------------------------------------------------------- before and after


def test_the_interval_of_a_change_is_newcombes():
    """Newcombe 1998, table II, example (a): 56/70 against 48/80, method 10: 0.0524 to 0.3339."""
    first, second = (c.WithInterval(k / n, *wilson(k, n)) for k, n in ((48, 80), (56, 70)))
    assert c.newcombe(first, second) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


# -------------------------------------------------------------------------------------------- seeds


def test_seeds_of_the_plan_have_its_power_and_no_effect_is_found_in_one_of_twenty():
    """σ_D = 0.0148: 7 seeds would do for 0.02, and fewer than ten claim nothing; 20 for 0.01."""
    assert (
        c.count_needed_seeds(0.0148, 0.02),
        c.count_needed_seeds(0.0148, 0.01),
        c.count_needed_seeds(0.0, 0.1),
    ) == (10, 20, c.TO_CLAIM)
    assert (
        c.count_needed_seeds(1.0, 0.1) == pytest.approx(787, abs=1)
        and c.count_needed_seeds(1e3, 1e-2) > 10**9
    ), "7.849 (σ/δ)² + 1.92"
    rng = np.random.default_rng(3)
    for effect, n in ((0.02, 7), (0.01, 20)):
        simulated = [
            c.compare_pairs([0.0] * n, row).p < c.ALPHA
            for row in rng.normal(effect, 0.0148, size=(1500, n)).tolist()
        ]
        assert c.compute_power(effect / 0.0148, n) == pytest.approx(0.82, abs=0.025)
        assert np.mean(simulated) == pytest.approx(c.compute_power(effect / 0.0148, n), abs=0.03)
    assert c.compute_power(0.0, 7) == pytest.approx(c.ALPHA, abs=1e-4)


def test_what_a_number_of_seeds_can_see_is_the_plan_read_backwards():
    assert c.count_needed_seeds(0.1, c.find_detectable_effect(0.1, 12) * 1.0001) == 12
    assert (
        c.count_needed_seeds(
            0.1, c.find_detectable_effect(0.1, 12, comparisons=6) * 1.0001, comparisons=6
        )
        == 12
    )
    assert c.find_detectable_effect(0.1, 9) == math.inf and c.find_detectable_effect(0.0, 12) == 0.0


@pytest.mark.slow
def test_a_plan_by_a_small_pilot_keeps_its_power():
    """By the spread of three seeds itself, 0.65 to 0.76 of such plans find what they promise to
    find four times in five."""
    rng = np.random.default_rng(13)
    for pilot in (3, 5):
        spreads = rng.normal(size=(120, pilot)).std(axis=1, ddof=1)
        power = [
            c.compute_power(0.7, c.count_needed_seeds(c.spread_bound(s, pilot), 0.7))
            for s in spreads
        ]
        assert (
            np.mean(power) >= 0.8 and np.mean(np.array(power) >= 0.8) >= 0.8 - 0.11
        )  # three standard errors


def test_the_bound_of_a_pilots_spread_holds_four_times_in_five():
    spreads = np.random.default_rng(4).normal(size=(4000, 5)).std(axis=1, ddof=1)
    assert np.mean([c.spread_bound(s, 5) >= 1 for s in spreads]) == pytest.approx(0.8, abs=0.02)


# -------------------------------------------------------------------------------------- corrections


def test_holms_correction_by_hand():
    assert c.holm([0.04, math.nan, 0.01])[::2] == pytest.approx([0.04, 0.02])
    assert c.holm([0.03, 0.01, 0.04, 0.2]) == pytest.approx([0.09, 0.04, 0.09, 0.2])


def test_no_effect_is_claimed_in_one_of_twenty_families():
    """Ten independent p-values without an effect: any claim in 5 % of the families."""
    families = np.random.default_rng(5).uniform(size=(4000, 10)).tolist()
    assert np.mean([min(c.holm(family)) <= 0.05 for family in families]) == pytest.approx(
        0.05, abs=0.012
    )


def test_an_interval_leaves_out_zero_where_holm_makes_the_claim():
    rng = np.random.default_rng(6)
    for _ in range(60):
        data = [
            (rng.normal(size=6) + shift).tolist() for shift in rng.choice([0.0, 1.0, 2.0], size=4)
        ]
        p = [c.compare_pairs([0.0] * 6, own).p for own in data]
        claims = [value <= c.ALPHA for value in c.holm(p)]
        spans = [
            c.compare_pairs([0.0] * 6, own, level=level)
            for own, level in zip(data, c.holm_levels(p), strict=True)
        ]
        assert [s.low > 0 or s.high < 0 for s in spans] == claims
