"""Optimizers as a device wants them, and one whose moments take a byte each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rlkit.errors import ConfigError


def make_optimizer(make: Callable[..., Any], parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of these parameters. torch's Adam and AdamW are fused on CUDA: one kernel for all tensors instead of about ten."""
    chosen = getattr(make, "keywords", {}).keys() & {"fused", "foreach"}
    adam = getattr(make, "func", make) in (torch.optim.Adam, torch.optim.AdamW)
    if adam and not chosen and all(p.device.type == "cuda" for p in parameters):
        make = partial(make, fused=True)
    return make(parameters)


def adamw_8bit(
    parameters: Any, *, lr: float, betas: Sequence[float] = (0.9, 0.99), eps: float = 1e-8, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """AdamW with moments of 8 bits in blocks: 2 bytes a parameter instead of 8. Tensors below 4,096 entries keep float32.

    Raises: ConfigError without the package bitsandbytes, which does not know sharded weights either.
    Source: Dettmers et al. 2022, arXiv:2110.02861.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optimizer=adamw_8bit needs the package bitsandbytes ({error}): pip install bitsandbytes, or optimizer=adamw"
        ) from error
    parameters = list(parameters)
    if any(hasattr(p, "full_tensor") for p in parameters):
        raise ConfigError("optimizer=adamw_8bit: bitsandbytes cannot step sharded weights; use trainer=ddp, or optimizer=adamw")
    return AdamW8bit(parameters, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
