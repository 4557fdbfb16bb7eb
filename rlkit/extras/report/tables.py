"""Make the tables of the page: test results before and after training, rewards, and means over
seeds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlkit.episodes.summary import STATUSES
from rlkit.runs.comparing import (
    TO_CLAIM,
    WithInterval,
    compare_pairs,
    estimate,
    estimate_bounded_mean,
    find_smallest_step,
    newcombe,
)
from rlkit.runs.reading import Group, ReadRun, is_number, read_series
from rlkit.runs.trends import find_shadow_rewards
from rlkit.runs.verdicts import count_problems
from rlkit.training.callbacks.pathologies import INTERVALS


class HeldOutRow(NamedTuple):
    """Hold one figure (for example the accuracy) of a line before and after training, on one split.
    A line is a group of runs with equal settings."""

    line: str
    split: str  # test
    figure: str
    seeds: int
    problems: int  # number of rows in the split
    distinct: int  # number of distinct problems in these rows
    before: WithInterval
    after: WithInterval
    change: WithInterval

    def claims(self) -> bool:
        """Return whether the change may be called a gain or a loss. This is allowed for a single
        run, because its interval is over problems, and for at least `TO_CLAIM` seeds."""
        return self.seeds == 1 or self.seeds >= TO_CLAIM


def mark_change(change: WithInterval, *, claims: bool = True) -> Literal["good", "bad", "open"]:
    """Return the mark of a change: "good", "bad" or "open". The mark is "open" if the interval
    includes 0 or is unknown, or if nothing may be claimed."""
    if claims and change.low > 0:
        return "good"
    if claims and change.high < 0:
        return "bad"
    return "open"


def tabulate_held_out(groups: Iterable[Group]) -> list[HeldOutRow]:
    """Tabulate each line's test accuracy, and its test reward if this differs from the accuracy.
    For a mixture, tabulate each part too.

    Of several runs of one seed only the last counts. With one seed, the intervals are over
    problems. The interval of the change is then computed by Newcombe's rule for two independent
    samples. This interval is too wide, because the problems before and after training are the same.
    With two seeds there is no interval. With three or more seeds, the intervals are over seeds
    (`average_over_seeds`).
    """
    out = []
    for group in groups:
        seeds = {run.seed or 0: run for run in group.runs}
        pairs = select_whole_pairs(
            (r.summary.get("before"), r.summary.get("after")) for r in seeds.values()
        )
        if not pairs:
            continue
        split = str(pairs[0][1].get("split", ""))
        out += tabulate_figures(group.label, split, "", pairs)
        for part in _parts(pairs[0][1]):
            own = select_whole_pairs((_parts(b).get(part), _parts(a).get(part)) for b, a in pairs)
            out += tabulate_figures(group.label, split, f"{part}: ", own)
    return out


def select_whole_pairs(
    sides: Iterable[tuple[Any, Any]],
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Select the pairs of test results (before, after) in which both results have the form written
    by `rlkit train`."""

    def whole(side: Any) -> bool:
        if not isinstance(side, Mapping) or not isinstance(side.get("n"), int):
            return False
        spans = [
            span
            for key in INTERVALS.values()
            if isinstance(span := side.get(key), list) and len(span) == 2
        ]
        if len(spans) < len(INTERVALS):
            return False
        values = [side[name] for name in INTERVALS if name in side] + [
            bound for span in spans for bound in span
        ]
        return all(name in side for name in INTERVALS) and all(
            value is None or is_number(value) for value in values
        )

    return [(before, after) for before, after in sides if whole(before) and whole(after)]


