"""Simulate runs with a known truth, and count how often the package's sentences hold.

run.py lists the promises to check. Terms here:

    figures  simulated accuracies, one for each arm and seed
    page     one simulated comparison of arms, as a report page would show it
    spread   standard deviation of the difference of two arms, over seeds
    claim    the sentence that two arms differ
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlkit.commands import plan
from rlkit.episodes import evaluation
from rlkit.runs import trends, verdicts
from rlkit.runs.comparing import ALPHA, TO_CLAIM, estimate, newcombe
from rlkit.runs.reading import Group, ReadRun
from rlkit.system.extras import list_extras
from rlkit.types import Rollout, Task

if "bench" in list_extras():
    from rlkit.extras.bench import matrix as bench
    from rlkit.extras.bench.over_tasks import iqm, seeds_interval
if "report" in list_extras():
    from rlkit.extras.report import tables

PROBLEMS = 100  # number of test problems of a coarse score
SPREAD = 0.3  # standard deviation of a run's log-odds
SHARED = 0.7  # share of that variance due to the seed, common to all runs of a seed
HARD = 1.0  # standard deviation of the problems' log-odds


class Setting(NamedTuple):
    """A setting of the simulation: number of seeds, true accuracy, kind of score."""

    seeds: int
    accuracy: float
    coarse: (
        bool  # an accuracy on PROBLEMS problems; else the expected accuracy, which is continuous
    )


class Count(NamedTuple):
    """How often a sentence held, and out of how many cases."""

    hits: float
    of: int


# ---------------------------------------------------------------------------------------- the world


@functools.cache
def problems(accuracy: float) -> np.ndarray:
    """Return the log-odds of the problems, [PROBLEMS].

    The mean accuracy on them over many seeds is `accuracy`.
    """
    rng = np.random.default_rng(7)
    odds = HARD * rng.normal(size=PROBLEMS)
    grid = np.linspace(-5, 5, 201)
    weights = np.exp(-(grid**2) / 2)
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        chance = 1 / (1 + np.exp(-(odds[:, None] + middle + SPREAD * grid)))
        if (chance * weights).sum() / weights.sum() / PROBLEMS < accuracy:
            low = middle
        else:
            high = middle
    return odds + low


def figures(setting: Setting, pages: int, arms: int, rng: np.random.Generator) -> np.ndarray:
    """Return figures of equal arms, [pages, arms, seeds], on fixed problems.

    The true accuracy of every arm is `setting.accuracy`.
    """
    shape = (pages, arms, setting.seeds)
    common = rng.normal(size=(pages, 1, setting.seeds))
    run = SPREAD * (math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * rng.normal(size=shape))
    out = np.empty(shape)
    for page in range(pages):
        chance = 1 / (1 + np.exp(-(problems(setting.accuracy) + run[page][..., None])))
        if setting.coarse:
            chance = rng.random(chance.shape) < chance
        out[page] = chance.mean(-1)
    return out


@functools.cache
def spread_of_differences(setting: Setting) -> float:
    """Return the true standard deviation of the difference of two arms."""
    drawn = figures(setting._replace(seeds=2000), 1, 2, np.random.default_rng(11))[0]
    return float((drawn[1] - drawn[0]).std())


class Line(NamedTuple):
    """The part of a group of runs read by a verdict."""

    label: str


def judged(values: np.ndarray, setting: Setting, effect: float = 0.01) -> list[verdicts.Compared]:
    """Return the verdicts of `rlkit compare` on arms [arms, seeds], each against the first."""
    lines = [Line(f"line {i}") for i in range(len(values))]
    step = 1 / PROBLEMS if setting.coarse else 0.0
    own = [dict(enumerate(arm.tolist())) for arm in values]
    return verdicts.judge_lines(lines, verdicts.Figure("accuracy", own, step), effect=effect)  # type: ignore[arg-type]


def claimed(values: np.ndarray, setting: Setting) -> bool:
    """Return whether the verdict claims a difference of the two arms."""
    return judged(values, setting)[0].claim != "open"


def holds(low: float, truth: float, high: float) -> bool:
    """Return whether an interval contains the truth, up to the rounding of floats."""
    return low - 1e-9 <= truth <= high + 1e-9


# ------------------------------------------------------------------------------------------ compare


def compare_claims(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the pages of four equal lines with a false claim of a difference."""
    drawn = figures(setting, pages, 4, rng)
    return Count(
        sum(any(v.claim != "open" for v in judged(page, setting)) for page in drawn), pages
    )


