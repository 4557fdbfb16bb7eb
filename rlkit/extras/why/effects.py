"""Compute the effects of remedies from their forks, and say them in sentences. Effects are paired
over prompts and corrected for the number of remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlkit.extras.why.evidence import Finding
from rlkit.extras.why.forks import Fork
from rlkit.runs.comparing import (
    ALPHA,
    TO_CLAIM,
    Difference,
    compare_pairs,
    find_smallest_step,
    holm,
    holm_levels,
)


class Effect(NamedTuple):
    """The effect of a remedy."""

    fork: Fork
    found: Difference  # remedy - unchanged run, within prompts
    claim: bool  # beyond chance, at 5 % over all remedies

    @property
    def helps(self) -> bool:
        """Return whether the reward is higher with the remedy."""
        return self.claim and self.found.mean > 0


def list_effects(control: Fork, forks: Sequence[Fork]) -> list[Effect]:
    """Compute the effect of each remedy by Student's t over the prompts with scores in both forks,
    with Holm's correction over the remedies and matching intervals. With fewer than ten prompts
    nothing is claimed."""
    resolution = find_smallest_step([*control.rewards.values()])
    tried = [fork for fork in forks if control.rewards.keys() & fork.rewards.keys()]
    sides = [pair_rewards(control, fork) for fork in tried]
    found = [compare_pairs(a, b, resolution=resolution) for a, b in sides]
    p = holm([d.evidence() for d in found])
    levels = holm_levels([d.evidence() for d in found])
    return [
        Effect(fork, compare_pairs(a, b, level=level, resolution=resolution), adjusted <= ALPHA)
        for fork, (a, b), adjusted, level in zip(tried, sides, p, levels, strict=True)
    ]


def pair_rewards(control: Fork, fork: Fork) -> tuple[list[float], list[float]]:
    """Return the rewards of the prompts with scores in both forks, in the same order."""
    shared = sorted(control.rewards.keys() & fork.rewards.keys())
    return [control.rewards[task] for task in shared], [fork.rewards[task] for task in shared]


def say_effect(effect: Effect) -> str:
    """Describe an effect in plain words."""
    d = effect.found
    what = f"{effect.fork.title} ({' '.join(effect.fork.overrides)})"
    if effect.fork.title == ", ".join(effect.fork.overrides):
        what = effect.fork.title
    if d.n < TO_CLAIM:
        return f"{what}: {d.n} prompts claim nothing; {TO_CLAIM} are needed."
    if not effect.claim:
        return f"{what}: no measurable effect ({d.low:+.3f} to {d.high:+.3f})."
    side = "higher" if d.mean > 0 else "lower"
    low, high = sorted((abs(d.low), abs(d.high)))
    return f"{what}: reward is {side} by {abs(d.mean):.3f} ({low:.3f} to {high:.3f})."


def judge_findings(findings: Sequence[Finding], effects: Sequence[Effect]) -> list[str]:
    """Say which findings are confirmed: their remedy was tried and raised the reward, with an
    interval above 0."""
    tried = {tuple(own.fork.overrides): own for own in effects}
    lines = []
    for number, finding in enumerate(findings, 1):
        effect = tried.get(finding.remedy)
        verdict = "not tested"
        if effect is not None:
            verdict = "confirmed by its trial" if effect.helps else "not confirmed by its trial"
        lines.append(f"Finding {number} is {verdict}. {finding.title}")
    return lines


def sum_up(
    control: Fork,
    forks: Sequence[Fork],
    effects: Sequence[Effect],
    findings: Sequence[Finding] = (),
) -> list[str]:
    """Write lines on the baseline, the effects from the largest down, the confirmed findings, and
    the basis of the effects."""
    ordered = sorted(effects, key=lambda own: (not own.claim, -abs(own.found.mean)))
    lines = []
    if control.rewards:
        base = sum(control.rewards.values()) / len(control.rewards)
        lines.append(f"The run as it is, the baseline: mean reward {base:.3f}.")
    same = []
    for own in ordered:
        before, after = pair_rewards(control, own.fork)
        if before == after and own.found.n >= TO_CLAIM:
            same.append(own)
    lines += [say_effect(own) for own in ordered if own not in same]
    if same:
        names = "; ".join(" ".join(own.fork.overrides) for own in same)
        lines.append(f"The same reward on every prompt as the baseline: {names}.")
    lines += judge_findings(findings, effects)
    if not any(own.helps for own in effects):
        lines.append(
            f"In {control.steps} steps no change raised the reward measurably. Nothing can be told"
            f" from these trials; more steps show smaller effects (steps={4 * control.steps})."
        )
    prompts = max((own.found.n for own in effects), default=0)
    seconds = sum(own.seconds for own in (control, *forks))
    tried = "1 change" if len(forks) == 1 else f"{len(forks)} changes"
    place = f"step {control.start}" if control.start else "the start"
    lines.append(
        f"(The baseline and {tried} were trained from {place}, {control.steps} steps each, in"
        f" {seconds / 60:.1f} minutes. Each change was tried alone, so another fault can hide its"
        f" effect. Rewards are of {prompts} later prompts, paired; intervals have 95 %, corrected"
        " for the number of changes. They are about this run from here on, and not about the"
        " algorithm.)"
    )
    return lines
