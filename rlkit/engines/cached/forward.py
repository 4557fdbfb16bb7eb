"""Run the forward pass of a Llama-like trunk in as few calls as possible. A decoding step of a
small model spends its time on calls, not on arithmetic.

Hugging Face's forward pass starts about a hundred operations per layer, and most of these
operations rotate or normalise. This forward pass starts about thirty operations per layer. It
rotates queries and keys together, normalises them together, and computes only once the tensors
shared by all layers. The results equal Hugging Face's results up to the last bits of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nn_functional

from rlkit.engines.cached.products import Derive, Projection, find_plain_part, make_projection
from rlkit.models.fused import find_head_norms, is_standard
from rlkit.models.head import Float32Head, Head

# (queries [R, Hq, m, D], keys and values [R, Hk, m, D], number of the layer) → [R, m, Hq, D]
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Layer(NamedTuple):
    """Hold a decoder layer, and the tensors made from its weights before the first step."""

    module: Any
    project: Projection  # from normalised tokens to queries, keys and values, concatenated
    out: Projection  # from attention's output to the residual stream
    gates: Projection  # from normalised tokens to gate and up, concatenated
    down: Projection  # from the gated MLP activations to the residual stream
    scale: Tensor | None  # [Hq + Hk, D], weights of the norms of queries and keys


class Trunk:
    """Run the forward pass of a trunk, without gradient. The pass uses the weights as they were
    when this object was made, or at the last call of `refresh`.

    Args:
      trunk: the transformer of a causal LM, of a family in `PLAIN`
        (rlkit.models.head).
      half: compute in this type as autocast would, without its cost. Autocast converts all weights
        in every step; this class converts them once and keeps the copies (2 bytes a weight) until
        `refresh`. Products, keys and values are in `half`. The embedding, norms, angles and the
        residual stream stay in the precision of their weights. Attention's queries are rounded as
        autocast rounds them. None: products are computed in the type of the weights, or in
        autocast's type if autocast is on. If the projections must be called as modules
        (products.py), `half` has no effect.
    """

    def __init__(self, trunk: Any, half: torch.dtype | None = None):
        self.trunk = trunk
        plain = all(find_plain_part(m, half) for layer in trunk.layers for m in _projections(layer))
        self.half = half if plain else None
        # (a tensor made from weights, the function that makes it)
        self.derived: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self.layers = [_layer(module, self.derive, self.half) for module in trunk.layers]

    @torch.no_grad()
    def derive(self, make: Callable[[], Tensor]) -> Tensor:
        """Call `make`, which computes a tensor from weights, and return that tensor as a contiguous
        one. `refresh` computes it again, in place."""
        self.derived.append((make().contiguous(), make))
        return self.derived[-1][0]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute all tensors made from weights again, in place. Call this function after the
        weights have changed in place."""
        for tensor, make in self.derived:
            tensor.copy_(make())

    def __call__(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the last hidden states [R, m, H] of tokens [R, m] at these positions [R, m]."""
        if self.half is None:
            return self._states(ids, positions, attention)
        with torch.autocast(ids.device.type, enabled=False):
            return self._states(ids, positions, attention)

    def _states(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        x = self.trunk.embed_tokens(ids)
        # cosines and sines, each [R, m, 1, D]
        cos, sin = (part[:, :, None] for part in self.trunk.rotary_emb(x, positions))
        middle = cos.shape[-1] // 2
        sin = torch.cat((sin[..., :middle].neg(), sin[..., middle:]), -1)
        for number, layer in enumerate(self.layers):
            attn = layer.module.self_attn
            mlp = layer.module.mlp
            eps = layer.module.input_layernorm.variance_epsilon
            projected = layer.project(normalise_rms(x, eps)).view(*ids.shape, -1, attn.head_dim)
            keys = (projected.shape[2] - attn.config.num_attention_heads) // 2
            both = projected[:, :, :-keys]
            values = projected[:, :, -keys:]
            if layer.scale is not None:
                both = normalise_rms(both, attn.q_norm.variance_epsilon) * layer.scale
            # as Hugging Face's rotate_half; the sign is already in the sine
            both = (both * cos).addcmul_(both.roll(middle, -1), sin)
            both = both if self.half is None else both.to(self.half)
            query, key, value = (
                part.transpose(1, 2) for part in (both[:, :, :-keys], both[:, :, -keys:], values)
            )
            x = x + layer.out(attention(query, key, value, number).flatten(2))
            gate, up = layer.gates(
                normalise_rms(x, layer.module.post_attention_layernorm.variance_epsilon)
            ).chunk(2, -1)
            x = x + layer.down(mlp.act_fn(gate) * up)
        return normalise_rms(x, self.trunk.norm.variance_epsilon) * self.trunk.norm.weight


def make_logits_function(head: Head, forward: Trunk | None) -> Callable[[Tensor], Tensor]:
    """Return the function from last hidden states [m, H] to logits [m, V].

    The function is the head itself, with one exception. If the trunk computes in `half` and the
    head only multiplies, the function multiplies by a copy of the head's weights in `half`.
    """
    if forward is None or forward.half is None or head.logits is not head.module:
        return head
    if find_plain_part(head.module, forward.half) is None:
        return head
    return make_projection(forward.derive, None, head.module, half=forward.half)


def casts_weights(head: Head, forward: Trunk | None) -> bool:
    """Return whether decoding steps convert weights under autocast."""
    if forward is None or forward.half is None:
        return True
    copied = head.logits is head.module and find_plain_part(head.module, forward.half) is not None
    return not copied and type(head.module) is not Float32Head


def find_autocast_type(device: torch.device) -> torch.dtype | None:
    """Return the type used by this thread's autocast on a device; None if autocast is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _projections(layer: Any) -> tuple[Any, ...]:
    attn = layer.self_attn
    mlp = layer.mlp
    return (
        attn.q_proj,
        attn.k_proj,
        attn.v_proj,
        attn.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
    )


def _layer(module: Any, derive: Derive, half: torch.dtype | None) -> Layer:
    attn = module.self_attn
    scale = None
    if find_head_norms(attn) != (None, None):
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
    q, k, v, o, gate, up, down = _projections(module)
    return Layer(
        module,
        project=make_projection(derive, module.input_layernorm, q, k, v, half=half),
        out=make_projection(derive, None, o, half=half),
        gates=make_projection(derive, module.post_attention_layernorm, gate, up, half=half),
        down=make_projection(derive, None, down, half=half),
        scale=scale,
    )


def normalise_rms(x: Tensor, eps: float) -> Tensor:
    """Compute x / √(mean(x²) + eps) over the last dimension, in float32 or a wider type."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        # `rms_norm` is one kernel on CUDA, but eleven calls on a CPU
        return nn_functional.rms_norm(x, x.shape[-1:], eps=eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * norm.mul_(norm).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def make_forward(trunk: Any, half: torch.dtype | None = None) -> Trunk | None:
    """Make this file's forward pass for a trunk. Return None if this file cannot run the trunk. The
    engine then calls the model's own forward pass.

    This file can run a trunk of a known family if all its layers are Hugging Face's own classes for
    this family. The projections may have adapters. A trunk with hooks cannot be run.
    """
    return Trunk(trunk, half) if is_standard(trunk) else None
