"""`rlkit check check.device=NAME`: what a run would take on a card that is not here. Of the model
only its config is read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.errors import ConfigError, RLKitError, nearest
from rlkit.models.roofline import CARDS, KNOWN, Load, Shape, changes, forecast, shape_of
from rlkit.training.experiment import Experiment

# assumed where neither the rows nor the user say how long a prompt and how much of its limit a
# reply is
PROMPT = 200
SHARE = 0.5
RANGES = {"prompt_tokens": (1, 1e7), "reply_share": (0.001, 1), "turns": (1, 1e4)}


def asked(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings check.NAME, and the other overrides. Raises ConfigError for a name, a card or a
    number that is none."""
    given: dict[str, Any] = {
        o[6:].partition("=")[0]: o.partition("=")[2].lower()
        for o in overrides
        if o.startswith("check.")
    }
    for name, value in given.items():
        if name not in ("device", *RANGES):
            raise ConfigError(
                f"check.{name}: there is no such setting.{nearest(name, RANGES)} There are: device,"
                f" {', '.join(RANGES)}"
            )
        if name == "device" and value not in CARDS:
            raise ConfigError(
                f"check.device={value}: no such card.{nearest(value, CARDS)} There are:"
                f" {', '.join(CARDS)}"
            )
        if name != "device":
            low, high = RANGES[name]
            if not re.fullmatch(r"\d*\.?\d+", value) or not low <= float(value) <= high:
                raise ConfigError(
                    f"check.{name}={value}: must be a number from {low:g} to {high:g}"
                )
    if given and "device" not in given:
        raise ConfigError(
            f"check.{next(iter(given))} belongs to check.device: name a card, one of"
            f" {', '.join(CARDS)}"
        )
    return given, [o for o in overrides if not o.startswith("check.")]


def in_lines(x: Experiment, config: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The forecast: lengths, memory, seconds and where they go, decoding, what to change."""
    card = CARDS[given["device"]]
    shape = shape_of_run(x)
    load, lengths = load_of(x, config, given)
    found = forecast(card, shape, load)
    held = ", ".join(
        f"{name} {size / 1e9:.1f}" for name, size in found.memory.items() if size >= 5e7
    )
    parts = sorted(found.seconds.items(), key=lambda entry: -entry[1])
    spent = ", ".join(
        f"{name} {seconds:.2g} ({seconds / found.total:.0%})"
        for name, seconds in parts
        if seconds >= 0.005 * found.total
    )
    advice = [
        f"{words}: {f'{then.total:.3g} s a step' if then.fits else 'still too large'},"
        f" {then.held / 1e9:.1f} GB"
        for words, then in changes(card, shape, load)
    ]
    rows = [
        (
            "device",
            (
                f"{card.name}: {card.bandwidth / 1e12:.3g} TB/s and {card.flops / 1e12:.3g} TFLOP/s"
                f" reached ({card.source})"
            ),
        ),
        (
            "lengths",
            f"{lengths}; check.prompt_tokens, check.reply_share and check.turns change them",
        ),
        (
            "memory",
            (
                f"{'fits' if found.fits else 'DOES NOT FIT'}: {found.held / 1e9:.1f} of"
                f" {card.memory / 1e9:.0f} GB ({held})"
            ),
        ),
        ("slots", f"{found.slots} of {load.prompts * load.group} rollouts are decoded at once"),
        ("step", f"{found.total:.3g} s: {spent}"),
        (
            "decoding",
            (
                f"{found.tokens_per_s:,.0f} tokens/s, {found.share:.0%} of what the memory's"
                " bandwidth allows"
            ),
        ),
        *(("change", words) for words in advice or ["nothing that would gain 5 %"]),
    ]
    return "\n".join(f"{label:<11}{text}" for label, text in rows)


def shape_of_run(x: Experiment) -> Shape:
    """Sizes of the run's model; for those of conf/model nothing is fetched. Raises ConfigError for
    a model without a path."""
    from rlkit.models.load import pretrained_config

    own = getattr(x.model, "keywords", {})
    if "path" not in own:
        raise ConfigError("check.device needs the sizes of the model: name one by model.path")
    hub = {name: own[name] for name in ("revision", "trust_remote_code") if own.get(name)}
    return KNOWN.get(own["path"]) or shape_of(
        pretrained_config(own["path"], **hub).get_text_config()
    )


def load_of(x: Experiment, config: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[Load, str]:
    """What a step of the run asks for, and its lengths in words."""
    own: Any = getattr(x.model, "keywords", {})
    a = x.algorithm
    limit = x.generation.max_new_tokens
    rank = own["lora"].rank if own.get("lora") else 0
    share = float(given.get("reply_share", SHARE))
    counted = None if "prompt_tokens" in given else prompt_tokens(x)
    prompt = int(given.get("prompt_tokens", counted or PROMPT))
    environment = config.get("environment") or {}
    engine = (config.get("generation") or {}).get("engine") or {}
    several = (environment.get("max_turns") or environment.get("max_steps") or 1) > 1
    updates = a.epochs * a.minibatches
    load = Load(
        x.batch.prompts,
        x.batch.group_size,
        prompt,
        max(1, round(share * limit)),
        limit,
        int(given.get("turns", 2 if several else 1)),
        rank,
        bool(own.get("gradient_checkpointing")),
        x.trainer.micro_batch_tokens,
        engine.get("max_rows") or 256,
        engine.get("max_cached_tokens") or 1 << 20,
        scoring=x.needs_reference + (updates > 1 or x.kl.in_reward or a.critic.active),
        copies=int(x.needs_reference and not rank),
        updates=updates,
        epochs=a.epochs,
        steps=x.trainer.steps,
    )
    source = "given" if "prompt_tokens" in given else "assumed"
    if counted:
        source = "counted"
    replies = f"replies of {load.reply} ({share:.0%} of generation.max_new_tokens={limit})"
    return load, f"prompts of {prompt} tokens ({source}), {replies}, {load.turns} a rollout"


def prompt_tokens(x: Experiment) -> int | None:
    """Mean tokens of the first prompts, tools and template included; None where rows or tokenizer
    are not on this machine."""
    from rlkit.environments import environment_of
    from rlkit.episodes.episode import opening
    from rlkit.models.chat import encode_prompt, make_renderer
    from rlkit.models.load import pretrained_tokenizer

    os.environ["HF_DATASETS_OFFLINE"] = "1"  # nothing is fetched for an estimate
    try:
        path = x.model.keywords["path"]  # type: ignore[attr-defined]
        renderer = make_renderer(pretrained_tokenizer(path, local_files_only=True))
        openings = [
            opening(task, environment_of(x.environment, task))
            for task in x.task(split="train")[:32]
        ]
        lengths = [len(encode_prompt(renderer, own.prompt, own.schemas)) for own in openings]
    except (RLKitError, OSError):
        return None
    return round(sum(lengths) / len(lengths)) if lengths else None
