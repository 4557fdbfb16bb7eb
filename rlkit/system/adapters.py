"""PEFT adapters: find out whether a model has adapters, and get the model below them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


def has_adapters(model: Any) -> bool:
    """Return whether a model is a PEFT model. If this process has not imported PEFT, the answer is
    False, without an import."""
    if "peft" not in sys.modules:
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model(model: Any) -> Any:
    """Return the model below the adapters, or the model itself if it has no adapters."""
    return model.get_base_model() if has_adapters(model) else model


def lora_layers(model: Any) -> list[Any]:
    """List the layers with LoRA factors, in the order of `modules()`."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


class LoRAFactors(NamedTuple):
    """The parts of a LoRA layer. It computes base(x) + scaling · up(down(x))."""

    base: Any
    down: Any
    up: Any
    scaling: float


def plain_lora(layer: Any) -> LoRAFactors | None:
    """Return a LoRA layer's factors, or None if in evaluation mode the layer computes anything
    besides its base and these factors.

    The factors are returned for PEFT's linear layers with one active adapter. This adapter must not
    be merged, disabled, or a variant like DoRA.
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
