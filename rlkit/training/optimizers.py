"""Optimizers as a device wants them, and one whose moments take a byte each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rlkit.errors import ConfigError
from rlkit.types import safe


def make_optimizer(
    make: Callable[..., Any], parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of these parameters. torch's Adam and AdamW are fused on CUDA: one kernel for
    all tensors instead of about ten."""
    free = not getattr(make, "keywords", {}).keys() & {"fused", "foreach"}
    if (
        free
        and getattr(make, "func", make) in (torch.optim.Adam, torch.optim.AdamW)
        and all(p.device.type == "cuda" for p in parameters)
    ):
        make = partial(make, fused=True)
    return make(parameters)


@safe("betas")
def adamw_8bit(
    parameters: Sequence[torch.nn.Parameter],
    *,
    lr: float,
    betas: Sequence[float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """AdamW with moments of 8 bits in blocks: 2 bytes a parameter instead of 8. Tensors below 4,096
    entries keep float32.

    Raises: ConfigError without the package bitsandbytes, which does not know sharded weights
    either.
    Source: Dettmers et al. 2022, arXiv:2110.02861.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optimizer=adamw_8bit: {error}; pip install bitsandbytes, or use optimizer=adamw"
        ) from error
    if any(hasattr(p, "full_tensor") for p in parameters):
        raise ConfigError(
            "optimizer=adamw_8bit: bitsandbytes cannot step sharded weights; use trainer=ddp, or"
            " optimizer=adamw"
        )
    return AdamW8bit(parameters, lr=lr, betas=tuple(betas), weight_decay=weight_decay)
