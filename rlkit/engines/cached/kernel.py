"""The decoding step of a small model on a CPU as one call of compiled C (_step.c), where there is a
compiler.

What such a step costs is hardly its arithmetic: it is 300 calls of torch. The C file is compiled
once, by the machine's own compiler in about a second (rlkit.models.compiled).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nn_functional

from rlkit.engines.cached.cache import Pages
from rlkit.engines.cached.forward import Trunk
from rlkit.engines.cached.products import Part, plain_part, weight_of
from rlkit.engines.cached.sampler import Sampler
from rlkit.errors import EngineError
from rlkit.models.compiled import library, load_or_reason
from rlkit.models.fused import norms_of
from rlkit.models.head import Head
from rlkit.models.shape import model_shape

SOURCE = Path(__file__).with_name("_step.c")
TILE = 32  # columns of a packed matrix that lie together, as in the C file
# of a model for which `auto` takes the kernel: the weights of larger ones are too much memory to
# have twice
MOST_WEIGHTS = 1 << 28
LAYERS = ("project", "bias", "scale", "out", "gates", "down")
STATE = ("last", "position", "count", "limit", "seed", "tokens", "logprobs", "draws", "ended")


class StepArguments(ctypes.Structure):
    """The structure `Step` of the C file, field by field."""

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
        *(
            (name, ctypes.c_void_p)
            for name in (
                "embedding",
                "cosine",
                "sine",
                "head",
                *LAYERS,
                "keys",
                "values",
                "table",
                "eos",
                *STATE,
            )
        ),
    )


class Kernel:
    """Decoding steps of a trunk and its head over the state of a cache and a sampler, float32 on a
    CPU.

    Args:
      trunk, head: those of the engine, of which `unfit` says nothing.
    Raises: EngineError where the C file cannot be compiled.
    """

    def __init__(self, trunk: Trunk, head: Head):
        self.run = compiled()
        self.trunk = trunk
        config = trunk.trunk.config
        layers = [layer.module for layer in trunk.layers]
        self.step = StepArguments(
            layers=len(layers),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            size=layers[0].self_attn.head_dim,
            vocabulary=len(head.weight),
            eps=trunk.trunk.norm.variance_epsilon,
            embedding=trunk.trunk.embed_tokens.weight.data_ptr(),
        )
        final = trunk.derive(partial(tiled, trunk.trunk.norm, head.module))
        made = [_layer(trunk, layer.module, layer.scale) for layer in trunk.layers]
        self.step.head = final.data_ptr()
        self.arrays = {
            name: (ctypes.c_void_p * len(layers))() for name in (*LAYERS, "keys", "values")
        }
        for name, array in self.arrays.items():
            setattr(self.step, name, ctypes.addressof(array))
        for name in LAYERS:
            self.arrays[name][:] = [
                None if (tensor := own[name]) is None else tensor.data_ptr() for own in made
            ]
        self.threads: int | None = None  # None: torch's
        self.angles = torch.empty(2, 0, 0)  # cosines and sines [2, positions, D / 2]

    def serves(self, sampler: Sampler) -> bool:
        """Whether the kernel draws as this sampler does: not from a cut distribution, nor under a
        thinking budget or autocast."""
        return (
            sampler.budget is None
            and sampler.cut == {"top_p": 1.0, "top_k": 0}
            and not torch.is_autocast_enabled("cpu")
        )

    def __call__(self, pages: Pages, sampler: Sampler, slots: int, capacity: int) -> None:
        """Draw one more token in those of the first slots that draw, as `Scheduler.decode`. No slot
        sees more than `capacity` positions. Raises: MemoryError."""
        step = self.step
        if self.angles.shape[1] < capacity:
            self.angles = _angles(self.trunk.trunk, 2 * capacity)
        step.cosine = self.angles[0].data_ptr()
        step.sine = self.angles[1].data_ptr()
        for name, store in (("keys", pages.keys), ("values", pages.values)):
            self.arrays[name][:] = [tensor.data_ptr() for tensor in store]
        for name in (*STATE, "eos"):
            setattr(step, name, getattr(sampler, name).data_ptr())
        step.table = pages.table.data_ptr()
        step.page = pages.page
        step.pages = pages.pages + 1
        step.entries = pages.columns
        step.capacity = capacity
        step.columns = sampler.tokens.shape[1]
        step.ends = len(sampler.eos)
        step.slots = slots
        step.threads = self.threads or torch.get_num_threads()
        step.temperature = float(sampler.temperature)
        if self.run(ctypes.byref(step)):
            raise MemoryError(f"no memory for a decoding step of {slots} slots")


def kernel_of(kind: str, trunk: Trunk | None, head: Head) -> tuple[Kernel | None, str]:
    """The kernel that `generation.kernel` asks for; or None, which decodes by calls of torch, and
    why "auto" is that.

    Raises: EngineError where "fused" is impossible, and where the load of the moment would decide
    what "auto" is.
    """
    if kind == "eager":
        return None, ""
    reason = unfit(trunk, head)
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


def unfit(trunk: Trunk | None, head: Head) -> str:
    """Why the kernel cannot decode this model; empty where it can."""
    if trunk is None:
        return (
            f"a model of type {model_shape(head.causal.config).family!r} has a forward of its own"
        )
    causal = head.causal
    config = trunk.trunk.config
    first = trunk.layers[0].module
    attns = [layer.module.self_attn for layer in trunk.layers]
    mlps = [layer.module.mlp for layer in trunk.layers]
    linear = [
        plain_part(module)
        for parent in (*attns, *mlps)
        for name, module in parent.named_children()
        if name.endswith("_proj")
    ]
    outputs = [
        head.module,
        *(a.o_proj for a in attns),
        *(module for m in mlps for module in (m.gate_proj, m.up_proj, m.down_proj)),
    ]
    unbiased = [part.base for part in map(plain_part, outputs) if part is not None]
    rotary = trunk.trunk.rotary_emb
    reasons = {
        "it needs float32 weights on a CPU": any(
            p.dtype != torch.float32 or p.device.type != "cpu" for p in causal.parameters()
        ),
        "hooks hang on the model": any(
            m._forward_hooks or m._forward_pre_hooks for m in causal.modules()
        ),
        "a projection does more than multiply and add a plain adapter": None in linear
        or type(head.module) is not nn.Linear,
        "the head does more than multiply": head.logits is not head.module,
        "an output has a bias": any(linear.bias is not None for linear in unbiased),
        "the gate is not silu": config.hidden_act not in ("silu", "swish"),
        "norms differ in eps": len({m.variance_epsilon for m in norms_of(trunk.trunk)}) > 1,
        "the angles depend on the length": rotary.rope_type in ("dynamic", "longrope"),
        "head size and hidden size must be multiples of 32, the intermediate size of 16": (
            first.self_attn.head_dim % 32 != 0
            or config.hidden_size % TILE != 0
            or config.intermediate_size % 16 != 0
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def part_of(module: Any) -> Part:
    """The parts of a projection that `unfit` has let pass."""
    part = plain_part(module)
    assert part is not None, f"unfit lets {type(module).__name__} pass"
    return part


def tiled(norm: Any | None, *modules: Any) -> Tensor:
    """The weights of modules with their adapters, side by side, times that of the norm before them:
    [columns / TILE, rows, TILE], filled up with zeros."""
    weight = torch.cat([weight_of(part_of(module), torch.float32) for module in modules])
    weight = weight if norm is None else weight * norm.weight
    return (
        nn_functional.pad(weight, (0, 0, 0, -len(weight) % TILE))
        .view(-1, TILE, weight.shape[1])
        .transpose(1, 2)
        .contiguous()
    )


def _layer(trunk: Trunk, layer: Any, scale: Tensor | None) -> dict[str, Tensor | None]:
    """What the kernel reads of a layer, made again whenever the weights have changed."""
    attn = layer.self_attn
    mlp = layer.mlp
    inputs = attn.q_proj, attn.k_proj, attn.v_proj
    biases = [part_of(module).base.bias for module in inputs]

    def bias() -> Tensor:
        together = torch.cat([*biases])
        return nn_functional.pad(together, (0, -len(together) % TILE))

    makes: dict[str, Callable[[], Tensor]] = {
        "project": partial(tiled, layer.input_layernorm, *inputs),
        "out": partial(tiled, None, attn.o_proj),
        "gates": partial(tiled, layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj),
        "down": partial(tiled, None, mlp.down_proj),
    }
    made: dict[str, Tensor | None] = {name: trunk.derive(make) for name, make in makes.items()}
    return made | {"scale": scale, "bias": None if biases[0] is None else trunk.derive(bias)}


def _angles(trunk: Any, positions: int) -> Tensor:
    """Cosines and sines of the first positions, [2, positions, D / 2]: the second half of D repeats
    the first."""
    both = torch.stack(trunk.rotary_emb(torch.zeros(1), torch.arange(positions)[None]))[:, 0]
    return both[..., : both.shape[-1] // 2].contiguous()


@cache
def compiled() -> Any:
    """The function of the C file. Raises: NoKernel, Undecided (rlkit.models.compiled)."""
    run = library(SOURCE, "step").step
    run.argtypes = (ctypes.POINTER(StepArguments),)
    run.restype = ctypes.c_int
    return run
