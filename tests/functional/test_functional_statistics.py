"""Uncertainty of accuracies: against published numbers, by enumeration and by hand."""

import itertools

import numpy as np
import pytest

from rlkit.statistics import Z95, count_independent, mean_interval, pass_at_k, wilson


# Newcombe 1998, Statistics in Medicine 17, table I, method 3 (score interval without continuity
# correction)
@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_published_numbers(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)  # the table has four digits


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_wilson_bounds_solve_the_score_equation(n):
    """Each bound b is where the observed share is z standard errors of b away: (p - b)² = z² b (1 -
    b) / n."""
    for c in range(n + 1):
        for bound in wilson(c, n):
            assert (c / n - bound) ** 2 == pytest.approx(
                Z95**2 * bound * (1 - bound) / n, abs=1e-12
            )  # float rounding near 0


@pytest.mark.parametrize("n", [1, 5, 50])
def test_wilson_is_symmetric_ordered_and_within_zero_and_one(n):
    for c in range(n + 1):
        low, high = wilson(c, n)
        other_low, other_high = wilson(n - c, n)
        assert (
            0 <= low <= c / n + 1e-12 and c / n - 1e-12 <= high <= 1 and low < high
        )  # at 0 and n the bound is p up to rounding
        assert (low, high) == pytest.approx(
            (1 - other_high, 1 - other_low), abs=1e-12
        )  # the same sum in another order


@pytest.mark.parametrize(("successes", "n"), [(-1, 4), (5, 4), (0, 0)])
def test_wilson_refuses_impossible_counts(successes, n):
    with pytest.raises(ValueError, match=f"successes={successes}"):
        wilson(successes, n)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_by_enumeration(n):
    """The share of all ways to pick k of the n samples in which at least one is right."""
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        picks = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(
            sum(map(any, picks)) / len(picks), abs=1e-12
        )  # one division each


def test_pass_at_one_is_the_share_and_pass_at_all_is_whether_any_is_right():
    assert [pass_at_k(8, c, 1) for c in range(9)] == pytest.approx(
        [c / 8 for c in range(9)], abs=1e-12
    )  # 1 - (1 - x)
    assert [pass_at_k(8, c, 8) for c in range(9)] == [0.0] + [1.0] * 8


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


def test_mean_interval_of_zeros_and_ones_is_wilsons_with_students_t():
    """(p + k/2 ± √(k p(1-p) + k²/4)) / (1 + k), k = t²/n · n/(n-1) of the sample variance; here the
    part beyond p(1-p) is left to r²."""
    mean, low, high = mean_interval([1.0] * 90 + [0.0] * 10)
    assert mean == pytest.approx(0.9) and (low, high) == pytest.approx(wilson(90, 100), abs=0.006)
    assert mean_interval([1.0] * 100)[1] == pytest.approx(wilson(100, 100)[0], abs=0.002), (
        "all right is not certain"
    )


def test_mean_interval_of_one_value_is_the_whole_range():
    assert mean_interval([0.3]) == (0.3, 0.0, 1.0) and mean_interval([5.0]) == (5.0, 0.0, 5.0)
    assert mean_interval([0.25] * 9) == (
        0.25,
        0.25,
        0.25,
    ), "equal values inside the range show no spread"


def test_rows_of_one_value_weigh_as_one():
    """Weights that are equal change nothing but the count of rows; one value in nearly all rows
    leaves little evidence."""
    values = [0.2, 0.9, 0.4, 1.0]
    assert mean_interval(values, [7] * 4) == pytest.approx(mean_interval(values))
    assert count_independent([7] * 42) == 42 and count_independent([250] + [1] * 41) < 1.5
    assert mean_interval([1.0, 0.0, 0.5], [200, 1, 1])[1] < 0.2


@pytest.mark.parametrize("right", [0.5, 0.9, 0.99])
def test_mean_interval_covers_its_mean_95_times_in_100(right):
    """Sixty problems with four samples each."""
    rng = np.random.default_rng(3)
    held = []
    for _ in range(300):
        found = mean_interval((rng.binomial(4, right, size=60) / 4).tolist())
        held.append(found[1] <= right <= found[2])
    assert np.mean(held) >= 0.95 - 0.044  # 3.5 standard errors


def test_mean_interval_refuses_nothing():
    with pytest.raises(ValueError, match="no values"):
        mean_interval([])
