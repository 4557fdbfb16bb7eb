"""`rlkit plan`: how many seeds a comparison needs, and how long they take, from the spread of a pilot."""

from __future__ import annotations

import math

from rlkit.commands.arguments import Arguments
from rlkit.commands.compare import effect_of, lines_of
from rlkit.errors import ConfigError
from rlkit.runs.comparing import FEWEST, detectable, power_of, seeds_needed, spread_bound
from rlkit.runs.report import verdicts
from rlkit.runs.report.read import Group
from rlkit.system.output import clock

EFFECT = 0.02  # two points of accuracy


def command(arguments: Arguments) -> int:
    """Folders of a pilot, two kinds of runs on seeds of their own, at least three; effect=DIFFERENCE, seeds=N, figure=."""
    groups, given = lines_of(arguments, "plan")
    compared = verdicts.shared_figure(groups, given.get("figure"), given.get("at"))
    found = verdicts.verdicts(groups, compared) if compared else []
    known = [v for v in found if v.found.n >= FEWEST]
    if not compared or not known:
        raise ConfigError(f"rlkit plan: the pilot needs two kinds of runs with at least {FEWEST} seeds in common")
    effect, count, each = effect_of(given, EFFECT), len(known), seconds_of(groups)
    print(f"to see a difference of {effect:g} in the {compared.name}, 4 times in 5, at 95 %" + (f", {count} comparisons" * (count > 1)))
    for v in known:
        floor = compared.resolution / math.sqrt(12)  # of a pilot whose differences are equal by rounding
        spread = max(v.found.spread, floor)
        likely, safe = (seeds_needed(s, effect, comparisons=count) for s in (spread, spread_bound(spread, v.found.n)))
        print(f"  {v.second} against {v.first}: {likely} seeds by the spread of the pilot ({spread:.3f}, {v.found.n} seeds), {safe} to be")
        print(f"    safe, as so few may show too small a spread; {duration(likely, each)} or {duration(safe, each)} of runs, one at a time")
        if seeds := given.get("seeds"):
            print(f"    with {seeds} seeds: {in_power(seeds, spread, effect, count)}")
    return 0


def in_power(text: str, spread: float, effect: float, comparisons: int) -> str:
    """What a given number of seeds would find."""
    if not text.isdigit() or int(text) < FEWEST:
        raise ConfigError(f"seeds={text}: give a whole number, {FEWEST} or more")
    n = int(text)
    seen = detectable(spread, n, comparisons=comparisons)
    chance = f"a difference of {effect:g} is found {power_of(spread, effect, n):.0%} of the time" if comparisons == 1 else ""
    return "; ".join(part for part in (chance, f"{seen:.3f} is found 4 times in 5" if math.isfinite(seen) else "too few") if part)


def seconds_of(groups: list[Group]) -> float:
    """Wall seconds of one run of each line together, from the pilot's summaries."""
    known = [[float(run.summary.get("wall_seconds") or 0.0) for run in group.runs] for group in groups]
    return math.fsum(math.fsum(own) / len(own) for own in known)


def duration(seeds: int, each: float) -> str:
    """How long that many seeds of all lines take."""
    return clock(seeds * each) if each else "unknown time"
