"""Say in a plain sentence which line of runs is better. Differences are paired by seed, and claims
are corrected for the number of comparisons.

A line is a group of runs with equal settings and different seeds. Runs with the same seed share
problems, order and sampling noise. Therefore lines are compared within seeds, and the seeds are the
independent units.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any, Literal, NamedTuple

from rlkit.errors import ConfigError
from rlkit.runs.comparing import (
    ALPHA,
    TO_CLAIM,
    Difference,
    compare_pairs,
    count_needed_seeds,
    find_detectable_effect,
    find_smallest_step,
    holm,
    holm_levels,
    spread_bound,
)
from rlkit.runs.reading import Group, ReadRun, find_differences, is_number, read_series
from rlkit.statistics import FEWEST

# default difference for which the needed seeds are counted: one percentage point of accuracy
EFFECT = 0.01
LAST = 10  # number of RL steps at the end of a run over which training rewards are compared
UNEVEN = 0.02  # relative difference of two budgets above which a note names both
Unit = Literal["steps", "updates", "samples", "tokens", "seconds"]
UNITS: Mapping[str, str] = {
    "steps": "RL steps",
    "updates": "optimiser steps",
    "samples": "sampled rollouts",
    "tokens": "tokens trained on",
    "seconds": "seconds",
}
# settings with an effect on the problems and their scoring
PROBLEMS = ("task.", "evaluation.", "environment.")


class Figure(NamedTuple):
    """Hold the numbers, one per run, by which lines are compared."""

    name: str
    values: list[dict[int, float]]  # for each line: seed → figure
    resolution: float = 0.0  # smallest possible difference between two values of the figure


class Compared(NamedTuple):
    """Hold the verdict on two lines. `found` is the difference `second - first`, and `p` is its
    p-value, corrected for the number of comparisons."""

    first: str
    second: str
    found: Difference
    p: float
    claim: Literal["better", "worse", "open"]  # about the second line; open: no claim
    sentence: str


# ------------------------------------------------------------------------------------------ figures


def _side(run: ReadRun, side: str, name: str) -> float | None:
    value: Any = (run.summary.get(side) or {}).get(name)
    return float(value) if is_number(value) else None


def _curve(run: ReadRun) -> float | None:
    """Average the validation accuracy over the steps. This is the area under the curve, computed by
    trapezoids and divided by the number of steps."""
    points = sorted(read_series(run, "eval/accuracy").items())
    width = points[-1][0] - points[0][0] if points else 0
    return (
        sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points)) / width
        if width
        else None
    )


def _training(run: ReadRun) -> float | None:
    last = list(read_series(run, "reward/mean").values())[-LAST:]
    return math.fsum(last) / len(last) if last else None


FIGURES: Mapping[str, tuple[str, Callable[[ReadRun], float | None]]] = {
    "test": ("test accuracy", lambda run: _side(run, "after", "accuracy")),
    "test_reward": ("test reward", lambda run: _side(run, "after", "reward")),
    "validation": ("validation accuracy", lambda run: _side(run, "validation", "accuracy")),
    "curve": ("mean validation accuracy over the run", _curve),
    "reward": (f"training reward of the last {LAST} steps", _training),
}


def find_shared_figure(
    groups: Sequence[Group], name: str | None = None, at: str | None = None
) -> Figure | None:
    """Return the figure with this name, or else the first figure with values for at least two
    lines. Return None if no figure has values for two lines.

    Args:
      name: one of FIGURES.
      at: a unit of budget, one of UNITS. The figure is then the validation accuracy at the largest
        budget that every run has reached.
    Raises: ConfigError for another name or unit, for both a name and a unit, or if fewer than two
      lines have the named figure.
    """
    if name is not None and name not in FIGURES:
        raise ConfigError(f"figure={name}: no such figure; there are: {', '.join(FIGURES)}")
    if at is not None and at not in UNITS:
        raise ConfigError(f"at={at}: no such budget; there are: {', '.join(UNITS)}")
    if at is not None and name is not None:
        raise ConfigError(
            f"figure={name} at={at}: at equal budgets only validation accuracies are compared."
            f" Leave out figure={name}, or at={at}"
        )
    if at is not None:
        return _find_budget_figure(groups, at)
    for key in [name] if name else FIGURES:
        title, read = FIGURES[key]
        values = [
            {run.seed or 0: value for run in group.runs if (value := read(run)) is not None}
            for group in groups
        ]
        if sum(map(bool, values)) > 1:
            return Figure(title, values, _resolution(groups, values, accuracy="reward" not in key))
    if name:
        raise ConfigError(f"figure={name}: fewer than two of the lines have a {FIGURES[name][0]}")
    return None


def _find_budget_figure(groups: Sequence[Group], at: str) -> Figure:
    """Return the figure of the last validation accuracy in each run, within the largest budget that
    all runs have spent."""
    spent = [[read_budget(run, at) for run in group.runs] for group in groups]
    shared = min((max(own.values(), default=0.0) for of in spent for own in of), default=0.0)
    values: list[dict[int, float]] = []
    for group, of in zip(groups, spent, strict=True):
        values.append({})
        for run, own in zip(group.runs, of, strict=True):
            curve = read_series(run, "eval/accuracy")
            within = [
                step
                for step in curve
                if all(cost <= shared for past, cost in own.items() if past <= step)
            ]
            values[-1] |= {run.seed or 0: curve[max(within)]} if within else {}
    if sum(map(bool, values)) < 2:
        raise ConfigError(
            f"at={at}: needs evaluations during training, and these runs have none; train with"
            " evaluation.every=N"
        )
    name = f"validation accuracy after {shared:,.0f} {UNITS[at]}"
    return Figure(name, values, _resolution(groups, values, accuracy=True))


def _resolution(
    groups: Sequence[Group], values: Sequence[Mapping[int, float]], *, accuracy: bool
) -> float:
    """Return the smallest step of a figure. For an accuracy it is 1 / distinct problems. For a
    reward, whose scale is free, it is the smallest step seen."""
    seen = find_smallest_step([value for own in values for value in own.values()])
    counts = _problem_counts(groups)
    if not counts or (seen and not accuracy):
        return seen
    return 1 / min(counts)


def _problem_counts(groups: Sequence[Group]) -> list[int]:
    """List the number of distinct problems, for every test or validation result that records this
    number."""
    sides = [
        run.summary.get(side)
        for group in groups
        for run in group.runs
        for side in ("after", "validation")
    ]
    return [
        count for side in sides if isinstance(side, Mapping) and (count := count_problems(side))
    ]


def count_problems(result: Mapping[str, Any]) -> int:
    """Return the number of distinct problems of an evaluation; 0 if not recorded."""
    found = result.get("distinct")
    return found if isinstance(found, int) and found > 0 else 0


# ------------------------------------------------------------------------------------------ budgets


def read_budget(run: ReadRun, unit: str) -> dict[int, float]:
    """Read the budget that a run has spent up to the end of each RL step. `unit` is one of
    UNITS."""
    rows = [row for row in run.rows if "reward/mean" in row]  # null if no reply was scored
    size = run.settings.get("batch.group_size") or 1
    spent: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "steps": lambda row: 1,
        "updates": lambda row: row.get("optim/updates"),
        "samples": lambda row: (
            row["group/sampled"] * size if is_number(row.get("group/sampled")) else None
        ),
        "seconds": lambda row: row.get("perf/step_s"),
    }
    if unit == "tokens":
        return {step: value for step, value in read_series(run, "tokens/total").items() if step}
    each = [value if is_number(value := spent[unit](row)) else 0.0 for row in rows]
    return dict(zip((row["step"] for row in rows), accumulate(each), strict=True))


def average_budgets(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Return unit → the mean budget spent by the runs of each line. A unit that no run records is
    left out."""
    table = {
        unit: [
            _mean([max(read_budget(run, unit).values(), default=0.0) for run in group.runs])
            for group in groups
        ]
        for unit in UNITS
    }
    return {unit: values for unit, values in table.items() if any(values)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def list_repeated_seeds(groups: Sequence[Group]) -> list[str]:
    """Return a sentence on each line with several runs of one seed. Only the last of these runs has
    a figure."""
    out = []
    for group in groups:
        counts = Counter(run.seed or 0 for run in group.runs)
        twice = ", ".join(str(seed) for seed, count in sorted(counts.items()) if count > 1)
        if twice:
            out.append(
                f"{group.label} has several runs of seed {twice}, and only the last of each seed"
                " counts. To choose another, leave out the folder of the last one."
            )
    return out


def list_notes(groups: Sequence[Group], compared: Figure) -> list[str]:
    """List remarks for a reader of the verdicts: about repeated seeds, runs without the figure,
    unequal budgets, and different settings that change the problems or the reward."""
    out = list_repeated_seeds(groups)
    for group, own in zip(groups, compared.values, strict=True):
        seeds = [str(seed) for run in group.runs if (seed := run.seed or 0) not in own]
        if seeds:
            out.append(
                f"{len(seeds)} of {len(group.runs)} runs of {group.label} have no {compared.name}"
                f" and are left out (seed {', '.join(seeds)}). If they failed, the others may be"
                " the luckier ones."
            )
    comparable = all(read_series(run, "eval/accuracy") for g in groups for run in g.runs)
    for unit, values in average_budgets(groups).items():
        if unit != "seconds" and min(values) < (1 - UNEVEN) * max(values):
            said = ", ".join(
                f"{group.label} {value:,.0f}" for group, value in zip(groups, values, strict=True)
            )
            out.append(
                f"The lines had unequal budgets, in {UNITS[unit]}: {said}."
                + (f" `rlkit compare` with at={unit} compares them at equal budgets." * comparable)
            )
    rewards = "reward" in compared.name  # a phase may have a reward of its own
    changed = [
        key
        for key in find_differences([group.runs[0] for group in groups])
        if (key.startswith(PROBLEMS) or (rewards and "reward." in key)) and "suggests" not in key
    ]
    if changed:
        out.append(
            f"The lines differ in {', '.join(changed[:4])}, so their figures may be from different"
            f" problems{' or on different scales' * rewards}."
        )
    return out


# ----------------------------------------------------------------------------------------- verdicts


def judge_lines(
    groups: Sequence[Group], compared: Figure, *, every_pair: bool = False, effect: float = EFFECT
) -> list[Compared]:
    """Compare each line with the first line, or compare every pair of lines.

    The test is Student's t of the differences within seeds, with Holm's correction over the
    comparisons with enough seeds. The intervals match the claims: an interval leaves out 0 exactly
    if a difference is claimed. Below `TO_CLAIM` common seeds nothing is claimed.

    Args:
      effect: a difference, > 0. If nothing can be claimed, the verdict says how many seeds are
        needed to find a difference this large.
    """
    places = (
        list(combinations(range(len(groups)), 2))
        if every_pair
        else [(0, i) for i in range(1, len(groups))]
    )
    places = [(a, b) for a, b in places if compared.values[a] and compared.values[b]]
    shared = [sorted(compared.values[a].keys() & compared.values[b].keys()) for a, b in places]
    sides = [
        tuple([compared.values[i][seed] for seed in seeds] for i in pair)
        for pair, seeds in zip(places, shared, strict=True)
    ]
    found = [
        compare_pairs(*own, resolution=compared.resolution) if own[0] else NOTHING for own in sides
    ]
    p = holm([d.evidence() for d in found])
    levels = holm_levels([d.evidence() for d in found])
    count = max(1, sum(d.n >= FEWEST for d in found))
    out = []
    for (a, b), own, first, adjusted, level in zip(places, sides, found, p, levels, strict=True):
        d = compare_pairs(*own, level=level, resolution=compared.resolution) if own[0] else first
        claim: Any = "better" if d.mean > 0 else "worse"
        if not adjusted <= ALPHA:
            claim = "open"
        names = groups[a].label, groups[b].label
        out.append(
            Compared(
                *names,
                d,
                adjusted,
                claim,
                phrase_verdict(*names, d, claim, effect=effect, comparisons=count),
            )
        )
    return out


NOTHING = Difference(math.nan, math.nan, math.nan, math.nan, math.nan, 0)


def phrase_verdict(
    first: str, second: str, d: Difference, claim: str, *, effect: float, comparisons: int
) -> str:
    """Write a verdict as a sentence."""
    if claim != "open":
        low, high = sorted((abs(d.low), abs(d.high)))
        return (
            f"{second} is {claim} than {first} by {abs(d.mean):.3f} ({low:.3f} to {high:.3f}),"
            f" {d.n} seeds."
        )
    head = f"{second} against {first}: no difference can be claimed"
    if d.n < FEWEST:
        return (
            f"{head}; they share {d.n or 'no'} seed{'s' * (d.n != 1)}, and fewer than {TO_CLAIM}"
            " claim nothing."
        )
    bound = spread_bound(d.spread, d.n)
    needed = count_needed_seeds(bound, effect, comparisons=comparisons)
    head += f" ({d.mean:+.3f}, {d.low:+.3f} to {d.high:+.3f})"
    if d.n < TO_CLAIM:
        return (
            f"{head}, since {d.n} seeds claim nothing; to see {effect:g} you need {needed} seeds."
        )
    if needed <= d.n:
        return f"{head}; {d.n} seeds are enough to see {effect:g}."
    visible = find_detectable_effect(bound, d.n, comparisons=comparisons)
    return (
        f"{head}; to see {effect:g} you need {needed} seeds; these {d.n} seeds see {visible:.3f}."
    )


class Fall(NamedTuple):
    """Hold a line whose mean accuracy is lower after training than before."""

    line: str
    before: float
    found: Difference  # the difference `after - before`, paired by seed
    # whether the fall is larger than chance explains, tested at a level corrected for the number of
    # lines
    claim: bool
    sentence: str


def find_falls(groups: Sequence[Group]) -> list[Fall]:
    """Find the lines with a lower accuracy at the end than at the start. The figure is the test
    accuracy, or the validation accuracy if a run has no test results. Runs without both values are
    left out.

    Holm's correction is over all lines, whether or not they fell. With fewer than `TO_CLAIM` seeds
    nothing is claimed.
    """
    ends = {
        group.label: {run.seed or 0: pair for run in group.runs if (pair := _ends(run)) is not None}
        for group in groups
    }
    known = {label: list(zip(*own.values(), strict=True)) for label, own in ends.items() if own}
    resolution = 1 / min(_problem_counts(groups), default=math.inf)
    tests = [compare_pairs(*own, resolution=resolution) for own in known.values()]
    p = holm([d.evidence() for d in tests])
    levels = holm_levels([d.evidence() for d in tests])
    out = []
    for (label, own), adjusted, level in zip(known.items(), p, levels, strict=True):
        d = compare_pairs(*own, level=level, resolution=resolution)
        if d.mean < 0:
            before = _mean(own[0])
            claim = adjusted <= ALPHA
            out.append(Fall(label, before, d, claim, phrase_fall(label, before, d, claim=claim)))
    return out


def _ends(run: ReadRun) -> tuple[float, float] | None:
    """Return the accuracy before and after training. Return None if one of the two is missing."""
    before, after = (_side(run, side, "accuracy") for side in ("before", "after"))
    if before is not None and after is not None:
        return before, after
    curve = read_series(run, "eval/accuracy")
    return (curve[min(curve)], curve[max(curve)]) if len(curve) > 1 else None


def phrase_fall(line: str, before: float, d: Difference, *, claim: bool) -> str:
    """Say how far a line ends below its start, and whether this may be chance."""
    said = f"{line} ends below its start: accuracy {before:.3f} before, {before + d.mean:.3f} after"
    if d.n >= FEWEST:
        said += f" ({d.mean:+.3f}, {d.low:+.3f} to {d.high:+.3f})"
    said += f", {d.n} seed{'s' * (d.n != 1)}"
    if d.n < TO_CLAIM:
        return f"{said}; fewer than {TO_CLAIM} claim nothing."
    return f"{said}." if claim else f"{said}; this may be chance."


def format_verdicts(
    groups: Sequence[Group], compared: Figure, found: Sequence[Compared]
) -> list[str]:
    """Write the verdicts as lines of text. Further lines name the falls, the basis of the verdicts,
    and remarks."""
    return [
        *(v.sentence for v in found),
        *(fall.sentence for fall in find_falls(groups)),
        describe_basis(compared, found),
        *list_notes(groups, compared),
    ]


def describe_basis(compared: Figure, found: Sequence[Compared]) -> str:
    """Say in one line on which figure and test the verdicts are based."""
    tested = sum(not math.isnan(v.p) for v in found)
    corrected = (
        f"; claims corrected for {tested} comparisons (Holm), each interval at 95 % or more"
        if tested > 1
        else ""
    )
    return f"({compared.name}; pairs of runs of one seed; 95 % by Student's t{corrected})"
