"""All free findings of a run, the likeliest cause first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlkit.extras.why import data, settings
from rlkit.extras.why.attacks import attack
from rlkit.extras.why.evidence import Evidence, Finding
from rlkit.rewards import Reward
from rlkit.runs.tables import find_symptoms

BROKEN = 5  # checks of `data` before the reward: their findings hide everything else

EQUAL = ("hard", "easy", "groups", "equal")  # ways for rewards to be equal
# cause → further causes explained by it
EXPLAINS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("tool", "unread", "sign", "hackable", "cut", "temperature"), EQUAL),
    **dict.fromkeys(("hard", "easy", "groups"), ("equal",)),
    "rate_high": ("groups", "equal"),  # a destroyed policy earns the same with every reply
}


def list_findings(e: Evidence, reward: Reward | None = None) -> list[Finding]:
    """Findings on broken parts; then on the reward, the rows, the settings; then on the whole run.

    Args:
      reward: of the run, to try answers on; None tries none.
    """
    broken = [check(e) for check in data.CHECKS[:BROKEN]]
    paid = attack(reward, e.tasks) if reward is not None else None
    own = settings.REWARDED if e.rewarded else settings.CHECKS
    rest = [check(e) for check in (*data.CHECKS[BROKEN:], *own)]
    drifts = [
        Finding(
            "drift",
            f"A drift: {symptom.check}.",
            f"{symptom.text[:1].upper()}{symptom.text[1:]}.",
            "",
        )
        for symptom in find_symptoms(e.run)
        if not symptom.steps
    ]
    return drop_symptoms([f for f in (*broken, paid, *rest, *drifts) if f is not None])


def drop_symptoms(findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings explained by an earlier one: a cut reply earns nothing, so its problem only
    looks too hard."""
    causes = {finding.cause for finding in findings}
    hidden = {own for cause in causes for own in EXPLAINS.get(cause, ())}
    return [finding for finding in findings if finding.cause not in hidden]


def say_findings(findings: Sequence[Finding]) -> list[str]:
    """Write cause, evidence and remedy of each, in lines."""
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.title} {finding.evidence}")
        if finding.advice:
            lines.append(f"   {finding.advice}")
        if finding.remedy:
            lines.append(f"   change: {' '.join(finding.remedy)}")
    return lines


def say_progress(e: Evidence) -> str:
    """Describe the course of the reward in a sentence."""
    own = e.progress
    went = f"{e.steps} steps; the reward went from {own.first:.3f} to {own.last:.3f}"
    if e.steps < 3:
        return f"{e.steps} step(s), too few to say how the reward goes."
    if own.rose:
        return f"{went} (first and last third): it rises."
    return f"{went} (first and last third): it does not rise by more than chance."
