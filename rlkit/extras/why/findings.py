"""All findings of a run that cost nothing, the likeliest cause first."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.extras.why import data, settings
from rlkit.extras.why.attacks import attack
from rlkit.extras.why.evidence import Evidence, Finding
from rlkit.rewards import Reward
from rlkit.runs.tables import symptoms

BROKEN = 5  # checks of `data` that stand before the reward: what they find hides everything else


def list_findings(e: Evidence, reward: Reward | None = None) -> list[Finding]:
    """What is broken; then the reward, the rows, the settings; then what only the whole run shows.

    Args:
      reward: of the run, to try answers on; None tries none.
    """
    broken = [check(e) for check in data.CHECKS[:BROKEN]]
    paid = attack(reward, e.tasks) if reward is not None else None
    rest = [check(e) for check in (*data.CHECKS[BROKEN:], *settings.CHECKS)]
    drifts = [
        Finding(
            "drift",
            f"A drift: {symptom.check}.",
            f"{symptom.text[:1].upper()}{symptom.text[1:]}.",
            "",
        )
        for symptom in symptoms(e.run)
        if not symptom.steps
    ]
    return [finding for finding in (*broken, paid, *rest, *drifts) if finding is not None]


def say_findings(findings: Sequence[Finding]) -> list[str]:
    """Cause, evidence and remedy of each, in lines."""
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.title} {finding.evidence}")
        if finding.advice:
            lines.append(f"   {finding.advice}")
        if finding.remedy:
            lines.append(f"   change: {' '.join(finding.remedy)}")
    return lines


def say_progress(e: Evidence) -> str:
    """How the reward went, in a sentence."""
    own = e.progress
    went = f"{e.steps} steps; the reward went from {own.first:.3f} to {own.last:.3f}"
    if e.steps < 3:
        return f"{e.steps} step(s), too few to say how the reward goes."
    if own.rose:
        return f"{went} (first and last third): it rises."
    return f"{went} (first and last third): it does not rise by more than chance."
