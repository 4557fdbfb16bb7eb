"""Compute the seconds and bytes of an RL step from sizes alone. Nothing is loaded, and no card is
needed.

A pass takes the time of its arithmetic or of its memory traffic, whichever is longer (Williams,
Waterman and Patterson 2009, "Roofline"). A decoding step is bound by memory: it reads all weights
once, and the keys and values of every row. Three other costs are added to it: the noise of the
draw, the adapters, and the starts of kernels. Everything is a pure function of a model's `Shape`, a
step's `Load` and a `Card`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlkit.models.log_probs import CHUNK_LOGITS
from rlkit.models.shape import read_model_shape
from rlkit.training.activations import MOST_COUNTED

# In decoding: the most bytes moved by the sampling noise, per row and vocabulary entry. Two-level
# Gumbel-max needs 2 √V numbers per row.
NOISE_BYTES = 8
# The same for the logits: they are written in bfloat16, then read, normalised and searched in
# float32.
LOGIT_BYTES = 16
# Bytes moved by a decoding step on CUDA for each byte of keys and values it needs. The step gathers
# pages: it reads, writes and reads them again, over a number of columns rounded up by a quarter on
# average. Each row is read as far as the longest row in its quarter of the slots, assumed to be a
# fifth further. A CPU reads each row's own pages in place.
MOVED = 4.5
# kernels per layer, and kernels per step for embedding, head, draw and bookkeeping
LAYER_KERNELS = 24
STEP_KERNELS = 40
ADAPTER_KERNELS = 8  # per layer: down and up for each of its four groups of projections
ADAPTER_BYTES = 2  # bytes moved per number of an adapter; the engine keeps it in bfloat16
CACHE = 0.35  # share of the memory left by the weights, used by the engine for keys and values
# CUDA graphs captured in a whole run, and seconds for each capture
GRAPHS = 48
CAPTURE_S = 0.1
# In training: bytes per entry of a chunk of logits, including everything computed from the entry.
LOGITS_HELD = 6 * 4
# Bytes moved per trained number by an optimizer step. The step reads weight, gradient and two
# moments, and writes all of these except the gradient.
ADAM_BYTES = 28
RESERVED = 1.5e9  # bytes used by CUDA itself, for kernels and workspaces


class Card(NamedTuple):
    """A device. Its rates are reached by real programs; they are not those of the data sheet."""

    name: str
    memory: float  # bytes of memory
    bandwidth: float  # bytes per second
    # 2 × multiply-adds per second in training and prefill, in bfloat16 or, on a CPU, in float32
    flops: float
    decode_flops: float  # the same with one token per row
    kernel_s: float  # shortest seconds of a kernel inside a CUDA graph; on a CPU, of a call
    entry_s: float  # seconds of a draw, per row and vocabulary entry
    source: str
    itemsize: int = 2  # bytes of a number in the arithmetic
    # Seconds of elementwise work per decoded token, layer and unit of width. On a CPU this work is
    # added to the products; a GPU hides it.
    touch_s: float = 0.0
    train_touch_s: float = 0.0  # the same per token in forward and backward of an update
    train_layer_s: float = 0.0  # seconds per micro-batch and layer, for any number of tokens
    # seconds of Python per reply: template, tokenizer, environment, reward, records
    host_s: float = 1.5e-3


def make_card(
    name: str, gigabytes: float, terabytes: float, teraflops: float, reached: float, source: str
) -> Card:
    """Make a card from its data sheet.

    Args:
      gigabytes: memory in GB.
      terabytes: bandwidth in TB/s.
      teraflops: dense bfloat16 arithmetic in TFLOP/s.
      reached: share of this arithmetic reached in training.
    Streaming kernels reach about 0.9 of the bandwidth (4.3 of 4.8 TB/s on an H200).
    """
    bandwidth = 0.9 * terabytes * 1e12
    flops = reached * teraflops * 1e12
    return Card(
        name,
        gigabytes * 1e9,
        bandwidth,
        flops,
        flops,
        1.5e-6,
        (NOISE_BYTES + LOGIT_BYTES) / bandwidth,
        source,
    )


CARDS = {
    "h200": make_card("NVIDIA H200 SXM", 141, 4.8, 989, 0.4, "data sheet, 2024"),
    "h100": make_card("NVIDIA H100 SXM", 80, 3.35, 989, 0.4, "data sheet, 2023"),
    "a100": make_card("NVIDIA A100 SXM 80 GB", 80, 2.039, 312, 0.5, "data sheet, 2021"),
    "4090": make_card(
        "GeForce RTX 4090",
        24,
        1.008,
        165.2,
        0.6,
        "NVIDIA Ada architecture, appendix A, with float32 sums",
    ),
    "l4": make_card(
        "NVIDIA L4",
        24,
        0.3,
        121,
        0.4,
        "data sheet, 2023; the 242 TFLOP/s there are of sparse matrices",
    ),
    # Rates of one thread. experiments/benchmarks/roofline.py measures these numbers on any machine.
    "cpu": Card(
        "one thread of an AMD EPYC",
        25e9,
        3.2e10,
        8.6e10,
        9.5e10,
        1.1e-5,
        6.1e-9,
        "measured 2026-11-22",
        4,
        6.8e-8,
        4.7e-8,
        1.8e-3,
    ),
}


class Shape(NamedTuple):
    """The sizes of a decoder-only transformer with gated MLPs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # intermediate size of the MLP, or of one expert if there are several
    vocab: int
    tied: bool  # True if embedding and head are one matrix
    experts: int = 1
    active: int = 1  # experts used for one token
    qk_norm: bool = True

    @property
    def parameters(self) -> int:
        """Return the number of all parameters of the model, without biases."""
        norms = (
            2 * self.hidden
            + 2 * self.head_dim * self.qk_norm
            + self.experts * self.hidden * (self.experts > 1)
        )  # the last term is the router
        others = 3 * self.hidden * self.mlp * (self.experts - self.active) + norms
        return (
            self.used
            + self.layers * others
            + self.hidden
            + self.vocab * self.hidden * (2 - self.tied)
        )

    @property
    def used(self) -> int:
        """Return the number of the trunk's parameters used for one token."""
        return (
            self.layers
            * self.hidden
            * (2 * self.head_dim * (self.heads + self.kv_heads) + 3 * self.mlp * self.active)
        )

    def adapters(self, rank: int) -> int:
        """Return the number of parameters in adapters of this rank on all projections."""
        ends = 4 * self.hidden + 2 * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * rank * (ends + 3 * (self.hidden + self.mlp) * self.experts)

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Return the bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


