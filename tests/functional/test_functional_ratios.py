"""The ratio of the policy over the policy before the update."""

import math

import pytest
import torch

from rlkit.functional import token_ratio

ONE = torch.tensor([[True]])


def test_by_hand() -> None:
    """p 0.3 → 0.6 doubles, 0.5 → 0.25 halves; under the mask it is 1 whatever stands there."""
    new = torch.tensor([[0.6, 0.25, 0.9]]).log()
    old = torch.tensor([[0.3, 0.5, 0.1]]).log()
    got = token_ratio(new, old, torch.tensor([[True, True, False]]))
    torch.testing.assert_close(got, torch.tensor([[2.0, 0.5, 1.0]]), rtol=1e-6, atol=0)  # float32 rounding
    assert got[0, 2] == 1.0


@pytest.mark.parametrize(("log_ratio", "clamped"), [(1e4, 20.0), (-1e4, -20.0), (math.inf, 20.0), (19.0, 19.0)])
def test_clamped_at_20(log_ratio: float, clamped: float) -> None:
    """exp(1e4) overflows. Inside the clamp the gradient is the ratio, beyond it 0."""
    new = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -log_ratio, dtype=torch.float64)
    ratio = token_ratio(new, old, ONE)
    ratio.backward()
    assert ratio.item() == pytest.approx(math.exp(clamped), rel=1e-14)  # float64 rounding of exp
    assert new.grad.item() == (ratio.item() if log_ratio == clamped else 0.0)


def test_nothing_flows_into_the_old_policy() -> None:
    new, old = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    token_ratio(new, old, ONE).sum().backward()
    assert old.grad is None
    assert new.grad.item() == 1.0


def test_a_nan_that_counts_stays_visible() -> None:
    """Only the mask hides: a broken log-prob of a trained token must reach the loss and stop the run."""
    assert token_ratio(torch.tensor([[math.nan]]), torch.zeros(1, 1), ONE).isnan().all()


def test_half_precision_is_widened_before_the_difference() -> None:
    new, old = torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-1.0078125]], dtype=torch.bfloat16)
    ratio = token_ratio(new, old, ONE)
    assert ratio.dtype == torch.float32
    assert ratio.item() == pytest.approx(math.exp(0.0078125), rel=1e-6)  # 2^-7, exact in bfloat16; float32 rounding
