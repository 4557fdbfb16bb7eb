"""Parts b and c of the evidence: time decoding steps, and the parts of one update.

All models have random weights, made on the card.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from ceilings import copy_rate, seconds_of
from inside import watched
from rows import Report
from weights import (
    GROUP,
    RANK,
    SHAPES,
    Setting,
    card_of,
    embedded_policy,
    grouped_prompts,
    median,
    random_policy,
    sample,
    wait_for,
)

from rlkit.engines import Cached
from rlkit.engines.cached.attention import attend
from rlkit.engines.transformers import draw
from rlkit.errors import EngineError
from rlkit.extras.forecast import decode_limit
from rlkit.models import LoRA, forward_logprobs, pack
from rlkit.models.log_probs import compute_states
from rlkit.models.packing import Kernels, attend_packed
from rlkit.training.selfcheck import compute_own_log_probs
from rlkit.types import Policy

Pieces = dict[str, Callable[[Report], str | None]]
ARMS = {"base": 0, "adapters": RANK}


def forget() -> None:
    """Free the memory of deleted models, and restart the count of peak memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: str) -> float | None:
    """Return the most memory [GB] held by torch on a GPU since `forget`; None on another device."""
    cuda = torch.device(device).type == "cuda"
    return round(torch.cuda.max_memory_allocated() / 1e9, 3) if cuda else None


# ------------------------------------------------------------------------------ b. decoding steps


def decoding(setting: Setting) -> Pieces:
    """List the pieces of part b: decoding steps, kernels, and single operations.

    Each shape decodes with and without adapters at each context length, and `decode` measures every
    mode of `modes`. For each shape two more pieces list the kernels of a step and time sampling and
    attention alone.
    """
    out: Pieces = {}
    contexts = setting.pick((512, 1024, 4096), (32, 64))
    for context in sorted(contexts, key=lambda n: (n != setting.pick(1024, 64), n)):
        for shape in setting.shapes:
            for arm in ARMS:
                work = partial(decode, setting, shape, arm, context)
                out[f"{shape} {arm}, context {context}"] = work
    for shape in setting.shapes:
        out[f"{shape}, kernels of a step"] = partial(list_kernels, setting, shape)
        out[f"{shape}, draw and attention alone"] = partial(time_alone, setting, shape)
    return out


def modes(setting: Setting) -> dict[str, dict[str, Any]]:
    """Return the engine options for each way to run a decoding step.

    On a GPU the ways are a replayed CUDA graph, single kernels ("eager"), and a graph with torch's
    paged attention ("replay, varlen"). A CPU has only "eager".
    """
    eager = {"cuda_graphs": False, "kernel": "eager"}
    if setting.device == "cpu":
        return {"eager": eager}
    return {"replay": {}, "eager": eager, "replay, varlen": {"cache": "varlen"}}