# Copied from each model's config.json on the hub, so these models need no network.
KNOWN = {
    "Qwen/Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151_936, True),
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151_936, True),
    "Qwen/Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151_936, True),
    "Qwen/Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12_288, 151_936, False),
    "Qwen/Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 128, 768, 151_936, False, experts=128, active=8),
}


def read_shape(config: Any) -> Shape:
    """Read the sizes from a Hugging Face config of a Llama-like model."""
    own = read_model_shape(config)
    mlp = own.expert_width if own.experts > 1 else None
    return Shape(
        config.num_hidden_layers,
        config.hidden_size,
        own.heads,
        own.kv_heads,
        own.head_dim,
        mlp or config.intermediate_size,
        config.vocab_size,
        bool(config.tie_word_embeddings),
        own.experts,
        own.active,
        own.family.startswith("qwen3"),
    )


class Load(NamedTuple):
    """The load of one RL step. Lengths are in tokens."""

    prompts: int
    group: int
    prompt: int  # mean length of the first prompt
    reply: int  # mean length of a reply
    longest: int  # limit of a reply, generation.max_new_tokens
    turns: int = 1  # replies per episode
    rank: int = 0  # rank of the adapters; 0: all weights are trained
    checkpointing: bool = False
    micro_batch: int = 16384
    max_rows: int = 256
    max_cached: int | None = None  # tokens in the cache; None: a share of the memory
    scoring: int = 1  # number of scoring passes without gradient: by the reference, the old policy
    copies: int = 0  # further copies of all weights, such as a reference beside trained weights
    updates: int = 1  # number of optimizer steps
    epochs: int = 1
    steps: int = 100  # steps of the run; the cost of one-time work is divided by this number


class Forecast(NamedTuple):
    """The forecast of a step: bytes and seconds by name, the number of replies decoded at once
    (slots), decoded tokens per second, and their share of the bandwidth limit."""

    memory: Mapping[str, float]
    fits: bool
    slots: int
    seconds: Mapping[str, float]
    tokens_per_s: float
    share: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def held(self) -> float:
        return sum(self.memory.values())


