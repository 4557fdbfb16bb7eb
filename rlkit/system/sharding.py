"""Find out whether a model's weights are sharded over several ranks (FSDP2)."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def holds_shards(module: Any) -> bool:
    """Return whether a module is an FSDP module. If this process has not imported FSDP, the answer
    is False, without an import."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def find_sharded_modules(*models: Any) -> list[Any]:
    """List all sharded submodules of the models."""
    return [
        module
        for model in models
        if isinstance(model, nn.Module)
        for module in model.modules()
        if holds_shards(module)
    ]


def is_sharded(value: Any) -> bool:
    """Return whether a value is a sharded tensor (torch's DTensor)."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
