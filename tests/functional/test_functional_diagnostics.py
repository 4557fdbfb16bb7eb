"""Figures for the log."""

import inspect
import math

import pytest
import torch

from parametrise import each
from rlkit.functional import (
    approximate_kl,
    correlation,
    diagnostics,
    effective_sample_size,
    explained_variance,
    ratio_statistics,
)

MASK = torch.tensor([[True, True, False], [True, True, False]])
FIGURES = [
    f
    for name, f in inspect.getmembers(diagnostics, inspect.isfunction)
    if f.__module__ == diagnostics.__name__ and not name.startswith("_")
]


def test_approximate_kl_by_hand() -> None:
    """r = 2 and 1: (2 - 1 - log 2 + 0) / 2; the masked third token does not count."""
    old = torch.tensor([[-2.0, -2.0, math.nan]])
    new = torch.tensor([[-2.0 + math.log(2), -2.0, math.inf]])
    got = approximate_kl(new, old, torch.tensor([[True, True, False]]))
    assert got.item() == pytest.approx((1 - math.log(2)) / 2, abs=1e-6)  # float32 rounding


def test_approximate_kl_has_the_direction_old_to_new() -> None:
    """By enumeration: tokens drawn from the old policy give KL(old‖new)."""
    old = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log()
    new = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    one = torch.tensor([True])
    got = sum(old[v].exp() * approximate_kl(new[v : v + 1], old[v : v + 1], one) for v in range(3))
    torch.testing.assert_close(
        got, (old.exp() * (old - new)).sum(), rtol=0, atol=1e-15
    )  # float64 rounding


def test_ratio_statistics_by_hand() -> None:
    """0.5, 1.5, 1, 3: mean 1.5, variance (1 + 0 + 0.25 + 2.25) / 4 = 0.875."""
    mean, variance, largest = ratio_statistics(
        torch.tensor([[0.5, 1.5, 99.0], [1.0, 3.0, math.nan]]), MASK
    )
    assert (mean.item(), variance.item(), largest.item()) == (1.5, 0.875, 3.0)


def test_effective_sample_size_by_hand() -> None:
    """w = 3, 1, 1, 1: 36 / (4 · 12) = 0.75; equal weights give 1 whatever their size."""
    sampler = torch.zeros(2, 3)
    trainer = torch.tensor([[3.0, 1.0, math.nan], [1.0, 1.0, 7.0]]).log()
    assert effective_sample_size(trainer, sampler, MASK).item() == pytest.approx(
        0.75, rel=1e-6
    )  # float32 logs
    assert effective_sample_size(sampler - 3, sampler, MASK).item() == pytest.approx(1.0, rel=1e-6)


def test_effective_sample_size_of_rollouts_multiplies_their_tokens() -> None:
    """Rollout 0 has both rows but for one token: W = 2 · 2 · 0.5 = 2; rollout 1: W = 3. (2 + 3)² /
    (2 · 13). Its own tokens say more."""
    trainer = torch.tensor(
        [[2.0, 2.0, math.nan], [3.0, math.nan, math.inf], [0.5, 1.0, math.nan]]
    ).log()
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, False]])
    got = effective_sample_size(trainer, torch.zeros(3, 3), mask, torch.tensor([0, 1, 0]))
    assert got.item() == pytest.approx(25 / 26, rel=1e-6)  # float32 logs
    assert effective_sample_size(trainer, torch.zeros(3, 3), mask).item() == pytest.approx(
        8.5**2 / (5 * 18.25), rel=1e-6
    )


def test_a_small_gap_of_every_token_leaves_few_effective_rollouts() -> None:
    """Normal log-ratios of 0.02: e^(-0.0004) of tokens, e^(-T 0.0004) = 0.670 of rollouts of T =
    1,000 tokens."""
    gap = torch.randn(2000, 1000, generator=torch.Generator().manual_seed(0)) * 0.02
    zeros, mask = torch.zeros_like(gap), torch.ones_like(gap, dtype=torch.bool)
    assert effective_sample_size(gap, zeros, mask).item() == pytest.approx(
        math.exp(-4e-4), abs=1e-5
    )
    got = effective_sample_size(gap, zeros, mask, torch.arange(2000)).item()
    assert got == pytest.approx(
        math.exp(-0.4), abs=0.05
    )  # the estimate from 2,000 rollouts has a standard error of about 0.02