def compare_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the intervals of three comparisons that contain the true difference.

    Every second page has real differences.
    """
    drawn = figures(setting, pages, 4, rng)
    effect = 2 * spread_of_differences(setting)
    hits = 0
    for number, page in enumerate(drawn):
        truth = np.array([0.0, effect, 2 * effect, 0.0]) * (number % 2)
        found = judged(page + truth[:, None], setting)
        hits += sum(holds(v.found.low, truth[i], v.found.high) for i, v in enumerate(found, 1))
    return Count(hits, 3 * pages)


def compare_needs(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the comparisons that find the named difference with the advised number of seeds."""
    effect = spread_of_differences(setting)
    said = [judged(page, setting, effect)[0].sentence for page in figures(setting, pages, 2, rng)]
    asked = [re.search(r"you need (\d+) seeds|(\d+) seeds are enough", text) for text in said]
    seeds = [int(match[1] or match[2]) for match in asked if match]
    return found_with(setting, seeds, [effect] * len(seeds), rng)


def compare_sees(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Count the comparisons that find the difference named by "these seeds see"."""
    said = [judged(page, setting, 1e-6)[0] for page in figures(setting, pages, 2, rng)]
    seen = [
        match[1]
        for v in said
        if (match := re.search(r"these \d+ seeds see (\S+?)\.?$", v.sentence))
    ]
    step = 0.0005  # half of the last of the sentence's three digits
    return (
        found_with(setting, [setting.seeds] * len(seen), [float(own) + step for own in seen], rng)
        if seen
        else None
    )


def compare_enough(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Count the pages that wrongly call their seeds enough.

    The true difference is 0.8 spreads. The seeds are too few if as many simulated seeds find this
    difference less than four times in five. This can happen from TO_CLAIM seeds on.
    """
    if setting.seeds < TO_CLAIM:
        return None
    effect = 0.8 * spread_of_differences(setting)
    power = found_with(setting, [setting.seeds] * 400, [effect] * 400, rng)
    if power.hits / power.of >= 0.8:
        return Count(0, pages)
    said = [judged(page, setting, effect)[0].sentence for page in figures(setting, pages, 2, rng)]
    return Count(sum("are enough to see" in text for text in said), pages)


def found_with(
    setting: Setting, seeds: Sequence[int], effects: Sequence[float], rng: np.random.Generator
) -> Count:
    """Count the comparisons of two arms that claim a difference.

    seeds, effects: number of seeds and true difference of each comparison
    """
    hits = 0
    for n, effect in zip(seeds, effects, strict=True):
        own = setting._replace(seeds=min(n, 400))
        page = figures(own, 1, 2, rng)[0]
        hits += claimed(page + np.array([[0.0], [effect]]), own)
    return Count(hits, len(seeds))


def line_of(before: np.ndarray, after: np.ndarray, label: str) -> Group:
    """Return a line of finished runs with these accuracies, each on 100 test problems."""
    sides = {
        "n": PROBLEMS,
        "distinct": PROBLEMS,
        "split": "test",
        "interval": [0.0, 1.0],
        "reward_interval": [0.0, 1.0],
    }
    runs = []
    for seed, (start, end) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        summary = {
            "before": {"accuracy": start, "reward": start, **sides},
            "after": {"accuracy": end, "reward": end, **sides},
        }
        runs.append(ReadRun(Path(label), label, seed, {}, summary, [], []))
    return Group(label, runs)


def falls_claimed(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the pages of three unchanged lines with a false claim that one of them fell."""
    hits = 0
    for page in figures(setting, pages, 6, rng):
        lines = [line_of(page[2 * i], page[2 * i + 1], f"line {i}") for i in range(3)]
        hits += any(fall.claim for fall in verdicts.find_falls(lines))
    return Count(hits, pages)


def falls_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the intervals that contain the true fall of a line, four spreads."""
    fall = 4 * spread_of_differences(setting)
    hits = of = 0
    for page in figures(setting, pages, 2, rng):
        found = verdicts.find_falls([line_of(page[0], page[1] - fall, "line")])
        hits += sum(holds(own.found.low, -fall, own.found.high) for own in found)
        of += len(found)
    return Count(hits, of)


# ------------------------------------------------------------------------------------------ plan


def planned(page: np.ndarray, setting: Setting, effect: float, seeds: int | None = None) -> str:
    """Return the lines of `rlkit plan` about a pilot."""
    return plan.phrase_need(plan.plan_seeds(judged(page, setting)[0], effect, 1, 0.0, seeds))


def plan_needs(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the comparisons that find the difference with the first number of seeds in the plan."""
    effect = 0.8 * spread_of_differences(setting)
    said = [planned(page, setting, effect) for page in figures(setting, pages, 2, rng)]
    seeds = [int(re.search(r": (\d+) seeds", text)[1]) for text in said]  # type: ignore[index]
    return found_with(setting, seeds, [effect] * pages, rng)


def plan_likely(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the comparisons that find the difference with the plan's second number of seeds.

    The plan gives this number for the case of a true spread equal to the pilot's. The simulated
    differences are therefore normal with the pilot's spread.
    """
    hits = of = 0
    for page in figures(setting, pages, 2, rng):
        verdict = judged(page, setting)[0]
        spread = verdict.found.spread
        text = plan.phrase_need(plan.plan_seeds(verdict, spread, 1, 0.0, None))
        match = re.search(r"pilot's, (\d+) seeds are enough", text)
        if match:
            n = int(match[1])
            own = rng.normal(spread, spread, size=n)
            hits += claimed(np.stack([np.zeros(n), own]), setting._replace(seeds=n, coarse=False))
            of += 1
    return Count(hits, of)


def plan_sees(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the comparisons of 16 seeds that find the difference named by the plan.

    The plan says that this difference is found four times in five.
    """
    said = [planned(page, setting, 1.0, 16) for page in figures(setting, pages, 2, rng)]
    seen = [float(re.search(r"of (\S+) is found 4 times", text)[1]) + 0.00005 for text in said]  # type: ignore[index]
    return found_with(setting, [16] * pages, seen, rng)


# ------------------------------------------------------------------------------------------ bench


def matrix(page: np.ndarray, shifts: Sequence[float], names: Sequence[str]) -> bench.Scores:
    """Return the scores of arms [arms, seeds] on one task, each arm raised by its shift."""
    arms = {
        name: (own + shift)[:, None] for name, own, shift in zip(names, page, shifts, strict=True)
    }
    return bench.Scores(["task"], list(range(page.shape[1])), arms)


def bench_claims(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Sum over pages the share of false claims among a page's claims.

    Three of the six arms are equal, and the other three are better.
    """
    return Count(sum(false_share(*own) for own in mixed(setting, pages, rng, "abcdef")), pages)


def bench_nulls(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the pages of six equal arms with any claim."""
    drawn = figures(setting, pages, 6, rng)
    return Count(
        sum(
            any(p.q <= ALPHA for p in bench.compare_arms(matrix(page, [0.0] * 6, "abcdef")))
            for page in drawn
        ),
        pages,
    )


def bench_placebos(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Sum over pages the share of false claims among the comparisons with placebos.

    Two of the four other arms are better than the placebos.
    """
    names = ["a", *bench.PLACEBOS, "b", "c", "d"]
    found = mixed(setting, pages, rng, names)
    own = (
        ([p for p in all_pairs if {p.first, p.second} & bench.PLACEBOS.keys()], truth)
        for all_pairs, truth in found
    )
    return Count(sum(false_share(*each) for each in own), pages)


def mixed(
    setting: Setting, pages: int, rng: np.random.Generator, names: Sequence[str]
) -> Iterator[tuple[list[bench.Pair], dict[str, float]]]:
    """Yield the pairs of a page of six arms, and the true shift of each arm.

    The last three arms are better than the others by 1, 2 and 3 spreads.
    """
    spread = spread_of_differences(setting)
    shifts = [0.0, 0.0, 0.0, spread, 2 * spread, 3 * spread]
    for page in figures(setting, pages, 6, rng):
        yield (
            bench.compare_arms(matrix(page, shifts, names)),
            dict(zip(names, shifts, strict=True)),
        )


def false_share(pairs: Sequence[bench.Pair], truth: dict[str, float]) -> float:
    """Return the share of claims that wrongly name an arm as better; 0 without claims."""
    claims = [p.order() for p in pairs if p.q <= ALPHA]
    return sum(truth[better] <= truth[other] for better, other in claims) / max(1, len(claims))


def bench_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Sum over pages the share of a page's claims with an interval that misses the truth."""
    total = 0.0
    for pairs, truth in mixed(setting, pages, rng, "abcdef"):
        told = [p for p in pairs if p.q <= ALPHA]
        missed = sum(not holds(p.low, truth[p.second] - truth[p.first], p.high) for p in told)
        total += missed / max(1, len(told))
    return Count(total, pages)


def bench_sees(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Count the pages that claim the difference advertised by another page.

    A page of equal arms says how large a difference it would see. Another page then gets an arm
    that is better by this difference.
    """
    if setting.seeds < TO_CLAIM:
        return None
    hits = 0
    for page, other in zip(
        figures(setting, pages, 4, rng), figures(setting, pages, 4, rng), strict=True
    ):
        sees = bench.compare_arms(matrix(page, [0.0] * 4, "abcd"))[0].sees
        hits += bench.compare_arms(matrix(other, [0.0, sees, 0.0, 0.0], "abcd"))[0].q <= ALPHA
    return Count(hits, pages)


def bench_means(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the intervals of an arm's mean score that contain the true mean."""
    hits = of = 0
    for page in figures(setting, pages, 3, rng):
        found = matrix(page, [0.0] * 3, "abc")
        _, low, high = bench.score_interval(found.of["a"][:, 0].tolist(), found.step(0))
        hits += holds(low, setting.accuracy, high)
        of += not math.isnan(low)  # equal scores have no interval
    return Count(hits, of)


def bench_iqm(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Count the intervals of the interquartile mean over two tasks that contain its true value.

    The true value is the interquartile mean of 20,000 seeds.
    """
    if setting.seeds < TO_CLAIM:
        return None
    pages //= 4  # each page resamples its seeds a thousand times
    truth = iqm(figures(setting._replace(seeds=20_000), 1, 2, rng)[0].T)
    step = 1 / PROBLEMS if setting.coarse else 0.0
    hits = 0
    for page in figures(setting, pages, 2, rng):
        _, low, high = seeds_interval(page.T, iqm, resolution=step)
        hits += holds(low, truth, high)
    return Count(hits, pages)


# ------------------------------------------------------------------------------------------ report


def row_of(before: np.ndarray, after: np.ndarray) -> tables.HeldOutRow:
    """Return the row of a line in the table "Before and after"."""
    (row,) = tables.tabulate_held_out([line_of(before, after, "line")])
    return row


def report_means(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the intervals of an accuracy over seeds that contain the true accuracy."""
    rows = [row_of(*page) for page in figures(setting, pages, 2, rng)]
    return Count(sum(holds(row.after.low, setting.accuracy, row.after.high) for row in rows), pages)


def report_changes(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the intervals of a change over seeds that contain the true change, 0."""
    rows = [row_of(*page) for page in figures(setting, pages, 2, rng)]
    return Count(sum(holds(row.change.low, 0.0, row.change.high) for row in rows), pages)


def report_marks(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the unchanged lines that are marked as better or worse."""
    rows = [row_of(*page) for page in figures(setting, pages, 2, rng)]
    return Count(
        sum(tables.mark_change(row.change, claims=row.claims()) != "open" for row in rows), pages
    )


def one_run(setting: Setting, rng: np.random.Generator) -> tuple[dict, dict]:
    """Return two evaluations of one policy on about 7 · 43 rows of 43 fresh problems.

    Each problem stands in 1 to 13 rows of the file.
    """
    sizes = 1 + rng.integers(13, size=43)
    sides = []
    for _ in range(2):
        right = (
            rng.random(43) < setting.accuracy
        )  # a problem is solved in all of its rows or in none
        tasks = [Task(str(i), ({"role": "user", "content": str(i)},)) for i in range(43)]
        rollouts = [
            Rollout(tasks[i], (), reward=float(right[i]))
            for i in range(43)
            for _ in range(sizes[i])
        ]
        sides.append(evaluation.summarise_accuracy(rollouts))
    return sides[0], sides[1]


def run_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the intervals of one run's accuracy that contain the true accuracy.

    Some of the run's problems occur in several rows.
    """
    sides = [one_run(setting, rng)[0] for _ in range(pages)]
    return Count(
        sum(holds(side["interval"][0], setting.accuracy, side["interval"][1]) for side in sides),
        pages,
    )


def run_changes(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the intervals of one run's change that contain the true change, 0."""
    hits = 0
    for _ in range(pages):
        own = [estimate(side["accuracy"], side["interval"]) for side in one_run(setting, rng)]
        found = newcombe(*own)
        hits += holds(found.low, 0.0, found.high)
    return Count(hits, pages)


def health(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Count the healthy runs of 30 steps with a false warning by a check of the whole run.

    Every figure of these runs varies by chance alone.
    """
    step = {"kl.coef": 0.0, "reward.terms.shadow.weight": 0.0}
    hits = 0
    for _ in range(pages):
        rows = []
        for number in range(31):
            noise = 1 + 0.2 * rng.normal(size=6)
            row = {
                "step": number,
                "policy/entropy": noise[0],
                "kl/ref_k3": 0.1 * noise[1],
                "reward/mean": 0.5 * noise[2],
            }
            row |= {"len/mean": 100 * noise[3], "reward/shadow/mean": 0.5 * noise[4]}
            if number % 5 == 0:
                right = rng.binomial(PROBLEMS, setting.accuracy)
                low, high = evaluation.share_interval(right, PROBLEMS)
                row |= {
                    "eval/accuracy": right / PROBLEMS,
                    "eval/accuracy_low": low,
                    "eval/accuracy_high": high,
                }
            rows.append(row)
        run = ReadRun(Path("run"), "run", 0, step, {}, rows, [])
        hits += any(check(run) for check in trends.TRENDS)
    return Count(hits, pages)
