"""Masks and sums per rollout: what every other function leans on."""

import pytest
import torch

from rlkit.functional import fill_masked, full_precision, masked_mean, segment_sum

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e38])
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(garbage: float) -> None:
    """Guards against multiplying by the mask: 0 × nan is nan, in the value and in the gradient of
    exp."""
    values = torch.tensor([-1.0, garbage, -2.0], requires_grad=True)
    filled = fill_masked(values, torch.tensor([True, False, True]), 0.0).exp()
    filled.sum().backward()
    assert filled[1] == 1.0  # exp(0)
    assert torch.equal(
        values.grad, torch.tensor([-1.0, 0.0, -2.0]).exp() * torch.tensor([1.0, 0.0, 1.0])
    )


def test_masked_mean_by_hand() -> None:
    """(2 + 4 + 9) / 3 = 5; the nan under the mask does not count, and neither does its place."""
    values = torch.tensor([[2.0, 4.0, NAN], [9.0, NAN, INF]])
    assert masked_mean(values, torch.tensor([[True, True, False], [True, False, False]])) == 5.0


def test_masked_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.full((2, 2), NAN), torch.zeros(2, 2, dtype=torch.bool)) == 0.0


def test_segment_sum_adds_all_rows_of_a_rollout() -> None:
    """Rollout 0: (1+2) + (5+6) = 14 from rows 0 and 2; rollout 1: 3+4 = 7; rollout 2 has no row."""
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    ids = torch.tensor([0, 1, 0])
    assert segment_sum(values, ids).tolist() == [14.0, 7.0]
    assert segment_sum(values, ids, n=3).tolist() == [14.0, 7.0, 0.0]
    assert segment_sum(values[:, 0], ids).tolist() == [6.0, 3.0]  # [B] as well as [B, T]


def test_segment_sum_of_no_rows() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    assert segment_sum(torch.zeros(0, 3), nothing).shape == (0,)
    assert segment_sum(torch.zeros(0, 3), nothing, n=2).tolist() == [0.0, 0.0]


def test_segment_sum_counts_booleans_exactly() -> None:
    """In float32 a count stops growing at 2^24; in bfloat16 at 256."""
    counts = segment_sum(torch.ones(2, 300, dtype=torch.bool), torch.tensor([0, 0]))
    assert counts.dtype == torch.int64
    assert counts.item() == 600


def test_segment_sum_adds_half_precision_in_full() -> None:
    """1 + 300 · 2^-9 in bfloat16 stays 1: every summand is below half a unit in the last place."""
    values = torch.full((301,), 2.0**-9, dtype=torch.bfloat16)
    values[0] = 1.0
    total = segment_sum(values, torch.zeros(301, dtype=torch.int64))
    assert total.item() == 1 + 300 * 2.0**-9  # exact in float32


def test_segment_sum_carries_the_gradient() -> None:
    values = torch.ones(3, 2, requires_grad=True)
    (segment_sum(values, torch.tensor([1, 0, 1])) * torch.tensor([10.0, 1.0])).sum().backward()
    assert values.grad.tolist() == [[1.0, 1.0], [10.0, 10.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.bool, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_full_precision_never_narrows(given: torch.dtype, kept: torch.dtype) -> None:
    assert full_precision(torch.ones(2, dtype=given)).dtype == kept
