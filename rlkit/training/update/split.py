"""Split a batch: choose the rows of one update, and divide a pass over them into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlkit.algorithm import Algorithm
from rlkit.models.packing import count_shared
from rlkit.types import Batch

Rows = TypeVar("Rows", bound=Batch)

# Fields with one entry for each of the N rollouts. A selection of rows does not change them. All
# other tensors have one entry for each row.
PER_ROLLOUT = (
    "rewards",
    "group_ids",
    "truncated",
    "lengths",
    "reply_lengths",
    "greedy_rewards",
)
# In a micro-batch, this many tokens that a row shares with the row before it count as one token.
# Linear layers compute a shared token once, but attention copies its keys and values for each row.
# Under grouped-query attention these take less than an eighth of a token's activations.
SHARED = 8


def select(batch: Rows, rows: Tensor) -> Rows:
    """Return some rows of a batch, without the columns after the longest selected row. Fields with
    one entry per rollout [N], and values that are not tensors, stay unchanged."""
    width = int(batch.attention_mask[rows].sum(1).max())
    per_row: dict[str, Any] = {
        name: value[rows][:, :width] if value.dim() == 2 else value[rows]
        for name, value in vars(batch).items()
        if isinstance(value, Tensor) and name not in PER_ROLLOUT
    }
    metrics = {
        name: value[rows][:, :width] if value.dim() == 2 else value
        for name, value in batch.metrics.items()
    }
    return replace(batch, **per_row, metrics=metrics)


def split_into_minibatches(batch: Batch, algorithm: Algorithm, seed: int) -> list[list[Tensor]]:
    """Return the row numbers of every update, epoch by epoch. In each of the `epochs` epochs, all
    rollouts are divided at random into `minibatches` minibatches. All rows of a rollout are in the
    same minibatch."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    owners = batch.rollout_ids.cpu()
    orders = [
        torch.randperm(len(batch.rewards), generator=generator) for _ in range(algorithm.epochs)
    ]
    parts = [
        [
            torch.isin(owners, part).nonzero()[:, 0]
            for part in order.tensor_split(algorithm.minibatches)
        ]
        for order in orders
    ]
    # A minibatch without rows is left out. All of its rollouts ended before their first reply.
    return [[rows.to(batch.ids.device) for rows in epoch if len(rows)] for epoch in parts]


def split_into_micro_batches(
    batch: Batch, max_tokens: int, *, packs: bool = True
) -> Iterator[Tensor]:
    """Yield the row numbers of one micro-batch after another. Each micro-batch takes as many rows
    as fit into `max_tokens` tokens. Rollouts of a group are neighbours.

    Rows of one rollout stay together, because a ratio or a mean over a sequence needs all of its
    tokens. Therefore a micro-batch has at least one rollout, even if this rollout alone exceeds
    `max_tokens`. A row counts up to its last trained token. A beginning that it shares with the row
    before it is packed only once (`rlkit.models.packing`), so these tokens count as 1 / SHARED
    tokens each. Rows without a trained token are left out, because they would add nothing to any
    sum.

    Args:
      packs: False if the model reads these rows unpacked. Shared tokens then count in each row.
    """
    ids = batch.ids.cpu().numpy()
    last = batch.response_mask * torch.arange(batch.ids.shape[1], device=batch.ids.device)
    lengths = last.amax(1).tolist()
    owners = batch.rollout_ids.tolist()
    groups = batch.group_ids.tolist()
    rollouts: dict[int, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lambda row: (groups[owners[row]], owners[row])):
        if lengths[row]:
            rollouts.setdefault(owners[row], []).append(row)

    def count(rows: list[int], before: int | None) -> int:
        """Return the tokens of these rows behind the row `before`, times SHARED."""
        total = 0
        for row in rows:
            total += SHARED * lengths[row]
            if packs and before is not None:
                own, theirs = (ids[i, : lengths[i]] for i in (row, before))
                total -= (SHARED - 1) * count_shared(own, theirs)
            before = row
        return total

    chosen = list[int]()
    size = 0
    for rows in rollouts.values():
        more = count(rows, chosen[-1] if chosen else None)
        if chosen and size + more > SHARED * max_tokens:
            yield torch.tensor(chosen, device=batch.ids.device)
            chosen = []
            size = 0
            more = count(rows, None)
        chosen += rows
        size += more
    if chosen:
        yield torch.tensor(chosen, device=batch.ids.device)


def move_to_device(batch: Rows, device: torch.device | str) -> Rows:
    """Return the batch on a device, including the tensors in its mappings."""

    def there(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: there(own) for name, own in value.items()}
        return value.to(device) if isinstance(value, Tensor) else value

    return replace(batch, **{name: there(value) for name, value in vars(batch).items()})
