"""What runs came to, in rows: figures of test problems before and after, health, and seeds put together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from rlkit.runs.report.read import Group, ReadRun, is_number
from rlkit.training.callbacks.pathologies import CHECKS, INTERVALS

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, two-sided 95 %, 1 … 9 degrees of freedom


UNNAMED = "held-out"  # the split of figures that name none


class WithInterval(NamedTuple):
    """A value and its 95 % interval; nan where it is not known."""

    value: float
    low: float
    high: float


class HeldOutRow(NamedTuple):
    """A figure of a line before and after training, of the problems of a split."""

    line: str
    split: str  # test; held-out in runs from before there were three splits
    figure: str
    seeds: int
    problems: int
    before: WithInterval
    after: WithInterval
    change: WithInterval


def before_after(groups: Iterable[Group]) -> list[HeldOutRow]:
    """Test accuracy and, where it is another number, reward; of a mixture that of each part too.

    One seed: the interval is over problems, that of the change by Newcombe's rule for two independent samples, which is wide, for
    the problems are the same. Several: see `over_seeds`.
    """
    out = []
    for group in groups:
        pairs = whole_pairs((r.summary.get("before"), r.summary.get("after")) for r in group.runs)
        if not pairs:
            continue
        split = str(pairs[0][1].get("split", UNNAMED))
        out += figures(group.label, split, "", pairs)
        for part in _parts(pairs[0][1]):
            own = whole_pairs((_parts(b).get(part), _parts(a).get(part)) for b, a in pairs)
            out += figures(group.label, split, f"{part}: ", own)
    return out


def whole_pairs(sides: Iterable[tuple[Any, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The pairs of held-out results of which both are as `rlkit train` writes them."""

    def whole(side: Any) -> bool:
        if not isinstance(side, Mapping) or not isinstance(side.get("n"), int):
            return False
        spans = [span for key in INTERVALS.values() if isinstance(span := side.get(key), list) and len(span) == 2]
        if len(spans) < len(INTERVALS):
            return False
        values = [side[name] for name in INTERVALS if name in side] + [bound for span in spans for bound in span]
        return all(name in side for name in INTERVALS) and all(value is None or is_number(value) for value in values)

    return [(before, after) for before, after in sides if whole(before) and whole(after)]


def _parts(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a mixture, the results of its parts."""
    found = result.get("parts")
    return found if isinstance(found, Mapping) else {}


def figures(line: str, split: str, prefix: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[HeldOutRow]:
    """The rows of one line; of `pairs` there is one a seed."""
    out = []
    for name, interval in INTERVALS.items():
        if not pairs or (name == "reward" and all(side["reward"] == side["accuracy"] for pair in pairs for side in pair)):
            continue  # the reward is the accuracy
        both = [[estimate(side[name], side[interval]) for side in pair] for pair in pairs]
        before, after = (over_seeds([pair[i] for pair in both]) for i in (0, 1))
        change = over_seeds([newcombe(*pair) for pair in both])
        out.append(HeldOutRow(line, split, prefix + name, len(pairs), int(pairs[0][1]["n"]), before, after, change))
    return out


def newcombe(before: WithInterval, after: WithInterval) -> WithInterval:
    """The change and its interval from the intervals of both (Newcombe 1998, method 10, of independent samples).

    low = d - √((after - after_low)² + (before_high - before)²), high likewise, d = after - before

    >>> tuple(round(v, 3) for v in newcombe(WithInterval(0.5, 0.4, 0.6), WithInterval(0.9, 0.8, 0.95)))
    (0.4, 0.259, 0.512)
    """
    change = after.value - before.value
    low = change - math.hypot(after.value - after.low, before.high - before.value)
    return WithInterval(change, low, change + math.hypot(after.high - after.value, before.value - before.low))


def estimate(value: float | None, interval: Sequence[float | None]) -> WithInterval:
    """As a summary has it, where what is not known is null."""
    return WithInterval(*(math.nan if v is None else float(v) for v in (value, *interval)))


def over_seeds(estimates: Sequence[WithInterval]) -> WithInterval:
    """One seed as it is; of several the mean, its interval over seeds and over problems at once.

    Half-widths in quadrature: Student's t · s/√n over the seeds, and the mean half-width over problems. The seeds share the problems,
    so the second does not shrink with their number; without it two seeds that agree by chance would have no interval at all.

    >>> tuple(round(v, 3) for v in over_seeds([WithInterval(0.8, 0.7, 0.9), WithInterval(0.9, 0.8, 1.0), WithInterval(1.0, 0.9, 1.1)]))
    (0.9, 0.632, 1.168)
    """
    known = [e for e in estimates if math.isfinite(e.value)]
    if len(known) < 2:
        return known[0] if known else WithInterval(math.nan, math.nan, math.nan)
    mean = math.fsum(e.value for e in known) / len(known)
    spread = math.sqrt(math.fsum((e.value - mean) ** 2 for e in known) / (len(known) - 1))
    seeds = student(len(known) - 1) * spread / math.sqrt(len(known))
    below, above = (math.fsum(values) / len(known) for values in ([e.value - e.low for e in known], [e.high - e.value for e in known]))
    return WithInterval(mean, mean - math.hypot(seeds, below), mean + math.hypot(seeds, above))


def student(freedom: int) -> float:
    """Student's t at 97.5 %: from a table, beyond it by its expansion at large numbers, to three places."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    z = 1.959964
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


# ------------------------------------------------------------------------------------------------------- health


class Symptom(NamedTuple):
    """A known pathology of a run."""

    check: str  # in words
    steps: Sequence[int]  # where it was seen
    text: str  # what the check said first


def symptoms(run: ReadRun) -> list[Symptom]:
    """The known pathologies over all steps. A step whose row lacks what a check reads says nothing."""
    out = []
    for check in CHECKS:
        found = []
        for row in run.rows:
            with suppress(KeyError, TypeError, ValueError, ArithmeticError):
                if text := check({key: math.nan if value is None else value for key, value in row.items()}):
                    found.append((int(row["step"]), text))
        if found:
            out.append(Symptom(check.__name__.replace("_", " "), [step for step, _ in found], found[0][1]))
    return out
