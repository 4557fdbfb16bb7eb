"""Adapters of PEFT: whether a model has them, and the model below them."""

from __future__ import annotations

import sys
from typing import Any


def has_adapters(model: Any) -> bool:
    """Whether a model is one of PEFT's. A process that has not imported PEFT has none."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model(model: Any) -> Any:
    """The model that the adapters are put on; a model without adapters itself."""
    return model.get_base_model() if has_adapters(model) else model


def lora_layers(model: Any) -> list[Any]:
    """The layers with LoRA factors, in the order of `modules()`."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]