def test_effective_sample_size_of_one_token_that_takes_all() -> None:
    trainer = torch.tensor([[1e4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    got = effective_sample_size(trainer, torch.zeros(2, 3), MASK).item()
    assert got == pytest.approx(0.25, rel=1e-6)  # 1 of 4; the others weigh e^-20 each


def test_correlation_by_hand() -> None:
    """x = 1, 2, 3, 4; y = 2, 1, 4, 3: deviations ±1.5, ±0.5 give Σxy = 3, Σx² = Σy² = 5 → 0.6."""
    x = torch.tensor([[1.0, 2.0, math.nan], [3.0, 4.0, 9.0]])
    y = torch.tensor([[2.0, 1.0, -5.0], [4.0, 3.0, math.inf]])
    assert correlation(x, y, MASK).item() == pytest.approx(0.6, rel=1e-6)  # rounded to float32
    assert correlation(x, 5 - 3 * x, MASK).item() == -1.0


def test_explained_variance_by_hand() -> None:
    """Returns 0, 2, 4, 6 (Σ deviation² = 20), residuals 0, 1, 0, 1 (Σ deviation² = 1): 1 - 1/20."""
    returns = torch.tensor([[0.0, 2.0, math.nan], [4.0, 6.0, 1.0]])
    residuals = torch.tensor([[0.0, 1.0, 3.0], [0.0, 1.0, math.inf]])
    assert explained_variance(returns - residuals, returns, MASK).item() == pytest.approx(
        0.95, rel=1e-6
    )
    assert (
        explained_variance(returns - 7, returns, MASK).item() == 1.0
    )  # a constant error is not variance
    assert explained_variance(-returns, returns, MASK).item() == pytest.approx(
        -3.0
    )  # 1 - Var(2R) / Var(R)


def test_undefined_figures_are_nan_and_not_a_number_that_lies() -> None:
    flat, none = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    steps = torch.arange(6.0).reshape(2, 3)
    assert explained_variance(steps, flat, MASK).isnan()
    assert correlation(flat, steps, MASK).isnan()
    assert effective_sample_size(flat, flat, none).isnan()
    assert correlation(flat, flat, none).isnan()
    assert explained_variance(flat, flat, none).isnan()
    assert all(figure.isnan() for figure in ratio_statistics(flat, none))
    assert approximate_kl(flat, flat, none) == 0.0


@each("n", range(2, 20))
def test_a_constant_is_one_in_float64_too(n: int) -> None:
    """The mean of n times 0.1 need not be 0.1: deviations of 1e-17 are not a spread."""
    flat, steps, mask = (
        torch.full((n,), 0.1, dtype=torch.float64),
        torch.arange(n).double(),
        torch.ones(n, dtype=torch.bool),
    )
    assert explained_variance(steps, flat, mask).isnan()
    assert correlation(flat, steps, mask).isnan()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda f: f.__name__)
def test_figures_carry_no_gradient(figure) -> None:
    """A logged tensor with a graph keeps a whole step's activations alive."""
    parameters = inspect.signature(figure).parameters.values()
    given = [
        MASK if p.name == "response_mask" else torch.rand(2, 3, requires_grad=True) + 0.1
        for p in parameters
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    got = figure(*given, **{p.name: 0.2 for p in parameters if p.kind is p.KEYWORD_ONLY})
    assert not any(scalar.requires_grad for scalar in (got if isinstance(got, tuple) else (got,)))
    assert all(scalar.shape == () for scalar in (got if isinstance(got, tuple) else (got,)))
