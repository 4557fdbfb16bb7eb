"""Seconds and bytes of an RL step from sizes alone: nothing is loaded, no card is needed.

A pass takes the longer of its arithmetic and the memory it moves (Williams, Waterman and Patterson 2009, "Roofline"). A decode step is
bound by memory: it reads all weights once, and the keys and values of every row. What it costs beyond that is counted beside it: the
noise of the draw, adapters, and the start of its kernels. Everything here is a pure function of a model's sizes (`Shape`), a run's
lengths (`Load`) and a `Card`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# What the decode engine does, per row and vocabulary entry, row or step.
NOISE_BYTES = 8  # moved per entry by the sampling noise
LOGIT_BYTES = 16  # per entry: logits written in bfloat16, read, normalised and searched in float32
KV_READ = 0.75  # share of the cached positions that attention reads which hold a token of that row
ROOM_USED = 0.7  # share of the reserved positions that hold a token
LAYER_KERNELS, STEP_KERNELS = 24, 40  # kernels of a layer, and of embedding, head, draw and bookkeeping
ADAPTER_KERNELS = 2  # of one adapted projection: down, up with the addition
SHAPES, CAPTURE_S = 24, 0.1  # graphs captured in a whole run, and seconds of each
# What the trainer does.
LOGITS_HELD = 6 * 4 * 2**25  # bytes of one chunk of logits, CHUNK_LOGITS entries, and of what is made of it
ADAM_BYTES = 28  # moved per trained number: weight, gradient and two moments read, all but the gradient written
RESERVED = 1.5e9  # bytes of CUDA itself, kernels and workspaces
PROJECTIONS = 7  # q, k, v, o, gate, up, down


class Card(NamedTuple):
    """A device as the model sees it; rates are those that programs reach, not those of the data sheet."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes a second
    flops: float  # bfloat16 multiply-adds × 2 a second in training and prefill; float32 on a CPU
    decode_flops: float  # the same with one token a row
    kernel_s: float  # shortest time of one kernel inside a CUDA graph; on a CPU of one call
    entry_s: float  # a draw, per row and vocabulary entry
    itemsize: int = 2  # bytes of a number in the arithmetic
    touch_s: float = 0.0  # beyond products, of a token, layer and unit of width: on a CPU elementwise work is not hidden
    train_touch_s: float = 0.0  # the same in forward and backward of an update
    train_layer_s: float = 0.0  # of a micro-batch and layer, whatever its tokens
    host_s: float = 1.5e-3  # Python of one reply: template, tokenizer, environment, reward, records
    source: str = ""


def gpu(name: str, gigabytes: float, terabytes: float, teraflops: float, reached: float, source: str) -> Card:
    """A card from its data sheet: memory, bandwidth and dense bfloat16 arithmetic, and the share of the latter that training reaches.

    Streaming kernels reach about 0.9 of the bandwidth on all of them (4.3 of 4.8 TB/s on an H200).
    """
    bandwidth = 0.9 * terabytes * 1e12
    entry = (NOISE_BYTES + LOGIT_BYTES) / bandwidth
    flops = reached * teraflops * 1e12
    return Card(name, gigabytes * 1e9, bandwidth, flops, flops, 1.5e-6, entry, source=source)


CARDS = {
    "h200": gpu("NVIDIA H200 SXM", 141, 4.8, 989, 0.4, "NVIDIA H200 data sheet (2024)"),
    "h100": gpu("NVIDIA H100 SXM", 80, 3.35, 989, 0.4, "NVIDIA H100 data sheet (2023)"),
    "a100": gpu("NVIDIA A100 SXM 80 GB", 80, 2.039, 312, 0.5, "NVIDIA A100 data sheet (2021)"),
    "4090": gpu("GeForce RTX 4090", 24, 1.008, 165.2, 0.6, "NVIDIA Ada GPU architecture, appendix A (2023), float32 sums"),
    "l4": gpu("NVIDIA L4", 24, 0.3, 121, 0.4, "NVIDIA L4 data sheet (2023); its 242 TFLOP/s are of sparse matrices"),
}


