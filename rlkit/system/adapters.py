"""Adapters of PEFT: whether a model has them, and the model below them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


def has_adapters(model: Any) -> bool:
    """Whether a model is one of PEFT's. A process that has not imported PEFT has none."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model(model: Any) -> Any:
    """The model below the adapters. A model without adapters is returned itself."""
    return model.get_base_model() if has_adapters(model) else model


def lora_layers(model: Any) -> list[Any]:
    """The layers with LoRA factors, in the order of `modules()`."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


class LoRAFactors(NamedTuple):
    """base(x) + scaling · up(down(x))."""

    base: Any
    down: Any
    up: Any
    scaling: float


def plain_lora(layer: Any) -> LoRAFactors | None:
    """A LoRA layer's factors, if base and factors are all that it computes in evaluation mode; None
    otherwise.

    This holds for PEFT's linear layers with one active adapter, if it is neither merged nor
    disabled nor a variant like DoRA.
    """
    if "peft" not in sys.modules:
        return None
    from peft.tuners.lora import Linear

    if type(layer) is not Linear or layer.merged or layer.disable_adapters:
        return None
    active = layer.active_adapters
    if len(active) != 1 or active[0] not in layer.lora_A or active[0] in layer.lora_variant:
        return None
    name = active[0]
    return LoRAFactors(
        layer.base_layer, layer.lora_A[name], layer.lora_B[name], float(layer.scaling[name])
    )
