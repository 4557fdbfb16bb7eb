"""From the last hidden states of a causal LM to its logits, as the model's own forward does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.models.shape import read_model_shape
from rlkit.system.adapters import base_model

# Families whose forward, as Hugging Face wrote it, is only the trunk and the head.
PLAIN = ("llama", "mistral", "qwen2", "qwen3")


def split_model(model: Any) -> tuple[Any, Head]:
    """Split a Hugging Face causal LM, also under PEFT, into its transformer and a function from
    last hidden states to logits."""
    causal = base_model(model)
    return causal.base_model, Head(causal)


class Head:
    """Last hidden states [m, H] → logits [m, V], with every operation of the model's own forward.

    logits = head(h) for Llama, Mistral, Qwen2 and Qwen3. Other families scale or cap: Granite
    head(h) / logits_scaling, Cohere head(h) · logit_scale, Falcon-H1 head(h) · lm_head_multiplier,
    Gemma 2 c · tanh(head(h) / c). These formulas are not kept here: every other model runs its own
    forward, with a trunk that returns the given states.

    Args:
      causal: a Hugging Face causal LM, without the wrapper of PEFT.
    """

    def __init__(self, causal: Any):
        self.causal = causal
        self.module = causal.get_output_embeddings()
        family = read_model_shape(causal.config).family
        # another module if a subclass has a forward of its own
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
        """[V, H], the weight of the head itself."""
        return self.module.weight

    def _forward(self, hidden: Tensor) -> Tensor:
        """Run the model's own forward on states computed by its trunk before."""
        causal = self.causal
        # a copy with the same parts except the trunk; the model itself is not changed
        shell = object.__new__(type(causal))
        trunk = _Computed(causal.base_model, hidden[None])
        shell.__dict__.update(
            vars(causal), _modules={**causal._modules, causal.base_model_prefix: trunk}
        )
        return shell.forward(inputs_embeds=hidden[None], use_cache=False).logits[0]


class Float32Head(nn.Linear):
    """Logits in float32 under any autocast: bfloat16 rounds one of 16 to 32 by up to 0.12 nats.
    Each call converts the weight.

    Source: MiniMax-M1, arXiv:2506.13585, and ScaleRL, arXiv:2510.13786.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return nn_functional.linear(
                x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
            )


class _Computed:
    """A trunk already run: it answers every call with its states, and has the attributes of the
    real one."""

    def __init__(self, trunk: Any, states: Tensor):
        self.trunk = trunk
        self.states = states

    def __call__(self, *inputs: Any, **settings: Any) -> _States:
        return _States(self.states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trunk, name)


class _States(tuple):
    """A trunk's result: its last hidden states first, and None for every other field of a model's
    output."""

    def __new__(cls, states: Tensor) -> _States:
        return super().__new__(cls, (states,))

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None
