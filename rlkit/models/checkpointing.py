"""Switch activation checkpointing on and off. With checkpointing, the layers of a model keep only
their inputs for the backward pass. The backward pass computes all other activations again."""

from __future__ import annotations

from typing import Any

from rlkit.models.fused import choose_kernel, get_update_kernel
from rlkit.models.head import split_model
from rlkit.system.adapters import base_model


def can_checkpoint(model: Any) -> bool:
    """Return whether the model, with or without adapters, can recompute its activations."""
    return bool(getattr(base_model(model), "supports_gradient_checkpointing", False))


def is_checkpointed(model: Any) -> bool:
    """Return whether the model recomputes its activations in the backward pass."""
    return bool(getattr(base_model(model), "is_gradient_checkpointing", False))


def checkpoint_activations(model: Any, on: bool) -> None:
    """Switch the recomputation of activations on or off, in place. Call this function at any time
    between two updates.

    The update kernel is chosen again, because the fused kernel keeps its activations: "auto"
    becomes eager when recomputation is switched on.

    Raises: EngineError if model.kernel is "fused" and recomputation is switched on.
    """
    if is_checkpointed(model) == on:
        return
    causal = base_model(model)
    if on:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        causal.gradient_checkpointing_disable()
    # Only the reentrant kind of checkpointing needs the hook on the embeddings. The fused decoder
    # does not accept a model with hooks. With a hook, this process would decode with another kernel
    # than the sampling process of asynchrony=overlap.
    causal.disable_input_require_grads()
    asked = get_update_kernel(split_model(causal)[0]).asked
    if asked is not None:
        choose_kernel(causal, asked)