def decode(setting: Setting, shape: str, arm: str, context: int, report: Report) -> None:
    """Report the milliseconds of a decoding step of 256 rows, once for each mode.

    All replies have the same length. The eight rows of a group share a prompt.

    A look is one call of the decoder (inside.Look). The step time is the median over the looks, so
    the prefill of the prompts and the capture of a graph do not affect it. The limit assumes that a
    step reads all weights once and the keys and values of every row, at the copy rate of part a.
    """
    forget()
    rows = setting.pick(256, 16)
    tokens = setting.pick(128, 8)
    policy = random_policy(shape=shape, lora=LoRA(rank=ARMS[arm]), device=setting.device)
    card = card_of(setting.device, copy_rate(setting.out))
    limit = decode_limit(card, SHAPES[shape], rows, context)
    for mode, options in modes(setting).items():
        engine = Cached(max_rows=rows, **options)
        try:
            with watched(engine) as watch:
                begun = time.perf_counter()
                sample(engine, policy, grouped_prompts(rows, context - tokens // 2), tokens)
                seconds = time.perf_counter() - begun
        except EngineError as error:  # this torch lacks the mode
            report("decode", mode, reason=str(error)[:200])
            continue
        looks = [(look.ended - look.begun) / look.rounds for look in watch.looks if look.rounds]
        step = median(looks)
        drawing = rows * tokens / sum(look.rounds for look in watch.looks)
        rate = drawing / step if step else 0.0
        report(
            "decode",
            mode,
            ms_a_step=round(1e3 * (step or 0.0), 3),
            rows_drawing=round(drawing, 1),
            tokens_per_s=round(rate),
            limit_tokens_per_s=round(limit),
            share_of_limit=round(rate / limit, 3),
            host_ms_a_look=round(watch.host_ms(), 3),
            seconds_with_prompts=round(seconds, 2),
            captures=watch.captures,
            replays=watch.replays,
            refused=watch.refused,
            peak_gb=peak_gb(setting.device),
        )


def list_kernels(setting: Setting, shape: str, report: Report) -> None:
    """Report the ten kernels with the most time in a call with adapters, by torch.profiler.

    An earlier, identical call warms the engine up and is not profiled.
    """
    from torch.profiler import ProfilerActivity, profile

    forget()
    policy = random_policy(shape=shape, lora=LoRA(rank=RANK), device=setting.device)
    engine = Cached(max_rows=256)
    prompts = grouped_prompts(setting.pick(256, 16), setting.pick(1024, 32))
    tokens = setting.pick(32, 4)
    sample(engine, policy, prompts, tokens)
    cuda = setting.device == "cuda"
    kinds = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=kinds) as seen:
        sample(engine, policy, prompts, tokens)
        wait_for(setting.device)

    def microseconds(event: Any) -> float:
        return event.self_device_time_total if cuda else event.self_cpu_time_total

    events = sorted(seen.key_averages(), key=microseconds, reverse=True)
    total = sum(map(microseconds, events)) or 1.0
    for event in events[:10]:
        report(
            "kernels",
            event.key[:90],
            calls=event.count,
            ms=round(microseconds(event) / 1e3, 2),
            share=round(microseconds(event) / total, 3),
        )
    calls = sum(event.count for event in events)
    report("kernels", "all", calls=calls, ms=round(total / 1e3, 2), share=1.0)


def time_alone(setting: Setting, shape: str, report: Report) -> None:
    """Time sampling over the whole vocabulary, and one layer's attention of 256 rows in three ways.

    The attention reads keys and values as one contiguous tensor, gathers them from pages first, or
    reads them from pages by torch's own kernel.
    """
    own = SHAPES[shape]
    device = setting.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = setting.pick(256, 16)
    length = setting.pick(1024, 64)
    logits = torch.randn(rows, own.vocab, device=device, dtype=dtype)
    seeds = torch.arange(rows, device=device)
    spent = seconds_of(partial(draw, logits, seeds, seeds, 1.0), device)
    report("alone", "draw", ms=round(1e3 * spent, 4), rows=rows)
    page = 256  # tokens; flash attention takes multiples of 256
    pages = -(-length // page)
    query = torch.randn(rows, own.heads, 1, own.head_dim, device=device, dtype=dtype)
    pool = torch.randn(
        2, rows * pages, page, own.kv_heads, own.head_dim, device=device, dtype=dtype
    )
    table = torch.randperm(rows * pages, device=device).view(rows, pages)
    mask = (torch.arange(pages * page, device=device) < length)[None, None, None]
    attention = partial(attend, None, query, attention_mask=mask)

    def gathered() -> Any:
        return attention(*(side[table].flatten(1, 2).transpose(1, 2) for side in pool))

    whole = [side[table].flatten(1, 2).transpose(1, 2).contiguous() for side in pool]
    ways: dict[str, Callable[[], Any]] = {
        "in one piece": lambda: attention(*whole),
        "gathered from pages": gathered,
        "varlen_attn with a block table": partial(paged_attention, query, pool, table, length),
    }
    for way, work in ways.items():
        try:
            spent = seconds_of(work, device)
        except Exception as error:  # this torch or this device lacks the way
            report("alone", f"attention, {way}", reason=str(error).partition("\n")[0][:200])
            continue
        report("alone", f"attention, {way}", ms=round(1e3 * spent, 4), rows=rows, context=length)


def paged_attention(query: Any, pool: Any, table: Any, length: int) -> Any:
    """Run torch's paged attention for rows of one query each."""
    from torch.nn.attention.varlen import varlen_attn

    rows = len(table)
    used = torch.full((rows,), length, dtype=torch.int32, device=query.device)
    ends = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    ends_k = length * ends
    options: Any = {"seqused_k": used, "block_table": table.int()}
    with torch.inference_mode():
        return varlen_attn(
            query[:, :, 0], pool[0], pool[1], ends, ends_k, 1, length, enable_gqa=True, **options
        )


# ------------------------------------------------------------------------------- c. one update


def updates(setting: Setting) -> Pieces:
    """List the pieces of part c: updates, attention alone, and gaps between log-probs.

    An update is timed for each number of tokens and each shape, with and without checkpointing.
    """
    out: Pieces = {}
    for tokens in setting.pick((16_384, 32_768), (256,)):
        for shape in setting.pick(("0.6B", "8B"), ("rehearsed",)):
            for kept in (True, False):
                how = "checkpointing" if kept else "no checkpointing"
                work = partial(time_update, setting, shape, tokens, kept)
                out[f"{shape}, {tokens} tokens, {how}"] = work
    for shape in setting.pick(("0.6B", "8B"), ("rehearsed",)):
        out[f"{shape}, attention alone"] = partial(time_attention, setting, shape)
    for model in ("embedded", *setting.pick(("0.6B",), ("rehearsed",))):
        out[f"gaps, {model}"] = partial(measure_gaps, setting, model)
    return out


def packed_rows(tokens: int, setting: Setting, **options: Any) -> tuple[Any, int]:
    """Return packed groups of about `tokens` tokens, and the number of their replies.

    A group has a prompt as long as GSM8K's and eight replies to it.
    """
    prompt = setting.pick(350, 16)
    reply = setting.pick(230, 12)
    groups = max(1, round(tokens / (prompt + GROUP * reply)))
    generator = torch.Generator().manual_seed(0)
    size = (groups * GROUP, prompt + reply)
    ids = torch.randint(100, 700, size, generator=generator).to(setting.device)
    ids[:, :prompt] = ids[::GROUP, :prompt].repeat_interleave(GROUP, 0)
    mask = torch.arange(prompt + reply, device=setting.device).expand(size) >= prompt
    return pack(ids, mask, **options), groups * GROUP


def time_update(
    setting: Setting, shape: str, tokens: int, checkpointing: bool, report: Report
) -> None:
    """Report the seconds of one forward and backward pass with adapters, and of AdamW.

    The seconds of the pass are also split into parts, by differences of measured times. `linear` is
    the trunk without attention: projections, norms and gates.

    One layer's attention is timed alone and multiplied by the number of layers. A forward and a
    backward pass cost as much as three forward passes. Checkpointing adds a fourth, and the
    attention therefore takes 4/3 of the time.
    """
    forget()
    device = setting.device
    policy = random_policy(
        shape=shape, lora=LoRA(rank=RANK), device=device, gradient_checkpointing=checkpointing
    )
    model = policy.model
    packed, _ = packed_rows(tokens, setting)
    name = "update"
    size = {"packed_tokens": len(packed.ids), "sampled_tokens": len(packed.targets)}
    try:
        whole = seconds_of(
            lambda: forward_logprobs(model, packed).logprobs.sum().backward(), device, 2
        )
        peak = peak_gb(device)
        trunk = seconds_of(
            lambda: compute_states(model, packed).float().sum().backward(), device, 2
        )
    except torch.OutOfMemoryError as error:
        report(name, shape, fits=False, said=str(error).partition(". GPU")[0], **size)
        return
    layer = attention_seconds(SHAPES[shape], packed, setting)
    attention = layer * SHAPES[shape].layers * (4 / 3 if checkpointing else 1)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    adamw = seconds_of(optimizer.step, device, 2)
    report(
        name,
        shape,
        fits=True,
        seconds=round(whole, 4),
        attention_s=round(attention, 4),
        linear_s=round(trunk - attention, 4),
        head_s=round(whole - trunk, 4),
        adamw_s=round(adamw, 4),
        peak_gb=peak,
        **size,
    )


def attention_seconds(own: Any, packed: Any, setting: Setting) -> float:
    """Return the seconds of one layer's attention to packed rows, forward and backward."""
    dtype = torch.bfloat16 if setting.device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(
            1,
            heads,
            len(packed.ids),
            own.head_dim,
            device=setting.device,
            dtype=dtype,
            requires_grad=True,
        )
        for heads in (own.heads, own.kv_heads, own.kv_heads)
    )
    return seconds_of(
        lambda: attend_packed(None, q, k, v, None, packed=packed)[0].sum().backward(),
        setting.device,
        2,
    )


def time_attention(setting: Setting, shape: str, report: Report) -> None:
    """Time one layer's attention to packed rows by each of rlkit's paths.

    On a GPU, also time `varlen_attn` with repeated heads; torch 2.11 accepts repeated heads too.
    """
    tokens = setting.pick(16_384, 256)
    ways: dict[str, Any] = {"as rlkit chooses": None}
    ways["steps"] = Kernels(varlen=False, steps=True)
    ways["exact lengths"] = Kernels(varlen=False, steps=False)
    if setting.device == "cuda":
        ways["varlen"] = Kernels(varlen=True, steps=True)
        ways["varlen, heads repeated"] = ways["varlen"]
    for way, kernels in ways.items():
        packed, _ = packed_rows(tokens, setting, kernels=kernels)
        own = SHAPES[shape]
        try:
            with repeated_heads(way.endswith("repeated")):
                spent = attention_seconds(own, packed, setting)
        except Exception as error:  # this torch or this device lacks the way
            report("attention", way, reason=str(error).partition("\n")[0][:200])
            continue
        report("attention", way, ms=round(1e3 * spent, 3), packed_tokens=len(packed.ids))


@contextmanager
def repeated_heads(wanted: bool) -> Any:
    """Within the block, call `varlen_attn` without `enable_gqa`, if `wanted`.

    Keys and values are first repeated to the number of query heads.
    """
    from torch.nn.attention import varlen

    before = varlen.varlen_attn

    def repeated(
        q: Any, k: Any, v: Any, *given: Any, enable_gqa: bool = False, **named: Any
    ) -> Any:
        times = q.shape[1] // k.shape[1]
        k, v = (side.repeat_interleave(times, 1) for side in (k, v))
        return before(q, k, v, *given, **named)

    if wanted:
        varlen.varlen_attn = repeated
    try:
        yield
    finally:
        varlen.varlen_attn = before


def measure_gaps(setting: Setting, model: str, report: Report) -> None:
    """Report how far three computations of the sampled tokens' log-probs differ, in nats.

    The three are the sampler, the trainer, and the model's own forward pass. All run in bfloat16,
    and the embedded model also in float32.
    """
    dtypes = ("bfloat16", "float32") if model == "embedded" else ("bfloat16",)
    for dtype in dtypes:
        forget()
        policy = gap_policy(setting, model, dtype)
        prompts = grouped_prompts(setting.pick(32, 8), 60)
        replies = sample(Cached(), policy, prompts, setting.pick(128, 8))
        ids = torch.tensor(
            [[*p, *r.token_ids] for p, r in zip(prompts, replies, strict=True)],
            device=setting.device,
        )
        mask = torch.arange(ids.shape[1], device=setting.device).expand(ids.shape) >= 60
        few = slice(0, 4)
        with torch.no_grad():
            trainer = forward_logprobs(policy.model, pack(ids, mask)).logprobs
            own = compute_own_log_probs(policy.model, ids[few], mask[few], 1.0)
        sampler = torch.tensor([reply.logprobs for reply in replies], device=setting.device)
        gaps = {
            "sampler and trainer": sampler.flatten() - trainer[mask],
            "trainer and own forward": trainer[few][mask[few]] - own,
            "sampler and own forward": sampler[few].flatten() - own,
        }
        for pair, gap in gaps.items():
            report(
                "gaps",
                f"{dtype}, {pair}",
                mean=float(f"{float(gap.abs().mean()):.2e}"),
                most=float(f"{float(gap.abs().max()):.2e}"),
                tokens=gap.numel(),
            )


def gap_policy(setting: Setting, model: str, dtype: str) -> Policy:
    """Return a policy with adapters on a base of this dtype.

    The presets for pretrained models train the same kind of policy.
    """
    lora = LoRA(rank=RANK)
    if model == "embedded":
        return embedded_policy(setting.device, lora=lora, dtype=dtype)
    return random_policy(shape=model, lora=lora, dtype=dtype, device=setting.device)
