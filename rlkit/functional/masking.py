"""Masks, sums per rollout, and the one place where neutral constants go under a mask."""

from __future__ import annotations

import torch
from torch import Tensor


def full_precision(values: Tensor) -> Tensor:
    """Float32 for bfloat16, float16, integers and booleans; float32 and float64 stay as they are.

    Log-probs, ratios and sums are never kept in half precision: bfloat16 has 8 bits of mantissa, so a log-prob of -20
    is only known to within 0.06.

    Args:
      values: any shape, any dtype.
    Returns: the same values in float32 or float64; the gradient flows through.

    >>> full_precision(torch.tensor([1.5], dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def fill_masked(values: Tensor, mask: Tensor, fill: float) -> Tensor:
    """`values` where the mask is True, the constant `fill` elsewhere.

    To be used before any exp, ratio or product: what lies under the mask (padding, prompt and tool tokens; nan and inf
    included) then reaches neither the value nor the gradient. A mask applied at the end does not do that: 0 × nan is
    nan.

    Args:
      values: any shape.
      mask: bool, of the same or a broadcastable shape, True where a token counts.
      fill: the neutral constant: 0 for log-probs, values and advantages, 1 for ratios.
    Returns: like `values`; gradient exactly 0 under the mask.

    >>> fill_masked(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]), 0.0)
    tensor([1., 0.])
    """
    return torch.where(mask, values, values.new_full((), fill))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the entries where the mask is True; 0 where there is none.

    mean = Σ m x / Σ m

    A figure to log. A loss is reduced with the weights of `aggregation`, which count over the whole update batch.

    Args:
      values: any shape.
      mask: bool, same shape.
    Returns: scalar, float32 or float64.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("inf")]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    return fill_masked(full_precision(values), mask, 0.0).sum() / mask.sum().clamp_min(1)


def segment_sum(values: Tensor, rollout_ids: Tensor, *, n: int | None = None) -> Tensor:
    """Sum per rollout over all its rows: "a sequence" is all tokens of one rollout, however many rows it fills.

    out_j = Σ_{i : rollout_ids_i = j} Σ_t values_it

    Args:
      values: [B] or [B, T]; neutral (0) wherever it must not count. Booleans and integers are summed exactly.
      rollout_ids: [B] int64, 0 … n-1; rows of one rollout need not be neighbours.
      n: how many rollouts, also those without a row. None: the largest id plus one.
    Returns: [n], int64 for booleans and integers, float32 or float64 otherwise; 0 for a rollout without rows.

    >>> segment_sum(torch.tensor([[True, True], [True, False], [False, False]]), torch.tensor([1, 1, 2]))
    tensor([0, 3, 0])
    """
    summands = full_precision(values) if values.is_floating_point() else values.long()
    rows = summands if summands.dim() == 1 else summands.sum(-1)  # [B]
    if n is None:
        n = int(rollout_ids.max()) + 1 if rollout_ids.numel() else 0
    return rows.new_zeros(n).index_add(0, rollout_ids, rows)


def rollout_mean(values: Tensor, mask: Tensor, rollout_ids: Tensor) -> Tensor:
    """Mean over the entries of a whole rollout where the mask is True, for each of its rows; 0 where there is none.

    out_i = Σ m x / Σ m over all rows of the rollout that row i belongs to

    Args:
      values: [B, T].
      mask: [B, T] bool.
      rollout_ids: [B] int64; rows of one rollout need not be neighbours, but all must be there.
    Returns: [B, 1], float32 or float64; the gradient flows through.

    >>> rollout_mean(torch.tensor([[1.0], [3.0], [5.0]]), torch.ones(3, 1).bool(), torch.tensor([0, 0, 1]))
    tensor([[2.],
            [2.],
            [5.]])
    """
    total = segment_sum(fill_masked(full_precision(values), mask, 0.0), rollout_ids)
    return (total / segment_sum(mask, rollout_ids).clamp_min(1))[rollout_ids].unsqueeze(-1)
