"""Run the decoding step of a small model on a CPU as one call of compiled C (_step.c). This needs a
C compiler.

In torch, a decoding step of a small model costs 300 calls and hardly any arithmetic. The machine's
own compiler compiles the C file once, in about a second (rlkit.models.compiled).
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.engines.cached.cache import Pages
from rlkit.engines.cached.forward import Trunk
from rlkit.engines.cached.products import Part, find_plain_part, join_factors, merge_weight
from rlkit.engines.cached.sampler import Sampler
from rlkit.errors import EngineError
from rlkit.models.compiled import load_library, load_or_reason
from rlkit.models.fused import has_hooks, list_norms
from rlkit.models.head import Head
from rlkit.models.shape import read_model_shape
from rlkit.types import SamplingParams

SOURCE = Path(__file__).with_name("_step.c")
HALF = ("-DHALF",)  # the compiler flag that selects bfloat16
TILE = 32  # number of neighbouring columns stored together in a packed matrix, as in the C file
# `auto` uses the kernel for models with at most this many weights, because the kernel keeps a
# second copy of the weights.
MOST_WEIGHTS = 1 << 28
PRODUCTS = ("project", "out", "gates", "down")
LAYERS = (*PRODUCTS, "bias", "scale", "before", "between")
STATE = ("last", "position", "count", "limit", "seed", "tokens", "logprobs", "draws", "ended")


class StepArguments(ctypes.Structure):
    """Mirror the structure `Step` of the C file, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "layers",
                "hidden",
                "inner",
                "heads",
                "key_heads",
                "size",
                "vocabulary",
                "capacity",
                "page",
                "pages",
                "entries",
            )
        ),
        *((name, ctypes.c_int64) for name in ("columns", "ends", "slots", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "temperature")),
        ("ranks", ctypes.c_int64 * len(PRODUCTS)),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "embedding",
                "cosine",
                "sine",
                "head",
                "norm",
                *LAYERS,
                "low",
                "high",
                "keys",
                "values",
                "table",
                "eos",
                *STATE,
            )
        ),
    )


class Kernel:
    """Run the decoding steps of a trunk and its head on a CPU. Each step reads and writes the state
    of a cache and a sampler.

    In float32, the weights of norms and adapters are multiplied into the matrices. In bfloat16
    these weights stay separate, because rounding a merged matrix would change the matrix more than
    the first updates of an adapter do.

    Args:
      trunk, head: the engine's trunk and head. `explain_misfit` must return "" for them.
    Raises: EngineError if the C file cannot be compiled.
    """

    def __init__(self, trunk: Trunk, head: Head):
        self.trunk = trunk
        config = trunk.trunk.config
        layers = [layer.module for layer in trunk.layers]
        embedding = trunk.trunk.embed_tokens.weight
        half = embedding.dtype == torch.bfloat16
        self.run = compile_kernel(half)
        self.step = StepArguments(
            layers=len(layers),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            size=layers[0].self_attn.head_dim,
            vocabulary=len(head.weight),
            eps=trunk.trunk.norm.variance_epsilon,
            embedding=embedding.data_ptr(),
        )
        group = Group(trunk.trunk.norm, (head.module,))
        self.step.head = trunk.derive(partial(join_weights, group, half)).data_ptr()
        self.step.norm = find_norm_address(trunk, group.norm, half)
        self.arrays = {
            name: (ctypes.c_void_p * len(layers))() for name in (*LAYERS, "keys", "values")
        }
        factors = len(PRODUCTS) * len(layers)
        self.arrays |= {name: (ctypes.c_void_p * factors)() for name in ("low", "high")}
        for name, array in self.arrays.items():
            setattr(self.step, name, ctypes.addressof(array))
        made = [_layer(trunk, layer.module, layer.scale, half) for layer in trunk.layers]
        for name in LAYERS:
            self.arrays[name][:] = [own[name] for own in made]
        if half:
            self._add_adapters(layers)
        self.threads: int | None = None  # None: as many as torch uses
        # returns the sampler whose addresses are in `step`, or None
        self.reads: Callable[[], Sampler | None] = lambda: None
        self.made = 0  # `Pages.made` when the addresses of the pages were written to `step`
        self.angles = torch.empty(2, 0, 0)  # cosines and sines [2, positions, D / 2]

    def _add_adapters(self, layers: list[Any]) -> None:
        groups = [group_products(layer) for layer in layers]
        for i, name in enumerate(PRODUCTS):
            most = max(own[name].rank for own in groups)
            rank = most + -most % TILE  # rounded up to whole tiles
            self.step.ranks[i] = rank
            for layer, own in enumerate(groups if rank else ()):
                place = len(PRODUCTS) * layer + i
                for end in ("low", "high"):
                    made = self.trunk.derive(partial(join_adapters, own[name], rank, end))
                    self.arrays[end][place] = made.data_ptr()

    def _enter(self, pages: Pages, sampler: Sampler) -> None:
        """Write the addresses of the pages and of the sampler's state into the arguments of the C
        function. The addresses stay valid from step to step."""
        step = self.step
        for name, store in (("keys", pages.keys), ("values", pages.values)):
            self.arrays[name][:] = [tensor.data_ptr() for tensor in store]
        for name in (*STATE, "eos"):
            setattr(step, name, getattr(sampler, name).data_ptr())
        step.table = pages.table.data_ptr()
        step.page = pages.page
        step.pages = pages.pages + 1
        step.entries = pages.columns
        step.columns = sampler.tokens.shape[1]
        step.ends = len(sampler.eos)
        self.reads = weakref.ref(sampler)
        self.made = pages.made

    def __call__(self, pages: Pages, sampler: Sampler, slots: int, capacity: int) -> None:
        """Sample one more token in each of the first `slots` slots, except in slots whose
        completion has ended. The step does the same as `Scheduler.decode`.

        Args:
          capacity: the most positions that the new token of any slot attends to.
        Raises: MemoryError if no memory is left for the step.
        """
        step = self.step
        if self.angles.shape[1] < capacity:
            self.angles = _angles(self.trunk.trunk, 2 * capacity)
        step.cosine = self.angles[0].data_ptr()
        step.sine = self.angles[1].data_ptr()
        if self.reads() is not sampler or self.made != pages.made:
            self._enter(pages, sampler)
        step.capacity = capacity
        step.slots = slots
        step.threads = self.threads or torch.get_num_threads()
        step.temperature = float(sampler.temperature)
        if self.run(ctypes.byref(step)):
            raise MemoryError(f"no memory for a decoding step of {slots} slots")


