"""Simulate runs whose truth is known, and count how often the package's sentences hold. run.py
has the promises."""

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
from rlkit.runs import tables, trends, verdicts
from rlkit.runs.comparing import ALPHA, TO_CLAIM, iqm
from rlkit.runs.reading import Group, ReadRun
from rlkit.system.extras import list_extras
from rlkit.types import Rollout, Task

if "bench" in list_extras():
    from rlkit.extras.bench import matrix as bench

PROBLEMS = 100  # of a coarse score
SPREAD = 0.3  # standard deviation of a run's log-odds
SHARED = 0.7  # of its variance, the part that the runs of a seed share
HARD = 1.0  # standard deviation of the problems' log-odds


class Setting(NamedTuple):
    """What figures are drawn of."""

    seeds: int
    accuracy: float
    coarse: (
        bool  # an accuracy on PROBLEMS problems; else the expected accuracy, which is continuous
    )


class Count(NamedTuple):
    """How often what was said held."""

    hits: float
    of: int


# ---------------------------------------------------------------------------------------- the world


@functools.cache
def problems(accuracy: float) -> np.ndarray:
    """Log-odds of the problems, [PROBLEMS], whose mean accuracy over the seeds is that."""
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
    """Figures of equal arms, [pages, arms, seeds]. Problems are fixed, and the truth is
    `accuracy`."""
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
    """The true standard deviation of the difference of two arms."""
    drawn = figures(setting._replace(seeds=2000), 1, 2, np.random.default_rng(11))[0]
    return float((drawn[1] - drawn[0]).std())


class Line(NamedTuple):
    """What a verdict needs of a group of runs."""

    label: str


def judged(values: np.ndarray, setting: Setting, effect: float = 0.01) -> list[verdicts.Compared]:
    """What `rlkit compare` says of arms [arms, seeds], each against the first."""
    lines = [Line(f"line {i}") for i in range(len(values))]
    step = 1 / PROBLEMS if setting.coarse else 0.0
    own = [dict(enumerate(arm.tolist())) for arm in values]
    return verdicts.judge_lines(lines, verdicts.Figure("accuracy", own, step), effect=effect)  # type: ignore[arg-type]


def claimed(values: np.ndarray, setting: Setting) -> bool:
    """Whether two arms are said to differ."""
    return judged(values, setting)[0].claim != "open"


def holds(low: float, truth: float, high: float) -> bool:
    """Whether an interval holds the truth, up to the rounding of floats."""
    return low - 1e-9 <= truth <= high + 1e-9


# ------------------------------------------------------------------------------------------ compare


