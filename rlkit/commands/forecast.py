"""`rlkit check check.device=NAME`: what a run would take on a card that is not here, and what to change; nothing is loaded but a config.

The arithmetic is rlkit.models.roofline. Here the run's lengths are read from the composed config, and the card of this machine's
processor is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlkit.commands.arguments import drop, option
from rlkit.errors import ConfigError, RLKitError, nearest
from rlkit.models.roofline import CARDS, KNOWN, ROOM_USED, Card, Forecast, Load, Shape, changes, forecast, shape_of
from rlkit.training.experiment import Experiment

KEYS = ("device", "prompt_tokens", "reply_share", "turns")
PROMPT, SHARE = 200, 0.5  # assumed where neither the rows nor the user say how long a prompt and how much of its limit a reply is
COPIES = ("ema", "periodic", "on_kl")  # references that move: weights of their own


def asked(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The settings `check.NAME`, and the other overrides. Raises ConfigError for a name that is none."""
    found = {o.partition("=")[0].lstrip("+") for o in overrides if o.lstrip("+").startswith("check.")}
    names = {key.removeprefix("check.") for key in found}
    if unknown := sorted(names - {*KEYS}):
        raise ConfigError(f"check.{unknown[0]}: there is no such setting.{nearest(unknown[0], KEYS)} There are: {', '.join(KEYS)}")
    if names and "device" not in names:
        raise ConfigError(f"check.{sorted(names)[0]} belongs to check.device: name a card, one of {', '.join([*CARDS, 'cpu'])}")
    values, rest = {name: option(overrides, f"check.{name}") or "" for name in names}, list(overrides)
    for name in names:
        rest = drop(rest, f"check.{name}")
    return values, rest


def show(x: Experiment, config: Mapping[str, Any], given: Mapping[str, str]) -> str:
    """The forecast in lines. Raises: ConfigError for a card that is not in the table, a number out of range, a model without a path."""
    name = given["device"].lower()
    if name != "cpu" and name not in CARDS:
        raise ConfigError(f"check.device={given['device']}: no such card.{nearest(name, CARDS)} There are: {', '.join([*CARDS, 'cpu'])}")
    shape, (load, lengths) = shape_of_run(x), load_of(x, config, given)
    card = CARDS[name] if name in CARDS else measured(shape, x.trainer.threads)
    found = forecast(card, shape, load)
    return "\n".join(f"{label:<11}{text}" for label, text in lines(card, shape, load, found, lengths))


def shape_of_run(x: Experiment) -> Shape:
    """Of the model that the run names; weights are not loaded, and for the models of conf/model nothing is fetched."""
    from rlkit.models.load import pretrained_config

    given = getattr(x.model, "keywords", {})
    if "path" not in given:
        raise ConfigError("check.device needs the sizes of the model: name one by model.path")
    hub = {name: given[name] for name in ("revision", "trust_remote_code") if given.get(name)}
    return KNOWN.get(given["path"]) or shape_of(pretrained_config(given["path"], **hub).get_text_config())


def load_of(x: Experiment, config: Mapping[str, Any], given: Mapping[str, str]) -> tuple[Load, str]:
    """What a step of the run asks for, and its lengths in words."""
    lora, a = x.model.keywords.get("lora"), x.algorithm  # type: ignore[attr-defined]
    rank, limit = (lora.rank if lora else 0), x.generation.max_new_tokens
    share = number(given, "reply_share", SHARE, 0.001, 1.0)
    counted = prompt_tokens(x) if "prompt_tokens" not in given else None
    prompt = int(number(given, "prompt_tokens", counted or PROMPT, 1, 1e7))
    environment = config.get("environment") or {}
    several = (environment.get("max_turns") or environment.get("max_steps") or 1) > 1
    turns = int(number(given, "turns", 2 if several else 1, 1, 1e4))
    engine = (config.get("generation") or {}).get("engine") or {}
    moving, needs = x.reference.name in COPIES, x.needs_reference
    old = a.epochs * a.minibatches > 1 or x.kl.in_reward or a.critic.active
    load = Load(
        prompts=x.batch.prompts,
        group=x.batch.group_size,
        prompt=prompt,
        reply=max(1, round(share * limit)),
        longest=limit,
        turns=turns,
        rank=rank,
        checkpointing=bool(x.model.keywords.get("gradient_checkpointing")),  # type: ignore[attr-defined]
        micro_batch=x.trainer.micro_batch_tokens,
        max_rows=engine.get("max_rows") or 256,
        max_cached=engine.get("max_cached_tokens") or 1 << 20,
        scoring=needs + old,
        copies=int(needs and (moving or not rank)) if not rank else 0,
        updates=a.epochs * a.minibatches,
        epochs=a.epochs,
        steps=x.trainer.steps,
    )
    source = "counted" if counted else "given" if "prompt_tokens" in given else "assumed"
    words = f"prompts of {prompt} tokens ({source}), replies of {load.reply} ({share:.0%} of generation.max_new_tokens={limit}), "
    return load, words + f"{turns} a rollout; check.prompt_tokens, check.reply_share and check.turns change them"


