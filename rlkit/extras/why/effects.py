"""Results of forks: paired effects over prompts, corrected for the number of remedies, in
sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    claim: bool  # no chance, at 5 % over all remedies

    @property
    def helps(self) -> bool:
        """Whether the reward is higher with the remedy."""
        return self.claim and self.found.mean > 0


def list_effects(control: Fork, forks: Sequence[Fork]) -> list[Effect]:
    """Student's t over the prompts with scores in both forks; Holm's correction over the remedies,
    with intervals to match. Fewer than ten prompts claim nothing."""
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
    """The rewards of the prompts with scores in both, in one order."""
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
        return f"{what}: no effect that could be seen ({d.low:+.3f} to {d.high:+.3f})."
    side = "higher" if d.mean > 0 else "lower"
    low, high = sorted((abs(d.low), abs(d.high)))
    return f"{what}: reward is {side} by {abs(d.mean):.3f} ({low:.3f} to {high:.3f})."


def sum_up(control: Fork, forks: Sequence[Fork], effects: Sequence[Effect]) -> list[str]:
    """List the effects, the largest first, and their basis."""
    ordered = sorted(effects, key=lambda own: (not own.claim, -abs(own.found.mean)))
    lines = [say_effect(own) for own in ordered]
    if not any(own.helps for own in effects):
        lines.append(
            f"No remedy raises the reward that could be seen in {control.steps} steps. Nothing can"
            " be told from these forks; more steps see smaller effects (steps="
            f"{4 * control.steps})."
        )
    prompts = max((own.found.n for own in effects), default=0)
    seconds = sum(own.seconds for own in (control, *forks))
    count = control.steps * (1 + len(forks))
    tried = "1 remedy" if len(forks) == 1 else f"{len(forks)} remedies"
    place = f"step {control.start}" if control.start else "the start"
    lines.append(
        f"({tried} tried from {place}, {count} steps, {seconds / 60:.1f} minutes;"
        f" reward of {prompts} further prompts of this run, paired, 95 % corrected for the number"
        " of remedies. It speaks of this run at this place, and not of the algorithm.)"
    )
    return lines
