"""Losses of the critic: values and gradients by hand."""

import pytest
import torch
from torch import Tensor

from rlkit.functional import clipped_squared_error, squared_error


def _gradients(loss: Tensor, *leaves: Tensor) -> list[list[float]]:
    return [g.tolist() for g in torch.autograd.grad(loss.sum(), leaves)]


def test_squared_error_by_hand() -> None:
    """½ · 2² = 2 and ½ · 0.5² = 0.125; the gradient is V - G."""
    values = torch.tensor([[1.0, 0.5]], requires_grad=True)
    loss = squared_error(values, torch.tensor([[3.0, 0.0]]))
    assert loss.tolist() == [[2.0, 0.125]]
    assert _gradients(loss, values) == [[[-2.0, 0.5]]]


def test_clipped_squared_error_by_hand() -> None:
    """Old value 0, clip ½, return 1.

    V = 2 beyond the return, held at ½: ½ · max(1, ¼) = ½, the value's own, gradient 1.
    V = 0.75 moved far enough towards it, held at ½: ½ · max(1/16, ¼) = ⅛, a constant, gradient 0.
    V = 0.25 not yet: both the same, ½ · 9/16; gradient -¾.
    V = -2 away from it, held at -½: ½ · max(9, 2.25) = 4.5, gradient -3.
    """
    values = torch.tensor([[2.0, 0.75, 0.25, -2.0]], requires_grad=True)
    loss = clipped_squared_error(values, torch.zeros(1, 4), torch.ones(1, 4), clip=0.5)
    assert loss.tolist() == [[0.5, 0.125, 0.28125, 4.5]]
    assert _gradients(loss, values) == [[[1.0, 0.0, -0.75, -3.0]]]


def test_a_wide_clip_is_the_squared_error_and_a_narrow_one_is_never_less() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (
        torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    assert torch.equal(
        clipped_squared_error(values, old, returns, clip=100.0), squared_error(values, returns)
    )
    narrow = clipped_squared_error(values, old, returns, clip=0.1)
    assert (narrow >= squared_error(values, returns)).all() and (
        narrow > squared_error(values, returns)
    ).any()


def test_only_the_value_learns() -> None:
    values, old, returns = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    (squared_error(values, returns) + clipped_squared_error(values, old, returns)).sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None


@pytest.mark.parametrize("clip", [0.0, -0.2, float("nan"), float("inf")])
def test_clip_is_checked(clip: float) -> None:
    with pytest.raises(ValueError, match=r"clip is .*; allowed: > 0"):
        clipped_squared_error(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), clip=clip)
