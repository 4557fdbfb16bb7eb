"""Compute the operations between the matrix products of a small model with a few calls of compiled
C (_update.c). These operations are used for updates on a CPU.

In Hugging Face's code, the norms, rotary positions and gates of a layer are dozens of calls of
torch, and most of these calls only move memory. Here a layer has five such calls forward and five
backward. An adapter adds two matrix products to the one of its base weight. Numbers differ from
torch's in their last bits. In bfloat16, numbers are rounded only when a result is stored, and not
in between.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as nn_functional

from rlkit.errors import EngineError
from rlkit.models.compiled import load_library, load_or_reason
from rlkit.models.head import PLAIN, split_model
from rlkit.models.shape import read_model_shape
from rlkit.system.adapters import plain_lora

SOURCE = Path(__file__).with_name("_update.c")
FLAGS = ("-fopenmp", "-fno-math-errno", "-fno-trapping-math")
TYPES = {torch.float32: (), torch.bfloat16: ("-DHALF",)}  # type → flags of the compiler
BLOCK = 64  # number of rows that are summed together, as in the C file
INTEGER = ctypes.c_int64
FLOAT = ctypes.c_double
ADDRESS = ctypes.c_void_p
Kernel = Literal["auto", "eager", "fused"]


class UpdateKernel(NamedTuple):
    """Describe the kernel for a trunk's updates. The record is an attribute of the trunk,
    `update_kernel`, so copies of the model have it too."""

    used: Literal["eager", "fused"] = "eager"
    asked: Kernel | None = None  # value of model.kernel; None: no kernel was chosen yet
    reason: str = ""  # the reason why "auto" chose eager

    @property
    def automatic(self) -> bool:
        """Return whether the config leaves the choice to rlkit."""
        return self.asked in (None, "auto")


@cache
def load_operations(dtype: torch.dtype = torch.float32) -> Any:
    """Load the functions of the C file for numbers of this type.

    Raises: NoKernel, Undecided (rlkit.models.compiled).
    """
    c = load_library(SOURCE, "gate_backward", (*FLAGS, *TYPES[dtype]))
    c.forward.argtypes = (*[ADDRESS] * 7, *[INTEGER] * 3, FLOAT, INTEGER)
    c.backward.argtypes = (*[ADDRESS] * 9, *[INTEGER] * 4)
    c.gate.argtypes = (*[ADDRESS] * 3, *[INTEGER] * 2)
    c.gate_backward.argtypes = (*[ADDRESS] * 5, *[INTEGER] * 2)
    for function in (c.forward, c.backward, c.gate, c.gate_backward):
        function.restype = None
    return c


def choose_kernel(model: Any, kernel: Kernel) -> None:
    """Choose the kernel for the model's updates and scoring passes from now on. If "auto" chooses
    eager, the reason is in the result of `get_update_kernel`.

    Raises: EngineError if "fused" is impossible, or if the machine is too busy to compile at the
    moment.
    """
    trunk = split_model(model)[0]
    trunk.update_kernel = UpdateKernel(asked=kernel)
    if kernel == "eager":
        return
    if getattr(trunk, "gradient_checkpointing", False):
        reason = "it keeps the activations that model.gradient_checkpointing recomputes"
    elif serves(trunk):
        load = partial(load_operations, trunk.norm.weight.dtype)
        _, reason = load_or_reason(kernel, "model.kernel", load)
    else:
        reason = "it is for Llama, Mistral, Qwen2 and Qwen3 on a CPU, without autocast"
    if reason and kernel == "fused":
        raise EngineError(f"model.kernel=fused: {reason}; use auto or eager")
    trunk.update_kernel = UpdateKernel("eager" if reason else "fused", kernel, reason)


def get_update_kernel(trunk: Any) -> UpdateKernel:
    """Return the record of the kernel for a trunk's updates. The kernel is eager if none has been
    chosen."""
    return getattr(trunk, "update_kernel", UpdateKernel())


def update_kernel(model: Any) -> Literal["eager", "fused"]:
    """Return the name of the kernel for a model's updates."""
    return get_update_kernel(split_model(model)[0]).used


def use_update_kernel(model: Any, kernel: Literal["eager", "fused"], reason: str = "") -> None:
    """Use this kernel from now on for the updates of a model, and of a critic copied from it."""
    for module in model.modules():
        if get_update_kernel(module).asked:
            module.update_kernel = get_update_kernel(module)._replace(used=kernel, reason=reason)


