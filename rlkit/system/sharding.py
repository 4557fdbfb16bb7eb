"""Whether the weights of a model lie in shards over several ranks (FSDP2)."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def holds_shards(module: Any) -> bool:
    """Whether a module is one of FSDP's. A process that has not imported FSDP has none."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def find_sharded_modules(*models: Any) -> list[Any]:
    """All sharded submodules of the models."""
    return [
        module
        for model in models
        if isinstance(model, nn.Module)
        for module in model.modules()
        if holds_shards(module)
    ]


def is_sharded(value: Any) -> bool:
    """Whether a value is a tensor in shards, a DTensor of torch."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
