"""Fingerprints of tensors: numbers to tell whether weights have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def fingerprint(tensors: Iterator[Tensor] | Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Compute numbers to tell whether any tensor has changed: for each tensor a hash of its bits
    and the sum of its entries. Both are computed on the tensor's device.

    Autograd's version counters would cost less, but a fused optimizer does not increase them.
    """
    given = [t.detach() for t in tensors]
    with torch.no_grad():
        bits = [torch.hash_tensor(t).view(torch.int64) for t in given]
        sums = [t.sum(dtype=torch.float64) for t in given]
    return (tuple(torch.stack(bits).tolist()), tuple(torch.stack(sums).tolist())) if given else ()