def go_on_with(model: Any, kernel: Literal["eager", "fused"]) -> str:
    """Continue a run with the kernel of its earlier updates.

    Returns: a sentence if the updates will nevertheless differ from the earlier updates, otherwise
      an empty string.
    """
    if update_kernel(model) == kernel:
        return ""
    trunk = split_model(model)[0]
    if kernel == "eager" and get_update_kernel(trunk).automatic:
        use_update_kernel(model, "eager", "as the run did so far")
        return ""
    return (
        f"updates were {kernel} and are {update_kernel(model)} (model.kernel), so log-probs and"
        " gradients differ in their last bits"
    )


def serves(trunk: Any) -> bool:
    """Return whether this file's forward pass can replace the trunk's own forward pass. The trunk
    must be of a known family, in float32 or bfloat16, on a CPU, and without hooks on its
    modules."""
    if not is_standard(trunk) or trunk.gradient_checkpointing or torch.is_autocast_enabled("cpu"):
        return False
    weight = trunk.norm.weight
    parts = [layer.mlp.act_fn for layer in trunk.layers]
    parts += [
        part
        for layer in trunk.layers
        for name, part in layer.self_attn.named_children()
        if name in ("q_norm", "k_norm")
    ]
    return (
        trunk.config.hidden_act in ("silu", "swish")
        and weight.dtype == trunk.embed_tokens.weight.dtype
        and weight.dtype in TYPES
        and weight.device.type == "cpu"
        and not has_hooks(trunk.norm, *parts)
    )


def is_standard(trunk: Any) -> bool:
    """Return whether a trunk has the layers that Hugging Face wrote for a known family, with or
    without adapters in their projections."""
    family = read_model_shape(trunk.config).family
    home = (
        sys.modules.get(f"transformers.models.{family}.modeling_{family}")
        if family in PLAIN
        else None
    )
    if home is None:
        return False
    if not {"layers", "norm"} <= {name for name, _ in trunk.named_children()}:
        return False
    layers = list(trunk.layers)
    return (
        bool(layers)
        and all(
            type(layer).__module__
            == type(layer.mlp).__module__
            == type(layer.self_attn).__module__
            == home.__name__
            for layer in layers
        )
        and all(
            type(norm).__module__ == home.__name__ and type(norm).__name__.endswith("RMSNorm")
            for norm in list_norms(trunk)
        )
        # This file's forward does not call the modules, so it would bypass their hooks, for example
        # a hook that fetches a shard.
        and not has_hooks(trunk, *layers, *(p for layer in layers for p in layer.children()))
    )


def find_head_norms(attn: Any) -> tuple[Any | None, Any | None]:
    """Return the norms of queries and of keys, as in Qwen3. Return None if a family has no norms of
    this kind."""
    parts = dict(attn.named_children())
    return parts.get("q_norm"), parts.get("k_norm")


def list_norms(trunk: Any) -> list[Any]:
    """List the norms of a standard trunk and of its layers, including the norms of queries and
    keys."""
    norms = [trunk.norm]
    for layer in trunk.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [norm for norm in find_head_norms(layer.self_attn) if norm is not None]
    return norms