def number(given: Mapping[str, str], name: str, default: float, low: float, high: float) -> float:
    """A setting as a number. Raises ConfigError outside its range."""
    try:
        value = float(given.get(name, default))
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise ConfigError(f"check.{name}={given[name]}: must be a number from {low:g} to {high:g}")
    return value


def prompt_tokens(x: Experiment) -> int | None:
    """Mean tokens of the first prompts, tools and template included; None where rows or tokenizer are not on this machine."""
    os.environ["HF_DATASETS_OFFLINE"] = "1"  # nothing is fetched for an estimate
    from rlkit.environments import environment_of
    from rlkit.episodes.episode import opening
    from rlkit.models.chat import encode_prompt, make_renderer
    from rlkit.models.load import pretrained_tokenizer

    try:
        tasks = x.task(split="train")[:32]
        renderer = make_renderer(pretrained_tokenizer(x.model.keywords["path"], local_files_only=True))  # type: ignore[attr-defined]
        openings = [opening(task, environment_of(x.environment, task)) for task in tasks]
        lengths = [len(encode_prompt(renderer, own.prompt, own.schemas)) for own in openings]
    except (RLKitError, OSError):
        return None
    return round(sum(lengths) / len(lengths)) if lengths else None


def lines(card: Card, shape: Shape, load: Load, found: Forecast, lengths: str) -> list[tuple[str, str]]:
    """Label and text: lengths, memory, seconds and where they go, decoding, what to change."""
    need, rollouts = sum(found.memory.values()), load.prompts * load.group
    held = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in found.memory.items() if size >= 5e7)
    parts = sorted(found.seconds.items(), key=lambda entry: -entry[1])
    spent = ", ".join(f"{name} {seconds:.2g} ({seconds / found.total:.0%})" for name, seconds in parts if seconds >= 0.005 * found.total)
    advice = [
        f"{words}: {f'{then.total:.3g} s a step' if then.fits else 'still too large'}, {sum(then.memory.values()) / 1e9:.1f} GB"
        for words, then in changes(card, shape, load)
    ]
    verdict = "fits" if found.fits else "DOES NOT FIT"
    return [
        ("device", f"{card.name}: {card.bandwidth / 1e12:.3g} TB/s and {card.flops / 1e12:.3g} TFLOP/s reached ({card.source})"),
        ("lengths", lengths),
        ("memory", f"{verdict}: {need / 1e9:.1f} of {card.memory / 1e9:.0f} GB ({held})"),
        ("slots", f"{found.slots} of {rollouts} rollouts are decoded at once, {ROOM_USED:.0%} of the reserved positions in use"),
        ("step", f"{found.total:.3g} s: {spent}"),
        ("decoding", f"{found.tokens_per_s:,.0f} tokens/s, {found.share:.0%} of what the memory's bandwidth allows"),
        *((("change", words) for words in advice) if advice else [("change", "nothing that would gain 5 %")]),
    ]


# ---------------------------------------------------------------------------------------------- the processor of this machine