class Shape(NamedTuple):
    """Sizes of a decoder-only transformer with gated MLPs."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # of one expert, where there are several
    vocab: int
    tied: bool  # embedding and head are one matrix
    experts: int = 1
    active: int = 1  # experts that a token passes through
    qk_norm: bool = True

    @property
    def attention(self) -> int:
        """Numbers of the four projections of a layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def parameters(self) -> int:
        """All numbers of the model, biases aside."""
        router = self.experts * self.hidden if self.experts > 1 else 0
        norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        layer = self.attention + 3 * self.hidden * self.mlp * self.experts + router + norms
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def used(self) -> int:
        """Numbers of the trunk that one token is multiplied with."""
        return self.layers * (self.attention + 3 * self.hidden * self.mlp * self.active)

    def adapters(self, rank: int) -> int:
        """Numbers of adapters of this rank on all projections."""
        ends = 2 * (self.hidden + self.head_dim * self.heads) + 2 * (self.hidden + self.head_dim * self.kv_heads)
        return self.layers * rank * (ends + 3 * (self.hidden + self.mlp) * self.experts)

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


# Sizes of the models that conf/model names, as in their config.json on the hub: no network is needed for them.
KNOWN = {
    "Qwen/Qwen3-0.6B": Shape(28, 1024, 16, 8, 128, 3072, 151_936, True),
    "Qwen/Qwen3-1.7B": Shape(28, 2048, 16, 8, 128, 6144, 151_936, True),
    "Qwen/Qwen3-4B": Shape(36, 2560, 32, 8, 128, 9728, 151_936, True),
    "Qwen/Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12_288, 151_936, False),
    "Qwen/Qwen3-30B-A3B": Shape(48, 2048, 32, 4, 128, 768, 151_936, False, experts=128, active=8),
}