def compute_fused_states(trunk: Any, ids: Tensor, positions: Tensor, attend: Any) -> Tensor:
    """Compute the last hidden states [N, H] of packed tokens [N], with gradient.

    Args:
      attend: (module, q, k, v [N, heads, D]) → attention [N, Hq, D].
    """
    x = trunk.embed_tokens(ids)
    cosine, sine = (part[0].contiguous() for part in trunk.rotary_emb(x.float(), positions[None]))
    for layer in trunk.layers:
        attn = layer.self_attn
        mlp = layer.mlp
        y = apply_norm(x, layer.input_layernorm)
        q, k, v = (
            multiply_projection(m, y).view(len(ids), -1, attn.head_dim)
            for m in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        q_norm, k_norm = find_head_norms(attn)
        q = apply_norm(q, q_norm, cosine, sine)
        k = apply_norm(k, k_norm, cosine, sine)
        x = x + multiply_projection(attn.o_proj, attend(attn, q, k, v).flatten(1))
        y = apply_norm(x, layer.post_attention_layernorm)
        gated = Gate.apply(
            multiply_projection(mlp.gate_proj, y), multiply_projection(mlp.up_proj, y)
        )
        x = x + multiply_projection(mlp.down_proj, gated)
    return apply_norm(x, trunk.norm)


def multiply_projection(module: Any, x: Tensor) -> Tensor:
    """Apply a projection to tokens [N, H], with its adapter if it has one."""
    factors = plain_lora(module)
    if factors is None or has_hooks(module, factors.base, factors.down, factors.up):
        return module(x)
    up, down = factors.up.weight, factors.down.weight
    return Adapted.apply(x, factors.base.weight, factors.base.bias, down, up, factors.scaling)


def has_hooks(*modules: Any) -> bool:
    """Return whether any of these modules has a hook on its call."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in modules)


def apply_norm(
    x: Tensor, norm: Any | None, cosine: Tensor | None = None, sine: Tensor | None = None
) -> Tensor:
    """Apply norm(x) over the last dimension, and then rotate the result if angles [N, D] are given.
    The shape of x is [N, H] or [N, heads, D]."""
    return Norm.apply(
        x,
        None if norm is None else norm.weight,
        cosine,
        sine,
        0.0 if norm is None else norm.variance_epsilon,
    )


class Norm(torch.autograd.Function):
    """Compute x / √(mean(x²) + eps) · weight, and rotate it by the angles. The norm or the rotation
    may be left out."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        cosine: Tensor | None,
        sine: Tensor | None,
        eps: float,
    ) -> Tensor:
        x = x.contiguous()
        weight, cosine, sine = (
            None if t is None else t.contiguous() for t in (weight, cosine, sine)
        )
        y = torch.empty_like(x)
        n = x.shape[-1]
        rows = x.numel() // n
        scale = torch.empty(0 if weight is None else rows, dtype=torch.float32)
        ctx.sizes = rows, x.shape[1] if cosine is not None else 1, n
        given = (
            x,
            weight,
            cosine,
            sine,
            y,
            scale,
            torch.empty(-(-rows // BLOCK), n, dtype=torch.float32),
        )
        threads = torch.get_num_threads()
        load_operations(x.dtype).forward(*_addresses(*given), *ctx.sizes, eps, threads)
        # the backward pass of a rotation alone does not need x
        ctx.save_for_backward(None if weight is None else x, weight, cosine, sine, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cosine, sine, scale = ctx.saved_tensors
        gradient = gradient.contiguous()
        rows, _, n = ctx.sizes
        to_x = torch.empty_like(gradient)
        room = torch.empty(-(-rows // BLOCK), n, dtype=torch.float32)
        sums = torch.zeros_like(room) if ctx.needs_input_grad[1] else None
        x = gradient if x is None else x
        given = (gradient, x, weight, cosine, sine, scale, to_x, sums, room)
        load_operations(x.dtype).backward(*_addresses(*given), *ctx.sizes, torch.get_num_threads())
        return to_x, None if sums is None else sums.sum(0).to(weight.dtype), None, None, None


class Gate(torch.autograd.Function):
    """Compute silu(a) · b. Only a and b are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a = a.contiguous()
        b = b.contiguous()
        ctx.save_for_backward(a, b)
        y = torch.empty_like(a)
        load_operations(a.dtype).gate(*_addresses(a, b, y), a.numel(), torch.get_num_threads())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gradient = gradient.contiguous()
        to_a = torch.empty_like(a)
        to_b = torch.empty_like(b)
        load_operations(a.dtype).gate_backward(
            *_addresses(gradient, a, b, to_a, to_b), a.numel(), torch.get_num_threads()
        )
        return to_a, to_b


class Adapted(torch.autograd.Function):
    """Compute `x Wᵀ + b + scaling · (x Aᵀ) Bᵀ` in the type of x. The factors A [r, H] and B [N, r]
    keep their own type, and so do their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scaling: float,
    ) -> Tensor:
        y = nn_functional.linear(x, weight, bias)
        low = nn_functional.linear(x, down.to(x.dtype))
        ctx.save_for_backward(x, weight, down, up, low)
        ctx.scaling = scaling
        return y.addmm_(low, up.to(x.dtype).T, alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, low = ctx.saved_tensors
        to_low = gradient.mm(up.to(gradient.dtype)).mul_(ctx.scaling)
        to_x = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = gradient.mm(weight).addmm_(to_low, down.to(gradient.dtype))
        if ctx.needs_input_grad[1]:
            to_weight = gradient.T.mm(x)
        if ctx.needs_input_grad[2]:
            to_bias = gradient.sum(0)
        to_down = to_low.T.mm(x).to(down.dtype)
        to_up = gradient.T.mm(low).to(up.dtype).mul_(ctx.scaling)
        return to_x, to_weight, to_bias, to_down, to_up, None


def _addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