def choose_kernel(kind: str, trunk: Trunk | None, head: Head) -> tuple[Kernel | None, str]:
    """Choose how to decode for a value of `generation.kernel`.

    Returns: a pair. The first value is the kernel, or None to decode with calls of torch. The
    second value is the reason why "auto" does not use the kernel, or "" in all other cases.
    Raises: EngineError if "fused" is impossible. EngineError also if the machine is too busy to
    compile now, because the choice of "auto" must not depend on the machine's load.
    """
    if kind == "eager":
        return None, ""
    reason = explain_misfit(trunk, head)
    if (
        kind == "auto"
        and not reason
        and sum(p.numel() for p in head.causal.parameters()) > MOST_WEIGHTS
    ):
        return None, f"it has more than {MOST_WEIGHTS >> 20} million weights"
    if reason or trunk is None:
        if kind == "fused":
            raise EngineError(f"generation.kernel=fused: {reason}; use auto or eager")
        return None, reason
    return load_or_reason(kind, "generation.kernel", partial(Kernel, trunk, head))


def explain_call(params: SamplingParams) -> str:
    """Return the reason why the kernel cannot sample with these parameters now. Return "" if the
    kernel can."""
    if torch.is_autocast_enabled("cpu"):
        return "it computes without autocast"
    plain = (params.top_p, params.top_k, params.max_thinking_tokens) == (1.0, 0, None)
    return "" if plain else "it has no top-p, no top-k and no thinking budget"


class Group(NamedTuple):
    """Hold projections with the same input, and the norm applied to this input."""

    norm: Any | None
    modules: tuple[Any, ...]

    @property
    def parts(self) -> list[Part]:
        """Return the weights of the modules. `explain_misfit` has already refused any module that
        does more than multiply."""
        return [part for part in map(find_plain_part, self.modules) if part is not None]

    @property
    def rank(self) -> int:
        """Return the sum of the ranks of all adapters in the group."""
        return sum(len(part.factors.down.weight) for part in self.parts if part.factors)


