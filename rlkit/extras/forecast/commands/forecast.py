"""what a run takes on this machine or, with check.device=h200, on a card that is not here

`rlkit check` is the same command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkit.commands import check
from rlkit.commands.arguments import Answer, Arguments
from rlkit.errors import ConfigError, suggest_name
from rlkit.extras.forecast.load import find_shape, list_uncounted, measure_load
from rlkit.extras.forecast.roofline import CARDS, forecast, propose_changes, settle_checkpointing
from rlkit.training.experiment import Experiment
from rlkit.types import Splits

if TYPE_CHECKING:
    from rlkit.extras.forecast.timing import RunCost

GIVES_JSON = True

RANGES = {"prompt_tokens": (1, 1e7), "reply_share": (0.001, 1), "turns": (1, 1e4)}


def command(arguments: Arguments) -> Answer:
    """Print the time and memory that a run takes: forecast for another card if check.device names
    one, else measured on this machine with a small step.

    check.device=CARD  without a step, from the numbers of this card
    KEY=VALUE          the overrides of the run; GROUP=OPTION an option
    --json             the same for a program

        rlkit forecast algorithm=grpo
        rlkit forecast model=qwen3_1.7b check.device=h100
    """
    from rlkit.config.compose import compose, experiment
    from rlkit.config.problems.schedules import build_first_steps

    given, overrides = split_settings(arguments.overrides)
    if "device" not in given:
        x, tasks, phases, doubts = check.prepare(arguments._replace(overrides=overrides))
        report, cost = measure_here(x, tasks, given)
        text = check.show_report(report, phases=phases, costs=list_costs(cost, report.memory))
        return Answer(check.describe_report(report, phases, doubts) | {"cost": cost}, text)
    composed = compose(overrides, config_dir=arguments.config_dir)
    firsts = list(build_first_steps(experiment(composed)).values())
    data = forecast_card(firsts[0], composed.config, given)
    data["uncounted"] = list_uncounted(firsts[0], len(firsts))
    return Answer(data, format_forecast(data))


def measure_here(
    x: Experiment, tasks: Splits, given: Mapping[str, str]
) -> tuple[check.Report, RunCost]:
    """Run the small step of `rlkit check`, and forecast the cost of the run on this machine.

    Args:
      x: the run at its first step.
      given: the settings check.NAME.
    """
    from rlkit.extras.forecast.timing import Given, Reads, forecast_run
    from rlkit.system.device import autocast
    from rlkit.system.waiting import MAX_STEP_TIME, limit_waiting
    from rlkit.training.update.record import Host

    reads = Reads()
    report = check.run(x, tasks, Host(forward=reads))
    lengths = Given(**{name: float(value) for name, value in given.items()})
    learner = report.learner
    with (
        autocast(x, next(learner.model.parameters()).device, updates=True),
        limit_waiting(x.trainer.max_step_time, MAX_STEP_TIME, lambda: "a timed step hangs"),
    ):
        return report, forecast_run(learner, x, tasks, reads, lengths)


def list_costs(forecast: RunCost, held: check.Memory) -> list[tuple[str, str]]:
    """List the cost of a step and of the run, as (name, numbers in words)."""
    costs = forecast.costs
    of = forecast.step
    parts = {
        "weights": held.weights + held.reference,
        "gradients and optimizer": held.gradients + held.optimizer,
        "activations of one micro-batch": forecast.activations,
        "cache": forecast.cache,
    }
    parts["libraries and the rest"] = max(0.0, forecast.peak - sum(parts.values()))
    sizes = ", ".join(f"{name} {check.say_size(size)}" for name, size in parts.items() if size)
    seconds = {"sampling": costs.sampling, "scoring": costs.scoring, "update": costs.update}
    spent = ", ".join(f"{name} {say_time(own)}" for name, own in seconds.items() if own)
    evaluation = f", evaluation {say_time(costs.evaluation)} of it" if costs.evaluation else ""
    return [
        (
            "lengths",
            f"prompts of {of.prompt:.0f} tokens, {of.drawn:.0f} sampled a rollout"
            f" ({forecast.source}); check.prompt_tokens and check.reply_share change them",
        ),
        (
            "a step",
            f"about {say_time(costs.step)} on {forecast.on}: {spent}"
            f" ({of.rollouts:.0f} rollouts, {of.packed:,.0f} tokens)",
        ),
        (
            "sampling",
            f"prefill {say_time(costs.prefill)}, decode {say_time(costs.decode)}",
        ),
        ("the run", f"{costs.steps} steps, about {say_time(costs.run)}{evaluation}"),
        ("memory", f"about {check.say_size(forecast.peak)} at its peak ({sizes})"),
    ]


def say_time(seconds: float) -> str:
    """Write a time in seconds, minutes or hours, with about two digits."""
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 120:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def split_settings(overrides: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split the settings check.NAME off from the other overrides.

    Raises: ConfigError for an unknown name or card, or for an invalid number.
    """
    given: dict[str, Any] = {
        o[6:].partition("=")[0]: o.partition("=")[2].lower()
        for o in overrides
        if o.startswith("check.")
    }
    for name, value in given.items():
        if name not in ("device", *RANGES):
            raise ConfigError(
                f"check.{name}: there is no such setting.{suggest_name(name, RANGES)} There are:"
                f" device, {', '.join(RANGES)}"
            )
        if name == "device":
            if value not in CARDS:
                raise ConfigError(
                    f"check.device={value}: no such card.{suggest_name(value, CARDS)} There are:"
                    f" {', '.join(CARDS)}"
                )
            continue
        low, high = RANGES[name]
        share = name == "reply_share"
        pattern = r"\d*\.?\d+" if share else r"\d+"
        if not re.fullmatch(pattern, value) or not low <= float(value) <= high:
            kind = "number" if share else "whole number"
            raise ConfigError(f"check.{name}={value}: must be a {kind} from {low:g} to {high:g}")
    if "turns" in given and "device" not in given:
        raise ConfigError(
            "check.turns belongs to check.device, because turns are measured on this machine; name"
            f" a card, one of {', '.join(CARDS)}"
        )
    return given, [o for o in overrides if not o.startswith("check.")]