def shape_of(config: Any) -> Shape:
    """The sizes in a Hugging Face config of a Llama-like model."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    return Shape(
        layers=config.num_hidden_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        mlp=(getattr(config, "moe_intermediate_size", None) if experts > 1 else None) or config.intermediate_size,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        experts=experts,
        active=getattr(config, "num_experts_per_tok", None) or 1,
        qk_norm=config.model_type.startswith("qwen3"),
    )


class Load(NamedTuple):
    """What one RL step asks for; lengths in tokens."""

    prompts: int
    group: int
    prompt: int  # mean of the first prompt
    reply: int  # mean of one reply
    longest: int  # generation.max_new_tokens
    turns: int = 1  # replies of an episode
    rank: int = 0  # of the adapters; 0: all weights are trained
    checkpointing: bool = False
    micro_batch: int = 16384
    max_rows: int = 256
    max_cached: int = 1 << 20
    scoring: int = 1  # passes without gradient: reference, old policy
    copies: int = 0  # further copies of all weights: a reference that moves or stands beside trained weights
    updates: int = 1  # optimizer steps
    epochs: int = 1
    steps: int = 100  # of the run, over which what is done once is spread

    @property
    def replies(self) -> int:
        return self.prompts * self.group * self.turns

    @property
    def mean_room(self) -> int:
        """Tokens of an episode at its end."""
        return self.prompt + self.turns * self.reply

    @property
    def room(self) -> int:
        """Tokens of the longest episode."""
        return self.prompt + self.turns * self.longest


class Forecast(NamedTuple):
    """What `forecast` expects: bytes by name, seconds by name, replies decoded at once, tokens a second and the share of the limit."""

    memory: Mapping[str, float]
    fits: bool
    slots: int
    seconds: Mapping[str, float]
    tokens_per_s: float
    share: float  # of what bandwidth alone would allow for decoding

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def decode_limit(card: Card, shape: Shape, rows: float, context: float) -> float:
    """Tokens a second if a decode step did nothing but read the weights once, and keys and values of all rows.

    rows · bandwidth / (weights + rows · context · bytes of a token's keys and values)
    """
    weights = shape.parameters * card.itemsize
    return rows * card.bandwidth / (weights + rows * context * shape.kv_bytes(card.itemsize))


def decode_step(card: Card, shape: Shape, rows: float, context: float, rank: int = 0) -> dict[str, float]:
    """Seconds of one decode step by what they go into: rows of this mean context, adapters of this rank."""
    touched = min(1.0, rows * shape.active / shape.experts)
    trunk = shape.parameters * card.itemsize * (touched if shape.experts > 1 else 1.0)
    flops = 2 * rows * (shape.used + shape.hidden * shape.vocab)
    adapters = 0.0
    if rank:
        adapters = shape.layers * PROJECTIONS * ADAPTER_KERNELS * card.kernel_s
        adapters += shape.adapters(rank) * (card.itemsize / card.bandwidth + 2 * rows / card.decode_flops)
    return {
        "weights": max(trunk / card.bandwidth, flops / card.decode_flops) + rows * shape.layers * shape.hidden * card.touch_s,
        "keys and values": rows * context * shape.kv_bytes(card.itemsize) / KV_READ / card.bandwidth,
        "noise": rows * shape.vocab * card.entry_s,
        "adapters": adapters,
        "launches": (shape.layers * LAYER_KERNELS + STEP_KERNELS) * card.kernel_s,
    }


def memory_of(card: Card, shape: Shape, load: Load) -> tuple[dict[str, float], int]:
    """Bytes by name, and the replies that are decoded at once: their cache takes at most half of what weights and optimizer leave free."""
    base = shape.parameters
    trained = shape.adapters(load.rank) if load.rank else base
    half = card.itemsize == 2
    held = {
        "weights": base * (card.itemsize if load.rank else 4) + (4 * trained if load.rank else 0),
        "copy in bfloat16": 2 * base if half and not load.rank else 0,
        "gradients": 4 * trained,
        "optimizer": 8 * trained,
        "reference": 4 * base * load.copies,
    }
    free = card.memory - sum(held.values()) - (RESERVED if half else 0)
    room = min(load.room, load.mean_room / ROOM_USED)
    fitting = min(free / 2 / shape.kv_bytes(card.itemsize), load.max_cached)
    slots = int(max(0, min(load.prompts * load.group, load.max_rows, fitting // room)))
    held["cache of keys and values"] = slots * room * shape.kv_bytes(card.itemsize)
    return held | training_memory(card, shape, load), slots


def training_memory(card: Card, shape: Shape, load: Load) -> dict[str, float]:
    """Bytes of one micro-batch: what backward needs of every layer, or with checkpointing the states between layers and one layer whole."""
    tokens, queries = load.micro_batch, shape.head_dim * shape.heads
    both = queries + 2 * shape.head_dim * shape.kv_heads
    kept = 6 * shape.hidden + 3 * both + 2 * queries + 4 * shape.mlp * shape.active  # norms, rotation, attention, gate and up, residuals
    layer = tokens * (kept * card.itemsize + 2 * 4 * shape.hidden)  # norms are taken in float32
    between = tokens * shape.hidden * card.itemsize
    activations = shape.layers * between + layer if load.checkpointing else shape.layers * layer
    return {"activations": activations, "logits": min(LOGITS_HELD, 6 * 4 * tokens * shape.vocab)}


def forecast(card: Card, shape: Shape, load: Load) -> Forecast:
    """Bytes and seconds of one RL step.

    Replies decode side by side until the longest ends, which is taken to reach its limit. Each prompt is read once for its group, in
    decoding and in training. An update is a forward and twice that for the gradients; frozen weights need no gradient of their own,
    and checkpointing takes one more forward. The head is applied again in backward.
    """
    memory, slots = memory_of(card, shape, load)
    rows = max(1, slots)
    tokens = load.replies * load.reply  # sampled
    steps = max(load.turns * load.longest, tokens / rows)
    context = load.prompt + load.turns * load.reply / 2
    step = decode_step(card, shape, tokens / steps, context, load.rank)
    seconds = {"prefill": load.prompts * load.prompt * 2 * shape.used / card.flops}
    seconds |= {f"decode: {name}": value * steps for name, value in step.items()}
    if card.itemsize == 2:
        seconds["decode: launches"] += SHAPES * CAPTURE_S / load.steps
    packed = load.prompts * (load.prompt + load.group * load.turns * load.reply)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * context
    per_token, head = 2 * shape.used + attention, 2 * shape.hidden * shape.vocab
    adapted = 2 * shape.adapters(load.rank)
    factor = 2 + (not load.rank) + load.checkpointing  # forward, gradient of the states, of the weights, forward again
    elementwise = packed * shape.layers * shape.hidden * card.train_touch_s
    calls = shape.layers * card.train_layer_s * (max(load.updates, packed * load.epochs / load.micro_batch))
    score = packed * per_token + tokens * head
    update = packed * (factor * per_token + 3 * adapted) + tokens * head * (3 + (not load.rank))
    trained = shape.adapters(load.rank) if load.rank else shape.parameters
    seconds["scoring"] = load.scoring * (score / card.flops + (elementwise + calls) / 3)
    seconds["update"] = load.epochs * (update / card.flops + elementwise) + calls + load.updates * trained * ADAM_BYTES / card.bandwidth
    seconds["other"] = load.replies * card.host_s
    spent = sum(value for name, value in seconds.items() if name.startswith("decode"))
    limit = decode_limit(card, shape, tokens / steps, context)
    fits = slots > 0 and sum(memory.values()) + (RESERVED if card.itemsize == 2 else 0) <= card.memory
    return Forecast(memory, fits, slots, seconds, tokens / spent, tokens / spent / limit)


def changes(card: Card, shape: Shape, load: Load, most: int = 3) -> list[tuple[str, Forecast]]:
    """Overrides that make the run fit, or a sampled token at least 5 % cheaper, each on top of those before it, and what is then expected.

    Adapters in place of all weights, and shorter replies, are proposed only where the run does not fit.
    """
    out: list[tuple[str, Forecast]] = []
    now = forecast(card, shape, load)
    while len(out) < most:
        used = {words.partition("=")[0] for words, _ in out}
        possible = [(words, other) for words, other in candidates(load, fits=now.fits) if words.partition("=")[0] not in used]
        tried = [(words, other, forecast(card, shape, other)) for words, other in possible]
        if not tried:
            break
        words, other, then = min(tried, key=lambda entry: cost(card, entry[2], entry[1]))
        if cost(card, then, other) > _least(cost(card, now, load)):
            break
        out.append((words, then))
        load, now = other, then
    return out


def cost(card: Card, found: Forecast, load: Load) -> tuple[float, float]:
    """Bytes that are missing, then seconds of a sampled token."""
    need = sum(found.memory.values()) + (RESERVED if card.itemsize == 2 else 0)
    missing = 0.0 if found.fits else max(need - card.memory, 1.0)
    return missing, found.total / (load.replies * load.reply)


def _least(now: tuple[float, float]) -> tuple[float, float]:
    """What a change has to reach to be worth a line."""
    return 0.95 * now[0], 0.95 * now[1] if not now[0] else float("inf")


def candidates(load: Load, *, fits: bool) -> list[tuple[str, Load]]:
    """Changes of one key each."""
    rollouts = load.prompts * load.group
    toggled = load._replace(checkpointing=not load.checkpointing)
    out = [(f"model.gradient_checkpointing={str(toggled.checkpointing).lower()}", toggled)]
    if load.max_rows < rollouts:
        out.append((f"generation.engine.max_rows={rollouts}", load._replace(max_rows=rollouts)))
    if fits:
        return [*out, (f"batch.prompts={2 * load.prompts}", load._replace(prompts=2 * load.prompts))]
    if not load.rank:
        out.append(("model.lora.rank=16", load._replace(rank=16, copies=0)))
    for part in (2, 4, 8):
        out.append((f"trainer.micro_batch_tokens={load.micro_batch // part}", load._replace(micro_batch=load.micro_batch // part)))
    half = load.longest // 2
    return [*out, (f"generation.max_new_tokens={half}", load._replace(longest=half, reply=min(load.reply, half)))]
