"""Masks, and sums over rollouts. `fill_masked` is the only function to put neutral constants where
a mask is False."""

from __future__ import annotations

import torch
from torch import Tensor


def full_precision(values: Tensor) -> Tensor:
    """Convert bfloat16, float16, integers and booleans to float32; keep float32 and float64.

    Log-probs, ratios and sums are never kept in half precision: bfloat16 has 8 bits of mantissa, so
    a log-prob of -20 is only known to within 0.06.

    Args:
      values: any shape, any dtype.
    Returns: the same values in float32 or float64; the gradient flows through.

    >>> full_precision(torch.tensor([1.5], dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def fill_masked(values: Tensor, mask: Tensor, fill: float) -> Tensor:
    """Return `values` where the mask is True and the constant `fill` elsewhere.

    Use it before any exp, ratio or product. Masked entries (padding, prompt and tool tokens, even
    nan and inf) then affect neither the value nor the gradient. A mask applied at the end does not
    achieve this, because 0 × nan is nan.

    Args:
      values: any shape.
      mask: bool, of the same or a broadcastable shape, True where a token counts.
      fill: the neutral constant: 0 for log-probs, values and advantages, 1 for ratios.
    Returns: like `values`; the gradient is exactly 0 where the mask is False.

    >>> fill_masked(torch.tensor([1.0, float("nan")]), torch.tensor([True, False]), 0.0)
    tensor([1., 0.])
    """
    return torch.where(mask, values, values.new_full((), fill))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average the entries where the mask is True; 0 if the mask is False everywhere.

    mean = Σ m x / Σ m

    Use it for logged figures. Reduce a loss with the weights of `aggregation` instead, because
    these are computed over the whole update batch.

    Args:
      values: any shape.
      mask: bool, same shape.
    Returns: scalar, float32 or float64.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("inf")]), torch.tensor([True, True, False]))
    tensor(2.)
    """
    return fill_masked(full_precision(values), mask, 0.0).sum() / mask.sum().clamp_min(1)


def segment_sum(values: Tensor, rollout_ids: Tensor, *, n: int | None = None) -> Tensor:
    """Sum the values of each rollout over all its rows.

    out_j = Σ_{i : rollout_ids_i = j} Σ_t values_it

    Args:
      values: [B] or [B, T], set to 0 where an entry must not count. Booleans and integers are
        summed exactly.
      rollout_ids: [B] int64, 0 … n-1; rows of one rollout need not be neighbours.
      n: number of rollouts, including those without a row. None: the largest id plus one.
    Returns: [n], int64 for booleans and integers, float32 or float64 otherwise; 0 for a rollout
      without rows.

    >>> segment_sum(
    ...     torch.tensor([[True, True], [True, False], [False, False]]), torch.tensor([1, 1, 2])
    ... )
    tensor([0, 3, 0])
    """
    summands = full_precision(values) if values.is_floating_point() else values.long()
    rows = summands if summands.dim() == 1 else summands.sum(-1)  # [B]
    if n is None:
        n = int(rollout_ids.max()) + 1 if rollout_ids.numel() else 0
    return rows.new_zeros(n).index_add(0, rollout_ids, rows)


def rollout_mean(values: Tensor, mask: Tensor, rollout_ids: Tensor) -> Tensor:
    """Average the unmasked entries of each whole rollout, and return this mean for each of its
    rows. It is 0 for a rollout whose entries are all masked.

    out_i = Σ m x / Σ m over all rows of row i's rollout

    Args:
      values: [B, T].
      mask: [B, T] bool.
      rollout_ids: [B] int64; rows of one rollout need not be neighbours, but all of them must be
        passed.
    Returns: [B, 1], float32 or float64; the gradient flows through.

    >>> rollout_mean(
    ...     torch.tensor([[1.0], [3.0], [5.0]]), torch.ones(3, 1).bool(), torch.tensor([0, 0, 1])
    ... )
    tensor([[2.],
            [2.],
            [5.]])
    """
    total = segment_sum(fill_masked(full_precision(values), mask, 0.0), rollout_ids)
    return (total / segment_sum(mask, rollout_ids).clamp_min(1))[rollout_ids].unsqueeze(-1)


def episode_positions(
    rollout_ids: Tensor, step_ids: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the positions of each rollout's trained tokens, in order of time and across its rows.
    Tool and user tokens are left out.

    Discounted returns and GAE are computed on tensors arranged by `to_episodes` with these
    positions. There, the right neighbour of a token is the next *sampled* token of the rollout, so
    nothing resets, discounts or bootstraps in between.

    Args:
      rollout_ids: [B] int64; rows of one rollout need not be neighbours.
      step_ids: [B, T], the step of the episode at each token; it orders the rows of a rollout.
      response_mask: [B, T] bool.
    Returns: positions [N, L] int64 into a flattened [B · T], and a mask [N, L], False at padding. N
      is the largest rollout id plus one, and L is the number of trained tokens of the longest
      rollout.

    >>> mask = torch.tensor([[True, False], [True, True]])
    >>> episode_positions(torch.tensor([0, 0]), torch.tensor([[1, 1], [0, 0]]), mask)[0]
    tensor([[2, 3, 0]])
    """
    rows, columns = response_mask.nonzero(as_tuple=True)  # by row, then by column
    order = step_ids[rows, columns].argsort(stable=True)
    order = order[rollout_ids[rows][order].argsort(stable=True)]
    owners = rollout_ids[rows][order]
    counts = segment_sum(response_mask, rollout_ids)
    place = torch.arange(len(owners), device=owners.device) - (counts.cumsum(0) - counts)[owners]
    width = int(counts.max()) if counts.numel() else 0
    positions = rows.new_zeros(counts.numel(), width).index_put(
        (owners, place), (rows * response_mask.shape[1] + columns)[order]
    )
    return positions, torch.arange(width, device=owners.device) < counts.unsqueeze(1)


def to_episodes(values: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Arrange each rollout's trained tokens side by side, [B, T] → [N, L], with 0 after the last.

    Args:
      values: [B, T].
      positions, mask: [N, L], from `episode_positions`.
    Returns: [N, L].

    >>> to_episodes(
    ...     torch.tensor([[5.0, 6.0]]), torch.tensor([[1, 0]]), torch.tensor([[True, False]])
    ... )
    tensor([[6., 0.]])
    """
    return fill_masked(values.flatten()[positions], mask, 0)


def from_episodes(values: Tensor, positions: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """Undo `to_episodes`, [N, L] → [B, T], with 0 outside the trained tokens.

    Args:
      values: [N, L].
      positions, mask: [N, L], from `episode_positions`.
      like: [B, T]; only its shape is used.
    Returns: [B, T], of the dtype of `values`.

    >>> mask = torch.tensor([[True, False]])
    >>> from_episodes(torch.tensor([[6.0, 9.0]]), torch.tensor([[1, 0]]), mask, torch.zeros(1, 2))
    tensor([[0., 6.]])
    """
    return (
        values.new_zeros(like.numel()).index_put((positions[mask],), values[mask]).view(like.shape)
    )