def forecast_card(
    x: Experiment, config: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Forecast the run on a card, and the effect of changing one key at a time."""
    card = CARDS[given["device"]]
    shape = find_shape(x)
    load, lengths = measure_load(x, config, given)
    if x.model.gradient_checkpointing == "auto":
        load = settle_checkpointing(card, shape, load)
    return {
        "device": card,
        "lengths": lengths,
        "load": load,
        "forecast": forecast(card, shape, load),
        "changes": dict(propose_changes(card, shape, load)),
    }


def write_figures(number: float, figures: int) -> str:
    """Write a number with so many significant figures, without an exponent for large numbers.

    >>> write_figures(2887.3, 3), write_figures(7.987, 3)
    ('2,890', '7.99')
    """
    text = f"{number:.{figures}g}"
    return f"{float(text):,.0f}" if "e+" in text else text


def format_forecast(data: Mapping[str, Any]) -> str:
    """Write the forecast as text: lengths, memory, seconds by part, decoding, and proposed
    changes."""
    card = data["device"]
    load = data["load"]
    found = data["forecast"]
    word = "recomputed" if load.checkpointing else "kept"
    held = ", ".join(
        f"{name} {size / 1e9:.1f}" for name, size in found.memory.items() if size >= 5e7
    )
    parts = sorted(found.seconds.items(), key=lambda entry: -entry[1])
    spent = ", ".join(
        f"{name} {write_figures(seconds, 2)} ({seconds / found.total:.0%})"
        for name, seconds in parts
        if seconds >= 0.005 * found.total
    )
    advice = []
    for words, then in data["changes"].items():
        step = f"{write_figures(then.total, 3)} s a step" if then.fits else "still too large"
        advice.append(f"{words}: {step}, {then.held / 1e9:.1f} GB")
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
            f"{data['lengths']}; check.prompt_tokens, check.reply_share and check.turns change"
            " them",
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
        ("step", f"{write_figures(found.total, 3)} s: {spent}"),
        (
            "decoding",
            (
                f"{found.tokens_per_s:,.0f} tokens/s, {found.share:.0%} of what the memory's"
                " bandwidth allows"
            ),
        ),
        *(("not counted", words) for words in data["uncounted"]),
        *(("change", words) for words in advice or ["nothing that would gain 5 %"]),
    ]
    return "\n".join(f"{label:<12}{text}" for label, text in rows)