def compare_claims(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Pages of four equal lines that claim any difference."""
    drawn = figures(setting, pages, 4, rng)
    return Count(
        sum(any(v.claim != "open" for v in judged(page, setting)) for page in drawn), pages
    )


def compare_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Intervals of three comparisons that hold the true difference, half of the pages with a real
    one."""
    drawn = figures(setting, pages, 4, rng)
    effect = 2 * spread_of_differences(setting)
    hits = 0
    for number, page in enumerate(drawn):
        truth = np.array([0.0, effect, 2 * effect, 0.0]) * (number % 2)
        found = judged(page + truth[:, None], setting)
        hits += sum(holds(v.found.low, truth[i], v.found.high) for i, v in enumerate(found, 1))
    return Count(hits, 3 * pages)


def compare_needs(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Comparisons of as many seeds as the sentence asks for that find the difference it names."""
    effect = spread_of_differences(setting)
    said = [judged(page, setting, effect)[0].sentence for page in figures(setting, pages, 2, rng)]
    asked = [re.search(r"you need (\d+) seeds|(\d+) seeds are enough", text) for text in said]
    seeds = [int(match[1] or match[2]) for match in asked if match]
    return found_with(setting, seeds, [effect] * len(seeds), rng)


def compare_sees(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Comparisons that find the difference which "these seeds see"."""
    said = [judged(page, setting, 1e-6)[0] for page in figures(setting, pages, 2, rng)]
    seen = [
        match[1]
        for v in said
        if (match := re.search(r"these \d+ seeds see (\S+?)\.?$", v.sentence))
    ]
    step = 0.0005  # the sentence has three digits
    return (
        found_with(setting, [setting.seeds] * len(seen), [float(own) + step for own in seen], rng)
        if seen
        else None
    )


def compare_enough(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Pages that call their seeds enough for a difference which as many find less than four times
    in five: 0.8 spreads, at ten."""
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
    """How many comparisons of two arms, of as many seeds and with that true difference, make the
    claim."""
    hits = 0
    for n, effect in zip(seeds, effects, strict=True):
        own = setting._replace(seeds=min(n, 400))
        page = figures(own, 1, 2, rng)[0]
        hits += claimed(page + np.array([[0.0], [effect]]), own)
    return Count(hits, len(seeds))


def line_of(before: np.ndarray, after: np.ndarray, label: str) -> Group:
    """A line of finished runs with these accuracies of 100 test problems."""
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
    """Pages of three lines that did not change of which one is said to have fallen, for more than
    chance."""
    hits = 0
    for page in figures(setting, pages, 6, rng):
        lines = [line_of(page[2 * i], page[2 * i + 1], f"line {i}") for i in range(3)]
        hits += any(fall.claim for fall in verdicts.find_falls(lines))
    return Count(hits, pages)


def falls_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Intervals of lines that fell by four spreads that hold the fall."""
    fall = 4 * spread_of_differences(setting)
    hits = of = 0
    for page in figures(setting, pages, 2, rng):
        found = verdicts.find_falls([line_of(page[0], page[1] - fall, "line")])
        hits += sum(holds(own.found.low, -fall, own.found.high) for own in found)
        of += len(found)
    return Count(hits, of)


# ------------------------------------------------------------------------------------------ plan


def planned(page: np.ndarray, setting: Setting, effect: float, seeds: int | None = None) -> str:
    """The lines of `rlkit plan` of a pilot."""
    return plan.phrase_need(plan.plan_seeds(judged(page, setting)[0], effect, 1, 0.0, seeds))


def plan_needs(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Comparisons of as many seeds as the plan names first that find the difference."""
    effect = 0.8 * spread_of_differences(setting)
    said = [planned(page, setting, effect) for page in figures(setting, pages, 2, rng)]
    seeds = [int(re.search(r": (\d+) seeds", text)[1]) for text in said]  # type: ignore[index]
    return found_with(setting, seeds, [effect] * pages, rng)


def plan_likely(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """The same of the number that holds if the pilot's spread is the true one: normal differences
    of it."""
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
    """Comparisons of 16 seeds that find what the plan says they find four times in five."""
    said = [planned(page, setting, 1.0, 16) for page in figures(setting, pages, 2, rng)]
    seen = [float(re.search(r"of (\S+) is found 4 times", text)[1]) + 0.00005 for text in said]  # type: ignore[index]
    return found_with(setting, [16] * pages, seen, rng)


# ------------------------------------------------------------------------------------------ bench


def matrix(page: np.ndarray, shifts: Sequence[float], names: Sequence[str]) -> bench.Scores:
    """Scores of arms [arms, seeds] on one task, each with a shift."""
    arms = {
        name: (own + shift)[:, None] for name, own, shift in zip(names, page, shifts, strict=True)
    }
    return bench.Scores(["task"], list(range(page.shape[1])), arms)


def bench_claims(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Share of false claims among the claims of a page, in the mean; of six arms three are equal,
    and three better."""
    return Count(sum(false_share(*own) for own in mixed(setting, pages, rng, "abcdef")), pages)


def bench_nulls(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Pages of six equal arms with any claim."""
    drawn = figures(setting, pages, 6, rng)
    return Count(
        sum(
            any(p.q <= ALPHA for p in bench.compare_arms(matrix(page, [0.0] * 6, "abcdef")))
            for page in drawn
        ),
        pages,
    )


def bench_placebos(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """The same of the comparisons with placebos: of four arms two are above them."""
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
    """Pages of six arms, of which the last three are better by 1, 2 and 3 spreads: their pairs and
    the truth of each arm."""
    spread = spread_of_differences(setting)
    shifts = [0.0, 0.0, 0.0, spread, 2 * spread, 3 * spread]
    for page in figures(setting, pages, 6, rng):
        yield (
            bench.compare_arms(matrix(page, shifts, names)),
            dict(zip(names, shifts, strict=True)),
        )


def false_share(pairs: Sequence[bench.Pair], truth: dict[str, float]) -> float:
    """Of the claims, how many name an arm as better that is not; 0 without claims."""
    claims = [p.order() for p in pairs if p.q <= ALPHA]
    return sum(truth[better] <= truth[other] for better, other in claims) / max(1, len(claims))


def bench_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Share of the claims of a page whose interval misses the truth, in the mean."""
    total = 0.0
    for pairs, truth in mixed(setting, pages, rng, "abcdef"):
        told = [p for p in pairs if p.q <= ALPHA]
        missed = sum(not holds(p.low, truth[p.second] - truth[p.first], p.high) for p in told)
        total += missed / max(1, len(told))
    return Count(total, pages)


def bench_sees(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Pairs with the difference that a page of equal arms says would be seen that another page
    claims."""
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
    """Intervals of an arm's mean score that hold it."""
    hits = of = 0
    for page in figures(setting, pages, 3, rng):
        found = matrix(page, [0.0] * 3, "abc")
        _, low, high = bench.score_interval(found.of["a"][:, 0].tolist(), found.step(0))
        hits += holds(low, setting.accuracy, high)
        of += not math.isnan(low)  # scores that are all equal have none
    return Count(hits, of)


def bench_iqm(setting: Setting, pages: int, rng: np.random.Generator) -> Count | None:
    """Intervals of the interquartile mean over two tasks that hold that of very many seeds."""
    if setting.seeds < TO_CLAIM:
        return None
    pages //= 4  # each redraws its seeds a thousand times
    truth = iqm(figures(setting._replace(seeds=20_000), 1, 2, rng)[0].T)
    step = 1 / PROBLEMS if setting.coarse else 0.0
    hits = 0
    for page in figures(setting, pages, 2, rng):
        _, low, high = bench.seeds_interval(page.T, iqm, resolution=step)
        hits += holds(low, truth, high)
    return Count(hits, pages)


# ------------------------------------------------------------------------------------------ report


def row_of(before: np.ndarray, after: np.ndarray) -> tables.HeldOutRow:
    """The row of a line in "Before and after"."""
    (row,) = tables.tabulate_held_out([line_of(before, after, "line")])
    return row


def report_means(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Intervals of an accuracy over seeds that hold it."""
    rows = [row_of(*page) for page in figures(setting, pages, 2, rng)]
    return Count(sum(holds(row.after.low, setting.accuracy, row.after.high) for row in rows), pages)


def report_changes(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Intervals of a change over seeds that hold it: none."""
    rows = [row_of(*page) for page in figures(setting, pages, 2, rng)]
    return Count(sum(holds(row.change.low, 0.0, row.change.high) for row in rows), pages)


def report_marks(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Lines that did not change and are marked as better or worse."""
    rows = [row_of(*page) for page in figures(setting, pages, 2, rng)]
    return Count(
        sum(tables.mark_change(row.change, claims=row.claims()) != "open" for row in rows), pages
    )


def one_run(setting: Setting, rng: np.random.Generator) -> tuple[dict, dict]:
    """Two evaluations of a policy on 7 · 43 rows of fresh problems, some of which stand in the file
    more often than others."""
    sizes = 1 + rng.integers(13, size=43)
    sides = []
    for _ in range(2):
        right = (
            rng.random(43) < setting.accuracy
        )  # a problem that a policy solves, it solves in every row
        tasks = [Task(str(i), ({"role": "user", "content": str(i)},)) for i in range(43)]
        rollouts = [
            Rollout(tasks[i], (), reward=float(right[i]))
            for i in range(43)
            for _ in range(sizes[i])
        ]
        sides.append(evaluation.summarise_accuracy(rollouts))
    return sides[0], sides[1]


def run_intervals(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Intervals of one run's accuracy, over problems of which rows repeat some, that hold it."""
    sides = [one_run(setting, rng)[0] for _ in range(pages)]
    return Count(
        sum(holds(side["interval"][0], setting.accuracy, side["interval"][1]) for side in sides),
        pages,
    )


def run_changes(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Intervals of one run's change that hold it: none."""
    hits = 0
    for _ in range(pages):
        own = [
            tables.estimate(side["accuracy"], side["interval"]) for side in one_run(setting, rng)
        ]
        found = tables.newcombe(*own)
        hits += holds(found.low, 0.0, found.high)
    return Count(hits, pages)


def health(setting: Setting, pages: int, rng: np.random.Generator) -> Count:
    """Healthy runs of 30 steps, of which every figure varies by chance alone, that a check of the
    whole run speaks of."""
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
