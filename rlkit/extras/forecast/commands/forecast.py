"""what a run would take on a card that is not here: check.device=h200, other overrides as for train

`rlkit check check.device=CARD …` is the same command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.commands import check
from rlkit.commands.arguments import Arguments, drop, is_trusted
from rlkit.errors import ConfigError, nearest
from rlkit.extras.forecast.load import load_of, shape_of_run
from rlkit.extras.forecast.roofline import CARDS, changes, forecast, settle_checkpointing
from rlkit.training.experiment import Experiment

RANGES = check.RANGES | {"turns": (1.0, 1e4)}


def command(arguments: Arguments) -> int:
    """Print what the run of these overrides would take on the card that check.device names."""
    from rlkit.config.compose import compose, experiment
    from rlkit.config.problems.schedules import first_steps

    given, overrides = asked(drop(arguments.overrides, "trust"))
    composed = compose(
        overrides, config_dir=arguments.config_dir, trusted=is_trusted(arguments.overrides)
    )
    first = next(iter(first_steps(experiment(composed)).values()))
    print(in_lines(first, composed.config, given))
    return 0


def asked(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The settings check.NAME, and the other overrides. Raises ConfigError for a name, a card or a
    number that is none."""
    given: dict[str, Any]
    given, rest = check.read_settings(overrides, RANGES, other="device")
    if "device" not in given:
        raise ConfigError(
            "a forecast, and each setting of it, belongs to check.device: name a card, one of"
            f" {', '.join(CARDS)}"
        )
    card = given["device"]
    if card not in CARDS:
        raise ConfigError(
            f"check.device={card}: no such card.{nearest(card, CARDS)} There are:"
            f" {', '.join(CARDS)}"
        )
    return given, rest


def in_lines(x: Experiment, config: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """The forecast: lengths, memory, seconds and where they go, decoding, what to change."""
    card, shape, (load, lengths) = (
        CARDS[given["device"]],
        shape_of_run(x),
        load_of(x, config, given),
    )
    if x.model.gradient_checkpointing == "auto":
        load = settle_checkpointing(card, shape, load)
    word = "recomputed" if load.checkpointing else "kept"
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
        ("activations", f"{word}, in micro-batches of {load.micro_batch} tokens"),
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
    return "\n".join(f"{label:<12}{text}" for label, text in rows)
