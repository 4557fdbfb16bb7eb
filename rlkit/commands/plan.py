"""`rlkit plan`: how many seeds a comparison needs, and how long they take, from the spread of a
pilot."""

from __future__ import annotations

import math

from rlkit.commands.arguments import Arguments
from rlkit.commands.compare import effect_of, lines_of
from rlkit.errors import ConfigError
from rlkit.runs import verdicts
from rlkit.runs.comparing import TO_CLAIM, detectable, seeds_needed, spread_bound
from rlkit.runs.reading import Group
from rlkit.statistics import FEWEST
from rlkit.system.output import clock

TAKES_TEXTS = True
READS_NO_CODE = True

EFFECT = 0.02  # two points of accuracy


def command(arguments: Arguments) -> int:
    """Say how many seeds a comparison needs and how long they take, from the spread of a pilot of
    at least three seeds a line.

    FOLDER…        run folders or folders of runs of two lines or more
    effect=NUMBER  the difference to see; 0.02 by default
    seeds=N        also say what so many seeds would find
    figure=NAME    as for rlkit compare

        rlkit plan outputs/grpo outputs/dapo effect=0.02
        rlkit plan outputs/grpo outputs/dapo seeds=10
    """
    groups, given = lines_of(arguments, "plan")
    compared = verdicts.shared_figure(groups, given.get("figure"), given.get("at"))
    found = verdicts.verdicts(groups, compared) if compared else []
    known = [v for v in found if v.found.n >= FEWEST]
    if not compared or not known:
        raise ConfigError(
            f"rlkit plan: the pilot needs two kinds of runs with at least {FEWEST} seeds in common"
        )
    effect = effect_of(given, EFFECT)
    count = len(known)
    each = seconds_of(groups)
    corrected = f", {count} comparisons" if count > 1 else ""
    print(
        f"to see a difference of {effect:g} in the {compared.name}, 4 times in 5, at 95"
        f" %{corrected}"
    )
    for v in known:
        print("\n".join(plan_lines(v, effect, count, each, given.get("seeds"))))
    return 0


def plan_lines(
    verdict: verdicts.Compared, effect: float, comparisons: int, each: float, seeds: str | None
) -> list[str]:
    """The seeds that a comparison needs. First those that keep the promise, however much of the
    spread a small pilot hides."""
    spread = verdict.found.spread
    pilot = verdict.found.n
    bound = spread_bound(spread, pilot)
    needed, likely = (seeds_needed(own, effect, comparisons=comparisons) for own in (bound, spread))
    known = (
        f"The pilot's spread is {spread:.4f} ({pilot} seeds), and the true one may be {bound:.4f}"
    )
    if likely < needed:
        known += f"; if it is no larger than the pilot's, {likely} seeds are enough"
    out = [
        (
            f"  {verdict.second} against {verdict.first}: {needed} seeds, {duration(needed, each)}"
            " of runs, one at a time"
        ),
        f"    {known}.",
    ]
    return out + (
        [f"    With {seeds} seeds {in_power(seeds, bound, comparisons)}."] if seeds else []
    )


def in_power(text: str, spread: float, comparisons: int) -> str:
    """What a given number of seeds would find, with a spread as large as it may be."""
    if not text.isdigit() or int(text) < TO_CLAIM:
        raise ConfigError(
            f"seeds={text}: give a whole number, {TO_CLAIM} or more; fewer seeds claim nothing"
        )
    return (
        f"a difference of {detectable(spread, int(text), comparisons=comparisons):.4f} is found 4"
        " times in 5"
    )


def seconds_of(groups: list[Group]) -> float:
    """Wall seconds of one run of each line together, from the pilot's summaries."""
    known = [
        [float(run.summary.get("wall_seconds") or 0.0) for run in group.runs] for group in groups
    ]
    return math.fsum(math.fsum(own) / len(own) for own in known)


def duration(seeds: int, each: float) -> str:
    """How long that many seeds of all lines take."""
    return clock(seeds * each) if each else "unknown time"
