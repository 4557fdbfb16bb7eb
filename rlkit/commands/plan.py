"""`rlkit plan`: say how many seeds a comparison needs and how long they take, from the spread of a
pilot."""

from __future__ import annotations

import math
from typing import NamedTuple

from rlkit.commands.arguments import Answer, Arguments
from rlkit.commands.compare import read_effect, read_lines
from rlkit.errors import ConfigError
from rlkit.runs import verdicts
from rlkit.runs.comparing import TO_CLAIM, count_needed_seeds, find_detectable_effect, spread_bound
from rlkit.runs.reading import Group
from rlkit.statistics import FEWEST
from rlkit.system.output import clock

TAKES_TEXTS = True
GIVES_JSON = True

EFFECT = 0.02  # two points of accuracy


class Need(NamedTuple):
    """The seeds and time a comparison of two lines needs. The seeds are enough even if a small
    pilot underestimates the spread."""

    first: str
    second: str
    seeds: int
    seconds: float  # seconds of all runs together
    pilot_seeds: int
    pilot_spread: float
    spread_bound: float
    likely_seeds: int  # enough seeds if the true spread equals the pilot's
    given_seeds: int | None
    seen: float | None  # the smallest difference found by the given seeds


def command(arguments: Arguments) -> Answer:
    """Say how many seeds a comparison needs and how long they take, from the spread of a pilot with
    at least three seeds per line.

    FOLDER…        run folders or folders of runs of two lines or more
    effect=NUMBER  the difference to see; 0.02 by default
    seeds=N        also say what difference N seeds would find
    figure=NAME    as for rlkit compare, and so is at=UNIT
    --json         the same for a program

        rlkit plan outputs/grpo outputs/dapo effect=0.02
        rlkit plan outputs/grpo outputs/dapo seeds=10
    """
    groups, given = read_lines(arguments, "plan", ("figure", "at", "effect", "seeds"))
    compared = verdicts.find_shared_figure(groups, given.get("figure"), given.get("at"))
    found = verdicts.judge_lines(groups, compared) if compared else []
    known = [v for v in found if v.found.n >= FEWEST]
    if not compared or not known:
        raise ConfigError(
            f"rlkit plan: the pilot needs two kinds of runs with at least {FEWEST} seeds in common"
        )
    effect = read_effect(given, EFFECT)
    text = given.get("seeds", "0")
    seeds = int(text) if text.isdecimal() else 0
    if "seeds" in given and seeds < TO_CLAIM:
        raise ConfigError(
            f"seeds={text}: give a whole number, {TO_CLAIM} or more; fewer seeds claim nothing"
        )
    count = len(known)
    each = average_seconds(groups)
    corrected = f", {count} comparisons" if count > 1 else ""
    head = (
        f"to see a difference of {effect:g} in the {compared.name}, 4 times in 5, at 95"
        f" %{corrected}"
    )
    needs = [
        plan_seeds(v, effect, count, each[v.first] + each[v.second], seeds or None) for v in known
    ]
    data = {"figure": compared.name, "effect": effect, "comparisons": needs}
    repeated = verdicts.list_repeated_seeds(groups)
    return Answer(data, "\n".join([head, *map(phrase_need, needs), *repeated]))


def plan_seeds(
    verdict: verdicts.Compared, effect: float, comparisons: int, each: float, seeds: int | None
) -> Need:
    """Plan the seeds of a comparison.

    Args:
      each: seconds for one run of each of the two lines, added up.
      seeds: the user's number of seeds, at least TO_CLAIM.
    """
    spread = verdict.found.spread
    bound = spread_bound(spread, verdict.found.n)
    needed, likely = (
        count_needed_seeds(own, effect, comparisons=comparisons) for own in (bound, spread)
    )
    return Need(
        verdict.first,
        verdict.second,
        needed,
        needed * each,
        verdict.found.n,
        spread,
        bound,
        likely,
        seeds,
        find_detectable_effect(bound, seeds, comparisons=comparisons) if seeds else None,
    )


def phrase_need(need: Need) -> str:
    """Write a need in sentences."""
    known = (
        f"The pilot's spread is {need.pilot_spread:.4f} ({need.pilot_seeds} seeds), and the true"
        f" one may be {need.spread_bound:.4f}"
    )
    if need.likely_seeds < need.seeds:
        known += f"; if it is no larger than the pilot's, {need.likely_seeds} seeds are enough"
    took = clock(need.seconds) if need.seconds else "unknown time"
    text = (
        f"  {need.second} against {need.first}: {need.seeds} seeds, {took} of runs, one at a time\n"
        f"    {known}."
    )
    if need.seen is not None:
        text += (
            f"\n    With {need.given_seeds} seeds a difference of {need.seen:.4f} is found 4 times"
            " in 5."
        )
    return text


def average_seconds(groups: list[Group]) -> dict[str, float]:
    """Average the wall seconds of each line's runs, from the pilot's summaries; 0 if none is
    known."""
    out = {}
    for group in groups:
        known = [float(run.summary.get("wall_seconds") or 0.0) for run in group.runs]
        known = [seconds for seconds in known if seconds]
        out[group.label] = math.fsum(known) / len(known) if known else 0.0
    return out
