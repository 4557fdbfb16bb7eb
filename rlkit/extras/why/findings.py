"""List the findings of a run that need no further training, the likeliest cause first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlkit.extras.why import data, settings
from rlkit.extras.why.attacks import attack
from rlkit.extras.why.evidence import Evidence, Finding
from rlkit.extras.why.remedies import apply_remedy, read_groups
from rlkit.rewards import Reward
from rlkit.runs.trends import find_symptoms

BROKEN = 5  # checks of `data` before the reward: their findings hide everything else

# checks of single steps, not covered by another check of the run
OF_STEPS = ("no gradient", "update skipped", "version wrong")
EQUAL = ("hard", "easy", "groups", "equal")  # ways for rewards to be equal
# cause → further causes explained by it
EXPLAINS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("tool", "unread", "sign", "hackable", "cut", "temperature"), EQUAL),
    **dict.fromkeys(("hard", "easy", "groups"), ("equal",)),
    # a destroyed policy earns the same with every reply
    "rate_high": ("frozen", "groups", "equal"),
    "frozen": ("groups", "equal", "rate_low"),
}


def list_findings(e: Evidence, reward: Reward | None = None) -> list[Finding]:
    """List the findings of a run: first on broken parts, then on the reward, the rows and the
    settings, then on the whole run.

    Args:
      reward: the run's reward, to score trial answers; None tries no answers.
    """
    broken = [check(e) for check in data.CHECKS[:BROKEN]]
    paid = attack(reward, e.tasks) if reward is not None else None
    own = settings.REWARDED if e.rewarded else settings.CHECKS
    rest = [check(e) for check in (*data.CHECKS[BROKEN:], *own)]
    drifts = [
        Finding(
            "drift",
            f"A fault in {len(symptom.steps)} steps: {symptom.check}."
            if symptom.steps
            else f"A drift: {symptom.check}.",
            f"{symptom.text[:1].upper()}{symptom.text[1:]}.",
            "",
        )
        for symptom in find_symptoms(e.run)
        if not symptom.steps or symptom.check in OF_STEPS
    ]
    found = drop_symptoms([f for f in (*broken, paid, *rest, *drifts) if f is not None])
    # a change of a group replaced by the phases would have no effect
    return [
        f._replace(remedy=() if read_groups(f.remedy) & e.replaced else f.remedy) for f in found
    ]


def drop_symptoms(findings: Sequence[Finding]) -> list[Finding]:
    """Drop findings that an earlier finding explains. For example, a truncated reply earns nothing,
    so the problem of this reply only looks too hard."""
    causes = {finding.cause for finding in findings}
    hidden = {own for cause in causes for own in EXPLAINS.get(cause, ())}
    return [finding for finding in findings if finding.cause not in hidden]


def say_findings(findings: Sequence[Finding], given: Sequence[str] = ()) -> list[str]:
    """Write the cause, evidence and remedy of each finding in lines.

    Args:
      given: overrides of the user's train command.
    """
    lines = []
    for number, finding in enumerate(findings, 1):
        lines.append(f"{number}. {finding.title} {finding.evidence}")
        if finding.advice:
            lines.append(f"   {finding.advice}")
        if finding.remedy:
            lines.append(f"   {say_change(finding.remedy, given)}")
    if len(findings) > 1:
        lines.append("Change one thing at a time, and begin with 1.")
    return lines


def say_change(remedy: Sequence[str], given: Sequence[str]) -> str:
    """Say how the user's train command changes. It quotes the overrides that the remedy
    replaces."""
    kept = apply_remedy(given, remedy)
    replaced = " ".join(text for text in given if text not in kept)
    if replaced:
        return f"In your train command, replace {replaced} with: {' '.join(remedy)}"
    return f"Add to your train command: {' '.join(remedy)}"


def say_healthy(e: Evidence) -> str:
    """Say that nothing was found. If the reward does not rise, also say how to find out more."""
    said = f"No known fault was found in these {e.steps} steps."
    if e.progress.rose:
        return said
    return f"{said} More steps show smaller changes: set trainer.steps={4 * e.steps}."


def say_progress(e: Evidence) -> str:
    """Say in a sentence whether the reward rises, is flat, falls or collapsed."""
    first, last, _ = e.progress
    if e.steps < 3:
        return f"The run has {e.steps} of the 3 steps needed to say whether the reward rises."
    size = e.steps // 3
    begun = f"the first {size} of {e.steps} steps" if size > 1 else f"the first of {e.steps} steps"
    ended = f"the last {size}" if size > 1 else "the last"
    went = f"it was {first:.3f} on average in {begun}, and {last:.3f} in {ended}"
    if e.progress.rose:
        return f"The reward rises: {went}."
    if first - last <= e.progress.chance:
        return f"The reward is flat: {went}. A change below {e.progress.chance:.2g} may be chance."
    verb = "collapsed" if first > 0 and last < settings.LOST * first else "falls"
    return f"The reward {verb}: {went}."
