"""Compute the logits of a causal LM from its last hidden states, with the same operations as the
model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.models.shape import read_model_shape
from rlkit.system.adapters import base_model

# In these families, Hugging Face's forward consists only of the trunk and the head.
PLAIN = ("llama", "mistral", "qwen2", "qwen3")


def split_model(model: Any) -> tuple[Any, Head]:
    """Split a Hugging Face causal LM, with or without PEFT's wrapper, into two parts: its
    transformer, and a function from last hidden states to logits."""
    causal = base_model(model)
    return causal.base_model, Head(causal)


class Head:
    """Map last hidden states [m, H] to logits [m, V], with every operation of the model's own
    forward.

    For Llama, Mistral, Qwen2 and Qwen3, the logits are `head(h)`. Other families scale or cap the
    logits. Granite computes `head(h) / logits_scaling`, Cohere `head(h) · logit_scale`, Falcon-H1
    `head(h) · lm_head_multiplier`, and Gemma 2 `c · tanh(head(h) / c)`. These formulas are not
    copied here. Instead, each of these models runs its own forward, with a stand-in for the trunk
    that returns the given states.

    Args:
      causal: a Hugging Face causal LM, without the wrapper of PEFT.
    """

    def __init__(self, causal: Any):
        self.causal = causal
        self.module = causal.get_output_embeddings()
        family = read_model_shape(causal.config).family
        # the module with the model's forward; a subclass with its own forward is in another module
        written = type(causal).forward.__module__
        plain = (
            family in PLAIN
            and written == f"transformers.models.{family}.modeling_{family}"
            and "forward" not in vars(causal)
        )
        self.logits: Callable[[Tensor], Tensor] = self.module if plain else self._forward

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)

    @property
    def weight(self) -> Tensor:
        """Return the weight [V, H] of the output layer."""
        return self.module.weight

    def _forward(self, hidden: Tensor) -> Tensor:
        """Run the model's own forward on states already computed by its trunk."""
        causal = self.causal
        # a shallow copy of the model, with another trunk; the model itself is not changed
        shell = object.__new__(type(causal))
        trunk = _Computed(causal.base_model, hidden[None])
        shell.__dict__.update(
            vars(causal), _modules={**causal._modules, causal.base_model_prefix: trunk}
        )
        return shell.forward(inputs_embeds=hidden[None], use_cache=False).logits[0]


class Float32Head(nn.Linear):
    """Compute logits in float32 under any autocast. In bfloat16, a logit of 16 to 32 is rounded by
    up to 0.12 nats. Each call converts the weight.

    Source: MiniMax-M1, arXiv:2506.13585, and ScaleRL, arXiv:2510.13786.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return nn_functional.linear(
                x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
            )


class _Computed:
    """Replace a trunk that has already run. A call returns the states computed before. All other
    attributes are those of the real trunk."""

    def __init__(self, trunk: Any, states: Tensor):
        self.trunk = trunk
        self.states = states

    def __call__(self, *inputs: Any, **settings: Any) -> _States:
        return _States(self.states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trunk, name)


class _States(tuple):
    """Replace a trunk's output: the first entry is the last hidden states, and every other field is
    None."""

    def __new__(cls, states: Tensor) -> _States:
        return super().__new__(cls, (states,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None
