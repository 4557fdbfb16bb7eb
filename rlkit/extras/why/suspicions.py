"""Say the likeliest cause in two sentences, for the last lines of runs, comparisons and sweeps."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlkit.extras.why.evidence import Evidence, Finding, read_played
from rlkit.extras.why.findings import list_findings
from rlkit.extras.why.remedies import STEPS, choose_budget, list_remedies
from rlkit.runs import folder as runs
from rlkit.runs.reading import Group, ReadRun, group_runs, read_run

LONG = 10  # RL steps; a shorter run may not have risen yet
TOLD = 2  # lines of runs with a sentence each


class Suspicion(NamedTuple):
    """The likeliest cause of a run, and its evidence."""

    finding: Finding
    e: Evidence


def say_suspicions(folders: Sequence[Path]) -> list[str]:
    """Say in at most two sentences why these runs do not learn, and give the commands to prove it.

    For one line of runs, say the cause with its numbers. For several lines, say a sentence about
    each. Only the folders are read: no reward is called, and no config is composed.
    """
    groups = group_runs([read_run(folder) for folder in folders])
    found = [(group, own) for group in groups if (own := suspect_line(group)) is not None]
    lines = []
    for group, (finding, e) in found[:TOLD]:
        said = f"{finding.title} {finding.evidence}"
        if len(groups) > 1:
            said = f"{group.label}: {finding.title}"
        lines += [f"suspicion: {said}", f"  to prove it: {write_proof(e, finding)}"]
    if len(found) > TOLD:
        lines.append(f"  suspicions on {len(found) - TOLD} more lines: rlkit why RUN")
    return lines


def suspect_line(group: Group) -> Suspicion | None:
    """Return the cause that comes first in more than half of a line's runs."""
    found = [own for run in group.runs if (own := suspect_run(run)) is not None]
    counts = Counter(own.finding.cause for own in found)
    for own in found:
        if 2 * counts[own.finding.cause] > len(group.runs):
            return own
    return None


def suspect_run(run: ReadRun) -> Suspicion | None:
    """Return the first finding on a run of at least ten steps whose reward has not risen. Drifts
    are left out, because they have warnings of their own."""
    bare = Evidence(run, {})
    if bare.steps < LONG or bare.progress.rose:
        return None
    e = Evidence(run, read_played(run.folder))
    named = (Suspicion(own, e) for own in list_findings(e) if own.cause != "drift")
    return next(named, None)


def write_proof(e: Evidence, finding: Finding) -> str:
    """Write the command that continues the run with the finding's remedy, or reads the whole
    diagnosis if no remedy can be tried."""
    command = f"rlkit why {shlex.quote(runs.shorten_path(e.run.folder))}"
    remedies = list_remedies(e, [finding])
    if finding.remedy not in [own.overrides for own in remedies]:
        return command
    return f"{command} minutes={choose_budget(e, remedies, STEPS)}"
