"""The forward of a Llama-like trunk in as few calls as it takes: what a decoding step of a small
model costs is calls, not arithmetic.

Hugging Face's own starts about a hundred operations a layer, most of them to rotate and to
normalise. Here it is about thirty: queries and keys are rotated and normalised together, and what
all layers share is made once. The numbers are the same up to the last bits of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.models.fused import head_norms, standard

Attention = Callable[
    [Tensor, Tensor, Tensor, int], Tensor
]  # queries [R, Hq, m, D], keys and values [R, Hk, m, D], layer → [R, m, Hq, D]


Projection = Callable[[Tensor], Tensor]  # of tokens that are normalised already


class Layer(NamedTuple):
    """A decoder layer, and what is made of its weights before the first step."""

    module: Any
    project: Projection  # to queries, keys and values side by side
    gates: Projection  # to gate and up side by side
    scale: Tensor | None  # [Hq + Hk, D], of the norm of queries and keys


class Trunk:
    """The forward of a trunk, without gradient, its weights as they are when this is made or
    refreshed."""

    def __init__(self, trunk: Any):
        self.trunk = trunk
        self.derived: list[
            tuple[Tensor, Callable[[], Tensor]]
        ] = []  # what is made of weights, and how
        self.layers = [_layer(module, self.derive) for module in trunk.layers]

    @torch.no_grad()
    def derive(self, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes of the weights, made again in its place by `refresh`."""
        self.derived.append((make(), make))
        return self.derived[-1][0]

    @torch.no_grad()
    def refresh(self) -> None:
        """The weights have changed in place: what was made of them is made again, where it is."""
        for tensor, make in self.derived:
            tensor.copy_(make())

    def __call__(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """The last hidden states [R, m, H] of tokens [R, m] at these positions [R, m]."""
        x = self.trunk.embed_tokens(ids)
        cos, sin = (
            part[:, :, None] for part in self.trunk.rotary_emb(x, positions)
        )  # [R, m, 1, D]
        half = cos.shape[-1] // 2
        sin = torch.cat((sin[..., :half].neg(), sin[..., half:]), -1)
        for number, layer in enumerate(self.layers):
            attn = layer.module.self_attn
            mlp = layer.module.mlp
            eps = layer.module.input_layernorm.variance_epsilon
            projected = layer.project(normalised(x, eps)).view(*ids.shape, -1, attn.head_dim)
            keys = (projected.shape[2] - attn.config.num_attention_heads) // 2
            both = projected[:, :, :-keys]
            values = projected[:, :, -keys:]
            if layer.scale is not None:
                both = normalised(both, attn.q_norm.variance_epsilon) * layer.scale
            both = (both * cos).addcmul_(
                both.roll(half, -1), sin
            )  # rotate_half, its sign in the sine
            query, key, value = (
                part.transpose(1, 2) for part in (both[:, :, :-keys], both[:, :, -keys:], values)
            )
            x = x + attn.o_proj(attention(query, key, value, number).flatten(2))
            gate, up = layer.gates(
                normalised(x, layer.module.post_attention_layernorm.variance_epsilon)
            ).chunk(2, -1)
            x = x + mlp.down_proj(mlp.act_fn(gate) * up)
        return normalised(x, self.trunk.norm.variance_epsilon) * self.trunk.norm.weight


Derive = Callable[[Callable[[], Tensor]], Tensor]


def _layer(module: Any, derive: Derive) -> Layer:
    attn = module.self_attn
    mlp = module.mlp
    scale = None
    if head_norms(attn) != (None, None):
        heads = attn.config.num_attention_heads
        groups = attn.config.num_attention_heads // attn.config.num_key_value_heads
        scale = derive(
            lambda: torch.cat(
                [
                    attn.q_norm.weight.expand(heads, -1),
                    attn.k_norm.weight.expand(heads // groups, -1),
                ]
            )
        )
    project = projection(derive, module.input_layernorm, attn.q_proj, attn.k_proj, attn.v_proj)
    return Layer(
        module,
        project,
        projection(derive, module.post_attention_layernorm, mlp.gate_proj, mlp.up_proj),
        scale,
    )


def projection(derive: Derive, norm: Any, *modules: Any) -> Projection:
    """The modules' outputs side by side, for tokens that have still to be multiplied by the weight
    of their norm.

    One matrix where a call costs more than the copy, on a CPU; elsewhere the modules themselves, as
    where they hold adapters.
    """
    if any(type(m) is not nn.Linear or m.weight.device.type != "cpu" for m in modules):
        return lambda x: torch.cat([module(x * norm.weight) for module in modules], -1)
    biased = modules[0].bias is not None
    weight = derive(lambda: torch.cat([m.weight for m in modules]) * norm.weight)
    bias = derive(lambda: torch.cat([m.bias for m in modules])) if biased else None
    return lambda x: nn_functional.linear(x, weight, bias)


def normalised(x: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) over the last dimension, in float32 at least."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return nn_functional.rms_norm(
            x, x.shape[-1:], eps=eps
        )  # one kernel on CUDA; on a CPU eleven calls
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.mul_(norm).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


# config.model_type → the forward of its trunk. Layers: norm, rotated and grouped attention, norm,
# gated MLP.
FORWARDS: dict[str, type[Trunk]] = {
    "llama": Trunk,
    "mistral": Trunk,
    "qwen2": Trunk,
    "qwen3": Trunk,
}


def forward_of(trunk: Any) -> Trunk | None:
    """The forward for this trunk; None where the model's own has to be used.

    A known family counts where its layers are as Hugging Face wrote them, adapters in their
    projections or not.
    """
    return FORWARDS[trunk.config.model_type](trunk) if standard(trunk) else None