def decode_limit(card: Card, shape: Shape, rows: float, context: float) -> float:
    """Return the most tokens per second that the memory's bandwidth allows. This limit is
    `rows · bandwidth / (weights + rows · context · cache)`, with `cache` as the bytes of a token's
    keys and values. Nothing but weights, keys and values is read."""
    return (
        rows
        * card.bandwidth
        / (shape.parameters * card.itemsize + rows * context * shape.kv_bytes(card.itemsize))
    )


def decode_step(
    card: Card, shape: Shape, rows: float, context: float, rank: int = 0
) -> dict[str, float]:
    """Return the seconds of one decoding step by part.

    Args:
      rows: number of rows decoded at once.
      context: their mean context in tokens.
      rank: rank of the adapters; 0 for none.
    """
    read = shape.parameters * card.itemsize * min(1.0, rows * shape.active / shape.experts)
    flops = 2 * rows * (shape.used + shape.hidden * shape.vocab)
    small = shape.adapters(rank)
    moved = MOVED if card.itemsize == 2 else 1.0
    return {
        "weights": (
            max(read / card.bandwidth, flops / card.decode_flops)
            + rows * shape.layers * shape.hidden * card.touch_s
        ),
        "keys and values": (
            rows * context * shape.kv_bytes(card.itemsize) * moved / card.bandwidth
        ),
        "noise": rows * shape.vocab * card.entry_s,
        "adapters": (
            bool(rank) * shape.layers * ADAPTER_KERNELS * card.kernel_s
            + small * max(ADAPTER_BYTES / card.bandwidth, 2 * rows / card.decode_flops)
        ),
        "launches": (shape.layers * LAYER_KERNELS + STEP_KERNELS) * card.kernel_s,
    }


