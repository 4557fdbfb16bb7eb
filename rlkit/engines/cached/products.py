"""Compute the matrix products of a decoding step. Modules with the same input, such as the
projections to queries, keys and values, are computed in one product.

    y = x Wᵀ + b + (x Aᵀ) B

W is the concatenation of the modules' weights, so y is the concatenation of their outputs. A holds
the down factors of the modules' adapters. B is block-diagonal; each block is the scaling × the up
factor of one adapter. Therefore all adapters of a group cost two products, while PEFT's modules
would take six operations for each adapter. In float32 on a CPU, adapters cost nothing, because W is
a copy of the weights with the adapters added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.models.fused import has_hooks
from rlkit.models.load import Adapter
from rlkit.system.adapters import LoRAFactors, plain_lora

Projection = Callable[[Tensor], Tensor]  # tokens [R, m, H] → [R, m, N]
Derive = Callable[[Callable[[], Tensor]], Tensor]


class Part(NamedTuple):
    """Hold the weights of a module that only multiplies, with or without an adapter."""

    base: nn.Linear
    factors: LoRAFactors | None = None


def find_plain_part(module: Any, half: torch.dtype | None = None) -> Part | None:
    """Return the weights of a module that is a linear layer, with or without a plain adapter.
    Return None if calling the module may do more than multiply by these weights.

    An adapter must compute in the precision of its base layer. With autocast (`half` is given),
    every adapter does.
    """
    if type(module) is nn.Linear:
        return Part(module) if is_plain(module) else None
    factors = plain_lora(module)
    if factors is None or type(factors.base) is not nn.Linear:
        return None
    pair = (factors.down, factors.up)
    if any(type(m) not in (nn.Linear, Adapter) or m.bias is not None for m in pair):
        return None
    same = all(type(m) is Adapter or m.weight.dtype == factors.base.weight.dtype for m in pair)
    if not (same or half) or not is_plain(module, factors.base, *pair):
        return None
    return Part(factors.base, factors)


def is_plain(*modules: Any) -> bool:
    """Return whether no hook or replaced forward changes the calls of these modules."""
    return not (has_hooks(*modules) or any("forward" in vars(m) for m in modules))


def merge_weight(part: Part, dtype: torch.dtype) -> Tensor:
    """Return the weight of a module in this type, with its adapter added: W + scaling · up ·
    down."""
    weight = part.base.weight.to(dtype)
    if part.factors is None:
        return weight
    up, down = (factor.weight.to(dtype) for factor in (part.factors.up, part.factors.down))
    return weight.addmm(up, down, alpha=part.factors.scaling)


def make_projection(
    derive: Derive, norm: Any | None, *modules: Any, half: torch.dtype | None = None
) -> Projection:
    """Make the function from tokens to the concatenated outputs of several modules.

    Args:
      derive: computes a tensor from weights, and keeps the tensor up to date; see `Trunk.derive`.
      norm: the norm before the modules. The tokens given to the function are normalised, but not
        yet multiplied by the norm's weight. None: no norm.
      modules: the modules; all read the same tokens. If one module does more than multiply, the
        function calls all of them as modules.
      half: the type to compute in. Weights of another type are converted once, and the copies are
        kept. None: the type of the weights.
    Several modules become one matrix in two cases: the weights are copied to `half` anyway, or they
    are on a CPU, where one more call costs more than the copy. Otherwise each module has its own
    product. On a CPU, the norm's weight and the adapters are also multiplied into the matrix,
    except in half precision: rounding to half precision changes a matrix more than the first
    updates of an adapter do.
    """
    parts = [part for part in (find_plain_part(m, half) for m in modules) if part is not None]
    if len(parts) < len(modules):
        return make_called_projection(norm, modules)
    weights = [part.base.weight for part in parts]
    dtype = half or weights[0].dtype
    on_cpu = weights[0].device.type == "cpu"
    merges = on_cpu and dtype.itemsize > 2
    folded = norm if merges else None
    adapted = any(part.factors for part in parts)
    merged = parts if merges else [Part(part.base) for part in parts]

    def base_weight() -> Tensor:
        weight = torch.cat([merge_weight(part, dtype) for part in merged])
        return weight if folded is None else weight * folded.weight

    def base_bias() -> Tensor:
        biases = [
            part.base.weight.new_zeros(len(part.base.weight))
            if part.base.bias is None
            else part.base.bias
            for part in parts
        ]
        return torch.cat([bias.to(dtype) for bias in biases])

    copied = any(weight.dtype != dtype for weight in weights)
    biased = any(part.base.bias is not None for part in parts)
    if copied or (on_cpu and (len(parts) > 1 or folded is not None or (merges and adapted))):
        pairs = [(derive(base_weight), derive(base_bias) if biased else None)]
    else:
        pairs = [(part.base.weight, part.base.bias) for part in parts]
    multiply = join_projections(pairs)
    if adapted and not merges:
        multiply = with_adapters(multiply, *join_factors(derive, parts, dtype))
    if norm is None or folded is not None:
        return multiply if half is None else lambda x: multiply(x.to(dtype))
    return lambda x: multiply((x * norm.weight).to(dtype))


def make_called_projection(norm: Any | None, modules: Sequence[Any]) -> Projection:
    """Make a function that calls each module on the same tokens and concatenates the outputs."""

    def call(x: Tensor) -> Tensor:
        x = x if norm is None else x * norm.weight
        outs = [module(x) for module in modules]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -1)

    return call


def join_projections(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Projection:
    """Make a function that multiplies its tokens by each weight of `pairs`, and concatenates the
    outputs. Each pair is a weight and its bias, or a weight and None."""
    if len(pairs) == 1:
        weight, bias = pairs[0]
        return lambda x: nn_functional.linear(x, weight, bias)
    return lambda x: torch.cat([nn_functional.linear(x, *pair) for pair in pairs], -1)


def with_adapters(base: Projection, down: Tensor, up: Tensor) -> Projection:
    """Make a function that adds the output of adapters to the output of `base`. For tokens `x`, the
    function returns `base(x) + (x @ down.T) @ up`.

    Args:
      base: function from tokens [R, m, H] to [R, m, N].
      down: [ranks, H], the down factors of all adapters.
      up: [ranks, N], the scaled up factors of all adapters (`join_factors`).
    """

    def adapted(x: Tensor) -> Tensor:
        y = base(x)
        low = nn_functional.linear(x, down)
        # Autocast does not cast in-place operations, so cast `up` here; y is already in its type.
        y.view(-1, y.shape[-1]).addmm_(low.view(-1, low.shape[-1]), up.to(y.dtype))
        return y

    return adapted


def join_factors(
    derive: Derive, parts: Sequence[Part], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return two matrices made from the adapters of several modules: their concatenated down
    factors [ranks, H], and a block-diagonal matrix [ranks, N] with scaling × the up factor of each
    adapter.

    The up factors are scaled first and then rounded to `dtype`, so that each is rounded only once.
    """

    def down() -> Tensor:
        none = parts[0].base.weight[:0].to(dtype)  # [0, H], for parts without adapters
        factors = [part.factors.down.weight for part in parts if part.factors]
        return torch.cat([none, *(factor.to(dtype) for factor in factors)])

    def up() -> Tensor:
        ranks = sum(len(part.factors.down.weight) for part in parts if part.factors)
        width = sum(len(part.base.weight) for part in parts)
        out = parts[0].base.weight.new_zeros(ranks, width, dtype=dtype)
        row = column = 0
        for part in parts:
            if part.factors is not None:
                block = part.factors.scaling * part.factors.up.weight.T
                out[row : row + len(block), column : column + block.shape[1]] = block
                row += len(block)
            column += len(part.base.weight)
        return out

    return derive(down), derive(up)
