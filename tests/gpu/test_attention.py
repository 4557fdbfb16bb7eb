"""Attention of packed rows by CUDA's own kernels, forward and backward, against the CPU in float32.

On a machine without pytest-xdist: pytest -o addopts= -m gpu tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from rlkit.models import pack
from rlkit.models.packing import attend_packed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_on_cuda_is_that_of_the_cpu(dtype):
    """Two groups of four replies, up to 700 tokens; four query heads share two key heads."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (8, 700), generator=g)
    ids[1:4, :200], ids[5:, :90] = ids[0, :200], ids[4, :90]
    at, lengths = torch.arange(700), torch.randint(260, 700, (8, 1), generator=g)
    mask = (at >= 200) & (at < lengths)
    inputs = [
        torch.randn(1, heads, len(pack(ids, mask).ids), 64, generator=g) for heads in (4, 2, 2)
    ]
    results = []
    for device, precision in (("cpu", torch.float32), ("cuda", dtype)):
        given = [x.to(device, precision, copy=True).requires_grad_() for x in inputs]
        out, _ = attend_packed(None, *given, None, packed=pack(ids.to(device), mask.to(device)))
        out.float().square().sum().backward()
        results.append([out.detach().float().cpu(), *(x.grad.float().cpu() for x in given)])
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-3
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() < tolerance * expected.norm()