def compute_memory(card: Card, shape: Shape, load: Load) -> tuple[dict[str, float], int]:
    """Return the bytes of a step by name, and the number of replies decoded at once.

    The engine's cache is `CACHE` of the memory left by the weights. It holds at most
    `load.max_cached` tokens and at most `max_rows` longest contexts. On a CPU it takes only as much
    memory as the replies need.

    For the backward pass, the trainer keeps norms, rotation, attention, gate, up and residuals of
    every layer. With checkpointing it keeps those of one layer, and the states between layers.
    """
    base = shape.parameters
    size = card.itemsize
    kv = shape.kv_bytes(card.itemsize)
    trained = shape.adapters(load.rank) if load.rank else base
    held: dict[str, float] = {
        "weights": base * size + 4 * trained if load.rank else 4 * base,
        "copy in bfloat16": 0 if load.rank or size == 4 else 2 * base,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "reference": 4 * base * load.copies,
        "CUDA": RESERVED * (size == 2),
    }
    beside = max(0.0, card.memory - held["weights"])
    most = load.max_rows * (load.prompt + load.turns * load.longest)
    cached = min(load.max_cached or CACHE * beside / kv, most)
    context = load.prompt + load.turns * load.reply
    slots = int(min(load.prompts * load.group, load.max_rows, cached // context))
    if size == 4:
        cached = slots * context
    queries = shape.head_dim * shape.heads
    keys = shape.head_dim * shape.kv_heads
    kept = (
        6 * shape.hidden + 5 * queries + 6 * keys + 4 * shape.mlp * shape.active
    ) * size + 8 * shape.hidden  # the last term: norms in float32
    layers = (
        shape.layers * shape.hidden * size + kept if load.checkpointing else shape.layers * kept
    )
    logits = LOGITS_HELD * min(CHUNK_LOGITS, load.micro_batch * shape.vocab)
    return (
        held
        | {
            "cache of keys and values": cached * kv,
            "activations": load.micro_batch * layers,
            "logits": logits,
        },
        slots,
    )


def forecast(card: Card, shape: Shape, load: Load) -> Forecast:
    """Forecast the bytes and seconds of one RL step.

    Replies decode side by side until the longest reply ends, and it is assumed to reach the limit.
    Each prompt is read once for its group, in decoding and in training. An update takes a forward
    pass, and twice its time for the gradients. Frozen weights need no gradient of their own, and
    checkpointing takes one more forward pass. The head is applied a second time in the backward
    pass.
    """
    memory, slots = compute_memory(card, shape, load)
    replies = load.prompts * load.group * load.turns
    tokens = replies * load.reply  # sampled tokens
    steps = max(load.turns * load.longest, tokens / max(1, slots))
    context = load.prompt + load.turns * load.reply / 2
    step = decode_step(card, shape, tokens / steps, context, load.rank)
    decode = {f"decode: {name}": steps * value for name, value in step.items()}
    decode["decode: launches"] += GRAPHS * CAPTURE_S / load.steps * (card.itemsize == 2)
    packed = load.prompts * load.prompt + tokens
    each = 2 * shape.used + 2 * shape.layers * shape.heads * shape.head_dim * context
    head = 2 * shape.hidden * shape.vocab
    trained = shape.adapters(load.rank) if load.rank else shape.parameters
    # forward, gradient of the states; gradient of the weights; forward again
    factor = 2 + (not load.rank) + load.checkpointing
    elementwise = packed * shape.layers * shape.hidden * card.train_touch_s
    calls = (
        shape.layers
        * card.train_layer_s
        * max(load.updates, packed * load.epochs / load.micro_batch)
    )
    score = packed * each + tokens * head
    update = packed * (factor * each + 6 * trained * bool(load.rank)) + tokens * head * (
        3 + (not load.rank)
    )
    moved = load.updates * trained * ADAM_BYTES
    seconds = {
        "prefill": load.prompts * load.prompt * 2 * shape.used / card.flops,
        **decode,
        "scoring": load.scoring * (score / card.flops + (elementwise + calls) / 3),
        "update": (
            load.epochs * (update / card.flops + elementwise) + calls + moved / card.bandwidth
        ),
        "other": replies * card.host_s,
    }
    rate = tokens / sum(decode.values())
    fits = slots > 0 and sum(memory.values()) <= card.memory
    return Forecast(
        memory,
        fits,
        slots,
        seconds,
        rate,
        rate / decode_limit(card, shape, tokens / steps, context),
    )


def settle_checkpointing(card: Card, shape: Shape, load: Load) -> Load:
    """Replace model.gradient_checkpointing=auto by a decision. As in a run, halve micro-batches
    down to MOST_COUNTED tokens before recomputing activations."""
    tokens = load.micro_batch
    while True:
        tried = load._replace(micro_batch=tokens, checkpointing=False)
        if forecast(card, shape, tried).fits:
            return tried
        if tokens < 2 * MOST_COUNTED:
            return load._replace(checkpointing=True)
        tokens //= 2


def propose_changes(card: Card, shape: Shape, load: Load) -> list[tuple[str, Forecast]]:
    """Propose at most three overrides, each with the forecast after it and after all earlier ones.

    Each override makes the run fit, or makes a sampled token at least 5 % cheaper. Adapters in
    place of all weights, and shorter replies, are proposed only if the run does not fit.
    """

    def cost(at: Load) -> tuple[float, float]:
        """Return the missing bytes, and the seconds per sampled token."""
        found = forecast(card, shape, at)
        missing = 0.0 if found.fits else max(1.0, found.held - card.memory)
        return missing, found.total / (at.prompts * at.group * at.turns * at.reply)

    out: list[tuple[str, Forecast]] = []
    while len(out) < 3:
        missing, seconds = cost(load)
        used = {words.partition("=")[0] for words, _ in out}
        tried = [
            (cost(other), words, other)
            for words, other in list_candidates(load, fits=not missing)
            if words.partition("=")[0] not in used
        ]
        then, words, other = min(tried, default=((missing, seconds), "", load))
        if then[0] > 0.95 * missing or (not missing and then[1] > 0.95 * seconds):
            break
        load = other
        out.append((words, forecast(card, shape, load)))
    return out


def list_candidates(load: Load, *, fits: bool) -> list[tuple[str, Load]]:
    """List the candidate changes; each changes one key."""
    rollouts = load.prompts * load.group
    toggled = not load.checkpointing
    half = max(1, load.longest // 2)
    out = [
        (
            f"model.gradient_checkpointing={str(toggled).lower()}",
            load._replace(checkpointing=toggled),
        )
    ]
    if load.max_rows < rollouts:
        out.append((f"generation.engine.max_rows={rollouts}", load._replace(max_rows=rollouts)))
    if fits:
        return [
            *out,
            (f"batch.prompts={2 * load.prompts}", load._replace(prompts=2 * load.prompts)),
        ]
    if not load.rank:
        out.append(("model.lora.rank=16", load._replace(rank=16, copies=0)))
    out += [
        (f"trainer.micro_batch_tokens={n}", load._replace(micro_batch=n))
        for n in (load.micro_batch // d for d in (2, 4, 8))
    ]
    return [
        *out,
        (
            f"generation.max_new_tokens={half}",
            load._replace(longest=half, reply=min(load.reply, half)),
        ),
    ]
