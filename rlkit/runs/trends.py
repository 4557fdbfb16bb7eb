"""Find known problems of training in a run: symptoms of single steps, and trends that are visible
only in a whole run. A trend is a drift of several metrics that is known to end badly.

Each check of a trend compares the first, the middle and the last third of a run. A check returns a
sentence if a change is larger than twice its standard error and also large enough to matter.
Otherwise the check returns None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import fmean, variance
from typing import NamedTuple

from rlkit.runs.reading import ReadRun, read_series
from rlkit.training.callbacks.pathologies import CHECKS, with_least_bad

FEWEST = 12  # smallest number of RL steps; in a shorter run a third has too few steps


class Thirds(NamedTuple):
    """Hold the means of a metric over the first, the middle and the last third of a run."""

    first: float
    middle: float
    last: float
    error: float  # standard error of the difference of two thirds

    def rose(self, since: float) -> bool:
        """Return whether the last third is above an earlier third by more than two standard
        errors."""
        return self.last - since > 2 * self.error

    def fell(self, since: float) -> bool:
        """Return whether the last third is below an earlier third by more than two standard
        errors."""
        return since - self.last > 2 * self.error


def average_thirds(curve: Mapping[int, float]) -> Thirds | None:
    """Average a curve by thirds. Return None for fewer than FEWEST values.

    The standard error is computed from the differences between successive values, so a trend within
    a third does not increase the standard error. The error is `√(2 σ² / n)` for n values x per
    third, with `σ² ≈ Var(x_t - x_{t-1}) / 2`.
    """
    values = [curve[step] for step in sorted(curve)]
    if len(values) < FEWEST:
        return None
    n = len(values) // 3
    noise = variance([b - a for a, b in pairwise(values)]) / 2
    return Thirds(
        fmean(values[:n]), fmean(values[n:-n]), fmean(values[-n:]), math.sqrt(2 * noise / n)
    )


def entropy_collapse(run: ReadRun) -> str | None:
    """Report if the entropy is below a fifth of its start while most prompts are still unsolved."""
    entropy = average_thirds(read_series(run, "policy/entropy"))
    solved = average_thirds(read_series(run, "group/frac_all_good"))
    if (
        entropy is None
        or not (entropy.last < entropy.first / 5 and entropy.fell(entropy.first))
        or (solved and solved.last > 0.5)
    ):
        return None
    clip = "algorithm.policy_loss.clip_high"
    return (
        f"entropy fell from {entropy.first:.3g} to {entropy.last:.3g} nats a token before the"
        f" problems were solved: raise {f'{clip} or ' * (clip in run.settings)}"
        "algorithm.entropy_coef, or lower optimizer.lr"
    )


def reward_loss(run: ReadRun) -> str | None:
    """Report if the reward ends at least a fifth below its start."""
    reward = average_thirds(read_series(run, "reward/mean"))
    if reward is None or not reward.fell(reward.first):
        return None
    if reward.first - reward.last < 0.2 * abs(reward.first):
        return None
    return (
        f"the reward fell from {reward.first:.3g} to {reward.last:.3g}: lower optimizer.lr, or stop"
        " earlier"
    )


def kl_growth(run: ReadRun) -> str | None:
    """Report if the policy still moves away from its start while the reward no longer rises."""
    kl = average_thirds(read_series(run, "kl/ref_k3") or read_series(run, "kl/start"))
    reward = average_thirds(read_series(run, "reward/mean"))
    if (
        kl is None
        or reward is None
        or not (kl.last > 0.05 and kl.last > 2 * kl.middle and kl.rose(kl.middle))
    ):
        return None
    if reward.rose(reward.middle):
        return None
    remedy = "raise kl.coef"
    if run.settings.get("kl.name") == "none":
        remedy = "add a KL to the start (kl=k3 reference=frozen)"
    return (
        f"KL grew from {kl.middle:.3g} to {kl.last:.3g} nats a token in the last third while the"
        f" reward did not rise: stop earlier, {remedy}, or lower optimizer.lr"
    )


def length_growth(run: ReadRun) -> str | None:
    """Report if episodes have become more than 1.5 times as long without more reward."""
    length = average_thirds(read_series(run, "len/mean"))
    reward = average_thirds(read_series(run, "reward/mean"))
    if (
        length is None
        or reward is None
        or not (length.last > 1.5 * length.first and length.rose(length.first))
    ):
        return None
    if reward.rose(reward.first):
        return None
    return (
        f"episodes grew from {length.first:.0f} to {length.last:.0f} tokens while the reward did"
        " not rise: look for padding in the conversations, or use algorithm/overlong=penalty or"
        " algorithm/aggregation=token_mean"
    )


def training_up_validation_down(run: ReadRun) -> str | None:
    """Report if the training reward rises while validation accuracy falls. The last fifth of the
    validations must be below the best fifth by more than half an interval."""
    curve = read_series(run, "eval/accuracy")
    low = read_series(run, "eval/accuracy_low")
    reward = average_thirds(read_series(run, "reward/mean"))
    if reward is None or len(curve) < 3 or not low or not reward.rose(reward.first):
        return None
    steps = sorted(curve)
    width = max(1, len(curve) // 5)
    means = [
        fmean(curve[step] for step in steps[i : i + width]) for i in range(len(steps) - width + 1)
    ]
    best = max(range(len(means)), key=means.__getitem__)
    if means[best] - means[-1] <= fmean(curve[step] - low[step] for step in low if step in curve):
        return None
    return (
        f"the training reward rose from {reward.first:.2f} to {reward.last:.2f} while validation"
        f" accuracy fell from {means[best]:.3f} (about step {steps[best]}) to {means[-1]:.3f}: keep"
        " the best checkpoint (callbacks.checkpoint.best=eval/accuracy), or train on more problems"
    )


def reward_hacking(run: ReadRun) -> str | None:
    """Report if the reward rises while a shadow reward falls. A shadow reward is scored, but not
    trained on."""
    reward = average_thirds(read_series(run, "reward/mean"))
    if reward is None or not reward.rose(reward.first):
        return None
    for name in find_shadow_rewards(run):
        shadow = average_thirds(read_series(run, f"reward/{name}/mean"))
        if (
            shadow
            and shadow.fell(shadow.first)
            and shadow.first - shadow.last > 0.05 * abs(shadow.first)
        ):
            return (
                f"the reward rose from {reward.first:.2f} to {reward.last:.2f} while the shadow"
                f" reward {name} fell from {shadow.first:.2f} to {shadow.last:.2f}: read the best"
                " conversations; the policy may be gaming the reward"
            )
    return None


def find_shadow_rewards(run: ReadRun) -> list[str]:
    """List the reward's terms that have weight 0 in every phase. These terms are scored, but not
    trained on."""
    weights: dict[str, list[object]] = {}
    for key, value in run.settings.items():
        before, found, rest = key.rpartition("reward.terms.")
        if (
            found
            and rest.endswith(".weight")
            and (not before or before.startswith("schedule.phases."))
        ):
            weights.setdefault(rest.removesuffix(".weight"), []).append(value)
    return [name for name, values in weights.items() if not any(values)]


TRENDS: Sequence[Callable[[ReadRun], str | None]] = (
    reward_loss,
    entropy_collapse,
    kl_growth,
    length_growth,
    training_up_validation_down,
    reward_hacking,
)


class Symptom(NamedTuple):
    """Hold a known problem of training that was found in a run."""

    check: str  # name of the check in words
    steps: Sequence[int]  # steps with the symptom; empty if only the whole run shows it
    text: str  # the check's first message


def find_symptoms(run: ReadRun) -> list[Symptom]:
    """Find known problems of training, in the whole run and in its single steps. A check skips
    every step whose row lacks the needed metrics."""
    out = [
        Symptom(check.__name__.replace("_", " "), (), text)
        for check in TRENDS
        if (text := check(run))
    ]
    rows = list(with_least_bad(run.rows))
    for check in CHECKS:
        found = []
        for row in rows:
            with suppress(KeyError, TypeError, ValueError, ArithmeticError):
                text = check(
                    {key: math.nan if value is None else value for key, value in row.items()}
                )
                if text:
                    found.append((int(row["step"]), text))
        if found:
            out.append(
                Symptom(check.__name__.replace("_", " "), [step for step, _ in found], found[0][1])
            )
    return out