def measured(shape: Shape, threads: int | None = None, clock: Callable[[], float] = time.perf_counter) -> Card:
    """This machine's processor as a card: what its products, its memory, and the engine and the update of the embedded model take.

    A decode step and an update of the embedded model are measured at two numbers of tokens each. What they take beyond their products
    is a part for each call and a part for each token, and both are carried over to another model by its layers and its width.

    Args:
      shape: of the model that is asked about; products are measured at its sizes.
      threads: of torch; None as a run chooses. clock: seconds.
    """
    import torch

    from rlkit.models.load import load_policy
    from rlkit.system.processors import cores, threads_for

    torch.set_num_threads(threads or threads_for(shape.parameters, cores()))
    policy = load_policy(path="tiny")._replace(eos_token_ids=(1,))  # no reply ends
    tiny = shape_of(policy.model.config)
    bandwidth = stream_rate(clock)
    own, other = (dict(zip(("train", "decode"), product_rates(s, clock), strict=True)) for s in (tiny, shape))
    few, many, reply = 4, 64, 32
    steps = {rows: decode_seconds(policy, rows, reply, clock) for rows in (few, many)}
    entry = draw_seconds(tiny.vocab, clock)
    row = max(0.0, (steps[many] - steps[few]) / (many - few))
    products = 2 * (tiny.used + tiny.hidden * tiny.vocab)
    beyond = row - products / own["decode"] - tiny.vocab * entry
    short, long = 128, 2048
    passes = {tokens: update_seconds(policy, tokens, clock) for tokens in (short, long)}
    token = max(0.0, (passes[long] - passes[short]) / (long - short))
    width = tiny.layers * tiny.hidden
    from rlkit.models import roofline

    return Card(
        name=f"the processor of this machine, {torch.get_num_threads()} threads",
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        bandwidth=bandwidth,
        flops=other["train"],
        decode_flops=other["decode"],
        kernel_s=max(0.0, steps[few] - few * row) / (tiny.layers * roofline.LAYER_KERNELS + roofline.STEP_KERNELS),
        entry_s=entry,
        itemsize=4,
        touch_s=max(0.0, beyond) / width,
        train_touch_s=max(0.0, token - 3 * products / own["train"]) / width,
        train_layer_s=max(0.0, passes[short] - short * token) / tiny.layers,
        source="measured now",
    )


def taken(work: Callable[[], Any], clock: Callable[[], float], rounds: int = 3) -> float:
    """The least seconds of a few rounds, after one that warms up."""
    work()
    spent = []
    for _ in range(rounds):
        begun = clock()
        work()
        spent.append(clock() - begun)
    return min(spent)


def stream_rate(clock: Callable[[], float]) -> float:
    """Bytes a second read and written by a copy that no cache holds."""
    import torch

    source = torch.ones(1 << 24)
    target = torch.empty_like(source)
    return 2 * source.nbytes / taken(lambda: target.copy_(source), clock)


def product_rates(shape: Shape, clock: Callable[[], float]) -> tuple[float, float]:
    """Operations a second of float32 products of this model's MLP: forward and backward of a micro-batch, and the rows of a decode step."""
    import torch

    weight = torch.randn(shape.mlp, shape.hidden, requires_grad=True)
    rates = []
    for rows, backward in ((2048, True), (64, False)):
        x = torch.randn(rows, shape.hidden, requires_grad=True)
        upstream, operations = torch.ones(rows, shape.mlp), 2 * rows * weight.numel() * (3 if backward else 1)
        repeats = max(1, int(4e8 / operations))

        def work(x: Any = x, upstream: Any = upstream, backward: bool = backward, repeats: int = repeats) -> None:
            for _ in range(repeats):
                with torch.set_grad_enabled(backward):
                    out = torch.nn.functional.linear(x, weight)
                if backward:
                    torch.autograd.grad(out, (x, weight), upstream)

        rates.append(operations * repeats / taken(work, clock))
    return rates[0], rates[1]


def decode_seconds(policy: Any, rows: int, tokens: int, clock: Callable[[], float]) -> float:
    """Of one decode step of so many rows, the cached engine's own work included."""
    from rlkit.engines import Cached
    from rlkit.functional import mix
    from rlkit.system.loops import run, together
    from rlkit.types import SamplingParams

    params = SamplingParams(max_new_tokens=tokens)

    async def sampled(engine: Any) -> None:
        await engine.load(policy, 0)
        await together(engine.generate(i, range(100, 132), mix(0, i), params) for i in range(rows))

    engine = Cached()
    return taken(lambda: run(sampled(engine)), clock) / tokens


def draw_seconds(vocab: int, clock: Callable[[], float]) -> float:
    """Of the draw, per row and vocabulary entry."""
    import torch

    from rlkit.engines.transformers import draw

    logits, seeds = torch.randn(64, vocab), torch.arange(64)
    return taken(lambda: draw(logits, seeds, seeds, 1.0), clock, 10) / logits.numel()


def update_seconds(policy: Any, tokens: int, clock: Callable[[], float]) -> float:
    """Forward and backward of rows of 64 tokens, half of each its own prompt."""
    import torch

    from rlkit.models.log_probs import forward_logprobs
    from rlkit.models.packing import pack

    ids = torch.randint(0, 700, (tokens // 64, 64), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(64) >= 32).expand(ids.shape)

    def work() -> None:
        forward_logprobs(policy.model, pack(ids, mask)).logprobs.sum().backward()

    return taken(work, clock)