def _parts(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the results of the parts of a mixture. The result is empty if the task is not a
    mixture."""
    found = result.get("parts")
    return found if isinstance(found, Mapping) else {}


def tabulate_figures(
    line: str, split: str, prefix: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[HeldOutRow]:
    """Make the rows of one line. `pairs` holds one (before, after) pair for each seed."""
    out = []
    for name, interval in INTERVALS.items():
        if not pairs or (
            name == "reward"
            and all(side["reward"] == side["accuracy"] for pair in pairs for side in pair)
        ):
            continue  # the reward equals the accuracy
        both = [[estimate(side[name], side[interval]) for side in pair] for pair in pairs]
        problems = int(pairs[0][1]["n"])
        distinct = count_problems(pairs[0][1])
        if len(both) == 1:
            before, after, change = *both[0], newcombe(*both[0])
        else:
            sides = [[pair[i].value for pair in both] for i in (0, 1)]
            step = (
                1 / distinct
                if name == "accuracy" and distinct
                else find_smallest_step([value for own in sides for value in own])
            )
            before, after = (
                average_over_seeds(own, bounded=True, resolution=step) for own in sides
            )
            change = average_over_seeds(
                [b - a for a, b in zip(*sides, strict=True)], bounded=False, resolution=step
            )
        out.append(
            HeldOutRow(
                line, split, prefix + name, len(pairs), problems, distinct, before, after, change
            )
        )
    return out


def average_over_seeds(
    values: Sequence[float], *, bounded: bool, resolution: float = 0.0
) -> WithInterval:
    """Average a figure over seeds, with a 95 % interval by Student's t. For fewer than three seeds
    the interval is nan, because it would be too wide to be useful.

    The problems are held fixed: the interval is about the mean on these problems over all seeds.

    Args:
      bounded: True for an accuracy or a reward. The interval then stays within 0 … 1, or within the
        range of the values if this is wider (`estimate_bounded_mean`). False for a change of such a
        figure.
      resolution: the smallest step of a figure.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return WithInterval(math.nan, math.nan, math.nan)
    if bounded:
        bounds = min(0.0, *known), max(1.0, *known)
        return WithInterval(*estimate_bounded_mean(known, resolution=resolution, bounds=bounds))
    return WithInterval(*compare_pairs([0.0] * len(known), known, resolution=resolution)[:3])


# ------------------------------------------------------------------------------------------ rewards


class RewardRow(NamedTuple):
    """Hold a component of the reward in one line: the component's means over the first and the last
    tenth of the steps, and the shares of its statuses in the last tenth."""

    line: str
    name: str
    shadow: bool  # whether the component is scored, but not trained on
    first: float
    last: float
    explains: float  # share of the reward's variance within groups
    statuses: Mapping[str, float]  # status → share of the scores; shares of 0 are left out


def reward_rows(groups: Iterable[Group]) -> list[RewardRow]:
    """Make a row for every component of every line's reward. The total reward comes first."""
    out = []
    for group in groups:
        names = [
            key.split("/")[1]
            for key in list_metrics(group.runs)
            if re.fullmatch(r"reward/[^/]+/mean", key)
        ]
        hidden = find_shadow_rewards(group.runs[0])
        for name in ["", *names]:
            prefix = f"reward/{name}/" if name else "reward/"
            ends = [_ends(read_series(run, f"{prefix}mean")) for run in group.runs]
            known = [end for end in ends if end is not None]
            if not known:
                continue
            shares = {status: _mean_end(group, f"{prefix}{status}_frac") for status in STATUSES}
            statuses = {status: share for status, share in shares.items() if share > 0}
            first, last = (sum(end[i] for end in known) / len(known) for i in (0, 1))
            out.append(
                RewardRow(
                    group.label,
                    name,
                    name in hidden,
                    first,
                    last,
                    _mean_end(group, f"{prefix}variance_share"),
                    statuses,
                )
            )
    return out


def _ends(curve: Mapping[int, float]) -> tuple[float, float] | None:
    """Average the first and the last tenth of a curve, each with at least one value."""
    values = [curve[step] for step in sorted(curve)]
    count = max(1, len(values) // 10)
    return (sum(values[:count]) / count, sum(values[-count:]) / count) if values else None


def _mean_end(group: Group, metric: str) -> float:
    """Average a metric over the last tenth of each run of a line; nan if it was not measured."""
    known = [end[1] for run in group.runs if (end := _ends(read_series(run, metric))) is not None]
    return sum(known) / len(known) if known else math.nan


def list_metrics(found: Iterable[ReadRun]) -> list[str]:
    """List all metrics of the runs, in the order of their first appearance in the rows."""
    return list(
        dict.fromkeys(key for run in found for row in run.rows for key in row if key != "step")
    )