def group_products(layer: Any) -> dict[str, Group]:
    """Return the matrix products of a layer, by their names in the C file."""
    attn = layer.self_attn
    mlp = layer.mlp
    return {
        "project": Group(layer.input_layernorm, (attn.q_proj, attn.k_proj, attn.v_proj)),
        "out": Group(None, (attn.o_proj,)),
        "gates": Group(layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        "down": Group(None, (mlp.down_proj,)),
    }


def explain_misfit(trunk: Trunk | None, head: Head) -> str:
    """Return the reason why the kernel cannot decode this model. Return "" if the kernel can."""
    if trunk is None:
        return (
            f"a model of type {read_model_shape(head.causal.config).family!r} has a forward"
            " of its own"
        )
    causal = head.causal
    config = trunk.trunk.config
    first = trunk.layers[0].module
    embedding = trunk.trunk.embed_tokens.weight
    groups = [
        Group(None, (head.module,)),
        *(group for layer in trunk.layers for group in group_products(layer.module).values()),
    ]
    bases = [part.base for group in groups for part in group.parts]
    inputs = {id(m) for layer in trunk.layers for m in _inputs(layer.module)}
    weights = [m.weight for m in (*bases, *list_norms(trunk.trunk))]
    rotary = trunk.trunk.rotary_emb
    reasons = {
        "it needs float32 or bfloat16 weights on a CPU": (
            embedding.dtype not in (torch.float32, torch.bfloat16)
            or any(w.dtype != embedding.dtype or w.device.type != "cpu" for w in weights)
        ),
        "the model has hooks": has_hooks(*causal.modules()),
        "a projection does more than multiply and add a plain adapter": (
            any(len(group.parts) < len(group.modules) for group in groups)
            or type(head.module) is not nn.Linear
        ),
        "the head does more than multiply": head.logits is not head.module,
        "an output has a bias": any(
            base.bias is not None for base in bases if id(base) not in inputs
        ),
        "the gate is not silu": config.hidden_act not in ("silu", "swish"),
        "norms differ in eps": len({m.variance_epsilon for m in list_norms(trunk.trunk)}) > 1,
        "the rotary angles depend on the length of the context": rotary.rope_type
        in ("dynamic", "longrope"),
        "head size and hidden size must be multiples of 32, the intermediate size of 16": (
            first.self_attn.head_dim % 32 != 0
            or config.hidden_size % TILE != 0
            or config.intermediate_size % 16 != 0
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _inputs(layer: Any) -> list[nn.Linear]:
    """Return the projections of queries, keys and values. Only these may have a bias."""
    return [part.base for part in group_products(layer)["project"].parts]


def tile_matrix(weight: Tensor) -> Tensor:
    """Return a view of a matrix [N, H] with the axes of the layout that the C file reads: tiles of
    TILE rows, where zeros fill up the last tile. `Trunk.derive` makes the view contiguous; copying
    it without a buffer in between takes a third of the time.

    Returns: [N / TILE, H, TILE], or in bfloat16 [N / TILE, H / 2, TILE, 2].
    """
    missing = -len(weight) % TILE
    rows = nn_functional.pad(weight, (0, 0, 0, missing)) if missing else weight.contiguous()
    if weight.dtype == torch.bfloat16:
        return rows.view(-1, TILE, weight.shape[1] // 2, 2).transpose(1, 2)
    return rows.view(-1, TILE, weight.shape[1]).transpose(1, 2)


def join_weights(group: Group, half: bool) -> Tensor:
    """Concatenate the weights of a group, and return them in the layout of `tile_matrix`. In
    float32, the adapters are added to the weights, and the weights are multiplied by the norm's
    weight."""
    if half:
        return tile_matrix(torch.cat([part.base.weight for part in group.parts]))
    weights = [merge_weight(part, torch.float32) for part in group.parts]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return tile_matrix(weight if group.norm is None else weight * group.norm.weight)


def join_adapters(group: Group, rank: int, end: str) -> Tensor:
    """Join one factor of each adapter of a group into one matrix, in the layout of `tile_matrix`.

    Args:
      rank: number of rows (of down factors) or columns (of up factors) after padding with zeros.
      end: "low" or "high". "low" joins the down factors into a matrix with `rank` rows. "high"
        multiplies each up factor by the scaling of its adapter, and joins the products into a
        matrix with `rank` columns.
    """
    down, up = join_factors(lambda make: make(), group.parts, torch.bfloat16)
    factor = down if end == "low" else up
    padded = nn_functional.pad(factor, (0, 0, 0, rank - len(factor)))
    return tile_matrix(padded if end == "low" else padded.T)


def find_norm_address(trunk: Trunk, norm: Any, half: bool) -> int | None:
    """Return the address of a float32 copy of a norm's weight, for models in bfloat16. Return None
    for models in float32: the matrix after the norm is already multiplied by the norm's weight."""
    return trunk.derive(lambda: norm.weight.float().clone()).data_ptr() if half else None


def _layer(trunk: Trunk, layer: Any, scale: Tensor | None, half: bool) -> dict[str, int | None]:
    """Return the addresses of a layer's tensors for the kernel, by their names in the C file.
    `Trunk.refresh` computes the tensors again, in place, whenever the weights have changed."""
    groups = group_products(layer)
    found: dict[str, int | None] = {
        name: trunk.derive(partial(join_weights, group, half)).data_ptr()
        for name, group in groups.items()
    }
    biases = [base.bias for base in _inputs(layer)]

    def bias() -> Tensor:
        together = torch.cat([*biases]).float()
        return nn_functional.pad(together, (0, -len(together) % TILE))

    def norms() -> Tensor:
        assert scale is not None
        return scale.float().clone()

    return found | {
        "bias": None if biases[0] is None else trunk.derive(bias).data_ptr(),
        "scale": None if scale is None else trunk.derive(norms).data_ptr(),
        "before": find_norm_address(trunk, groups["project"].norm, half),
        "between": find_norm_address(trunk, groups["gates"].norm, half),
    }


def _angles(trunk: Any, positions: int) -> Tensor:
    """Return the cosines and sines of the first `positions` positions, [2, positions, D / 2]. Only
    half of D is kept, because the second half repeats the first half."""
    both = torch.stack(trunk.rotary_emb(torch.zeros(1), torch.arange(positions)[None]))[:, 0]
    return both[..., : both.shape[-1] // 2].contiguous()


@cache
def compile_kernel(half: bool = False) -> Any:
    """Compile the C file, for bfloat16 or for float32, and return its function.

    Raises: NoKernel, Undecided (rlkit.models.compiled).
    """
    run = load_library(SOURCE, "step", HALF if half else ()).step
    run.argtypes = (ctypes.POINTER(StepArguments),)
    run.restype = ctypes.c_int
    return run
