"""Charts of runs: their list, and the lines of each, for the page and for the files beside it."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from rlkit.extras.report.tables import list_metrics
from rlkit.runs.reading import Group, read_series
from rlkit.runs.verdicts import read_budget


class Chart(NamedTuple):
    """A metric over the steps, one line a group of runs."""

    name: str  # of the file
    section: str
    title: str
    metric: str
    unit: str = ""
    smooth: bool = True
    low: str = ""  # metrics of an interval
    high: str = ""
    against: str = "steps"  # unit of the horizontal axis, one of UNITS
    span: float = 0.1  # the least range of the vertical axis: noise below it stays small
    healthy: tuple[float, float] | None = None  # the band of values without need for attention
    # a line joins its points; off for points only before and after training
    joined: bool = True


LEARNING = "Learning"
COMPONENTS = "Reward components"
POLICY = "Distance and entropy"
EPISODES = "Episodes"
OPTIMISATION = "Optimisation"
SCHEDULE = "Scheduled numbers"
TIME = "Time"
OTHER = "All other metrics"
SECTIONS = (LEARNING, COMPONENTS, POLICY, EPISODES, OPTIMISATION, SCHEDULE, TIME, OTHER)
LEAST = 0.1  # the least range of any axis, as a share of its largest value


def chart_held_out(name: str, title: str, metric: str, *, joined: bool = True) -> Chart:
    """A chart of a figure of held-out problems, with its interval."""
    unit = "" if joined else "before and after"
    sides = f"{metric}_low", f"{metric}_high"
    return Chart(name, LEARNING, title, metric, unit, False, *sides, joined=joined)


STATIC = (
    Chart("reward", LEARNING, "Training reward", "reward/mean", "mean of the step's rollouts"),
    chart_held_out("accuracy", "Validation accuracy", "eval/accuracy"),
    chart_held_out("validation_reward", "Validation reward", "eval/reward"),
    chart_held_out("test_accuracy", "Test accuracy", "test/accuracy", joined=False),
    chart_held_out("test_reward", "Test reward", "test/reward", joined=False),
    Chart(
        "reward_by_tokens",
        LEARNING,
        "Training reward by tokens",
        "reward/mean",
        "mean of the step's rollouts",
        against="tokens",
    ),
    Chart(
        "reward_by_seconds",
        LEARNING,
        "Training reward by seconds",
        "reward/mean",
        "mean of the step's rollouts",
        against="seconds",
    ),
    Chart(
        "accuracy_by_tokens",
        LEARNING,
        "Validation accuracy by tokens",
        "eval/accuracy",
        smooth=False,
        against="tokens",
    ),
    Chart(
        "no_signal",
        LEARNING,
        "Prompts without signal",
        "group/frac_zero_std",
        "share whose rewards are all equal",
    ),
    Chart(
        "kl_reference", POLICY, "KL to the reference", "kl/ref_k3", "k3, nats per token", span=0.01
    ),
    Chart(
        "kl_step",
        POLICY,
        "KL moved by a step",
        "kl/step",
        "nats per token",
        span=0.01,
        healthy=(0, 0.01),
    ),
    Chart("kl_start", POLICY, "KL from the start", "kl/start", "nats per token", span=0.01),
    Chart("entropy", POLICY, "Entropy", "policy/entropy", "nats per token"),
    Chart(
        "mismatch",
        POLICY,
        "Sampler against trainer",
        "mismatch/logp_abs_mean",
        "|Δ log-prob| per token",
        span=0.01,  # no band: in half precision each run measures its own bound
    ),
    Chart(
        "staleness",
        POLICY,
        "Staleness",
        "staleness/steps_mean",
        "RL steps that the sampler's weights are behind",
        False,
    ),
    Chart(
        "stale_share",
        POLICY,
        "Effective share of the rollouts",
        "staleness/ess_seq",
        "of weights trainer over sampler",
    ),
    Chart("length", EPISODES, "Length", "len/mean", "sampled tokens an episode"),
    Chart(
        "truncated", EPISODES, "Truncated episodes", "len/truncated_frac", "share", healthy=(0, 0.1)
    ),
    Chart("turns", EPISODES, "Replies an episode", "tools/turns"),
    Chart(
        "environment_errors",
        EPISODES,
        "Failed environments",
        "stop_reason/error",
        "share of the episodes",
        healthy=(0, 0.05),
    ),
    Chart("calls", EPISODES, "Tool calls an episode", "tools/calls"),
    Chart("call_failures", EPISODES, "Failed tool calls an episode", "tools/failures"),
    Chart(
        "unreadable_calls",
        EPISODES,
        "Episodes with an unreadable call",
        "parse_fail_frac",
        "share",
        healthy=(0, 0.2),
    ),
    Chart(
        "gradient", OPTIMISATION, "Gradient norm", "optim/grad_norm", "before clipping", span=0.0
    ),
    Chart("clip_low", OPTIMISATION, "Clipped below", "clip/low_frac", "share of tokens", span=0.02),
    Chart(
        "clip_high", OPTIMISATION, "Clipped above", "clip/high_frac", "share of tokens", span=0.02
    ),
    Chart(
        "explained_variance",
        OPTIMISATION,
        "The critic's explained variance",
        "value/explained_variance",
    ),
    Chart("advantage", OPTIMISATION, "Size of the advantages", "adv/abs_mean", "mean |advantage|"),
    Chart("step_seconds", TIME, "Seconds a step", "perf/step_s", "", False),
    Chart("tokens_per_second", TIME, "Tokens a second", "perf/tokens_per_s", "", False),
)
LONGEST = 100  # characters of a chart's file
# of a step's seconds
PARTS = {"perf/generate_s": "generate", "perf/reward_s": "reward", "perf/update_s": "update"}


def with_values(groups: Sequence[Group]) -> list[Chart]:
    """The charts with something to show: a metric that is not 0 throughout. A validation or test
    reward must differ from the accuracy, a component from the reward."""
    found = list_metrics(run for group in groups for run in group.runs)
    values = {
        metric: [read_series(run, metric) for group in groups for run in group.runs]
        for metric in found
    }
    told = [
        chart
        for chart in (*STATIC, *chart_dynamic(found))
        if any(any(own.values()) for own in values.get(chart.metric, ()))
    ]
    told = [
        chart
        for chart in told
        if chart.against == "steps" or (len(groups) > 1 and _report_spending(groups, chart.against))
    ]
    twins = {"eval/reward": "eval/accuracy", "test/reward": "test/accuracy"} | {
        m: "reward/mean" for m in found if m.startswith("reward/") and m.endswith("/mean")
    }
    twins.pop("reward/mean", None)
    told = [
        chart
        for chart in told
        if chart.metric not in twins or values[chart.metric] != values.get(twins[chart.metric])
    ]
    timed = (
        [Chart("where_time_goes", TIME, "Where a step's time goes", "", "mean seconds a step")]
        if "perf/step_s" in values
        else []
    )
    return sorted([*told, *timed], key=lambda chart: SECTIONS.index(chart.section))


def chart_others(groups: Sequence[Group], told: Sequence[Chart]) -> list[Chart]:
    """A chart of every further metric that varies, the user's own among them; on the page alone."""
    known = {name for chart in told for name in (chart.metric, chart.low, chart.high)}
    found = [
        metric
        for metric in list_metrics(run for group in groups for run in group.runs)
        if metric not in known
    ]
    varying = [
        m
        for m in found
        if len(
            {
                value
                for group in groups
                for run in group.runs
                for value in read_series(run, m).values()
            }
        )
        > 1
    ]
    return [Chart(metric, OTHER, metric, metric, span=0.0) for metric in varying]


def _report_spending(groups: Sequence[Group], unit: str) -> bool:
    """Whether the runs of all lines report their spending."""
    return all(any(read_budget(run, unit).values()) for group in groups for run in group.runs)


def chart_dynamic(found: Sequence[str]) -> Iterator[Chart]:
    """Charts of names from a run's own config: components of the reward, parts of a mixture,
    streams, scheduled numbers."""
    for number, metric in enumerate(found):
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", metric.replace("/", "."))
        name = name if len(name) <= LONGEST else f"{name[:LONGEST]}_{number}"  # of a file
        term = re.fullmatch(r"reward/([^/]+)/mean", metric)
        part = re.fullmatch(r"part/(.+)/reward/mean", metric)
        stream = re.fullmatch(r"streams/(.+)", metric)
        if term:
            yield Chart(name, COMPONENTS, term[1], metric, "mean score")
        elif part:
            yield Chart(
                name, COMPONENTS, f"Reward of {part[1]}", metric, "mean of the part's rollouts"
            )
        elif stream:
            yield Chart(
                name, POLICY, f"Loss of the stream {stream[1]}", metric, "nats per token", span=0.01
            )
        elif metric.startswith("schedule/") and metric != "schedule/phase":
            yield Chart(
                name, SCHEDULE, metric.removeprefix("schedule/"), metric, "", False, span=0.0
            )


# ------------------------------------------------------------------------------------------ numbers


def smooth_values(curve: Mapping[int, float], steps: int) -> dict[int, float]:
    """Exponential mean, with weights that fade by the distance in steps and sum to 1 from the start
    on; `steps` ≤ 1 leaves the values.

    m_t = Σ_s a^(t-s) x_s / Σ_s a^(t-s) over the measured s ≤ t, a = 1 - 1 / steps

    >>> {step: round(v, 3) for step, v in smooth_values({0: 0.0, 1: 1.0, 2: 1.0}, 2).items()}
    {0: 0.0, 1: 0.667, 2: 0.857}
    """
    if steps <= 1:
        return dict(curve)
    keep = 1 - 1 / steps
    total = 0.0
    weight = 0.0
    before = 0
    out = {}
    for step, value in curve.items():
        fade = keep ** (step - before)
        total = fade * total + value
        weight = fade * weight + 1
        out[step] = total / weight
        before = step
    return out


class Line(NamedTuple):
    """A group's line: mean over the seeds, and their lowest and highest value, at the steps common
    to all seeds."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]

    def spread(self) -> bool:
        """Whether there is a band or are bars to draw."""
        return self.low != self.high


def join_seeds(curves: Sequence[Mapping[int, float]]) -> Line:
    """Put seeds together. A seed that ended early ends the line: the mean of the others would jump
    there."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    at = [[curve[step] for curve in curves] for step in steps]
    return Line(
        steps, [math.fsum(v) / len(v) for v in at], [min(v) for v in at], [max(v) for v in at]
    )


def choose_window(groups: Sequence[Group]) -> int:
    """Steps to smooth over by default: a twelfth of the longest run."""
    longest = max((int(run.rows[-1]["step"]) for group in groups for run in group.runs), default=0)
    return round(longest / 12)


# -------------------------------------------------------------------------------------------- lines


class Curve(NamedTuple):
    """A chart's picture of a group of runs. It has a band if every step was measured, and bars at
    points further apart."""

    group: int
    shown: Line  # smoothed; low and high are the seeds', or one run's interval
    raw: Line | None  # the same without smoothing, if there is any
    tails: Sequence[Mapping[int, float]]  # of seeds that go on after another one's end
    bars: bool  # in place of a band


def draw_curves(chart: Chart, groups: Sequence[Group], smooth: int | None) -> list[Curve]:
    """The lines of a chart, smoothed over so many steps (None: `choose_window`)."""
    out = []
    steps = 0
    if chart.smooth:
        steps = choose_window(groups) if smooth is None else smooth
    for index, group in enumerate(groups):
        measured = [run for run in group.runs if read_series(run, chart.metric)]
        if not measured:
            continue
        own = [read_series(run, chart.metric) for run in measured]
        smooth_own = [smooth_values(values, steps) for values in own]
        shown = join_seeds(smooth_own)
        if len(own) == 1 and chart.low:
            low = read_series(measured[0], chart.low)
            high = read_series(measured[0], chart.high)
            sides = (
                [side.get(step, mean) for step, mean in zip(shown.steps, shown.mean, strict=True)]
                for side in (low, high)
            )
            shown = Line(shown.steps, shown.mean, *sides)
        ended = shown.steps[-1] if shown.steps else 0
        tails = [
            {step: value for step, value in values.items() if step >= ended}
            for values in smooth_own
        ]
        bars = not chart.joined or any(b - a > 1 for a, b in pairwise(shown.steps))
        out.append(
            Curve(
                index,
                shown,
                join_seeds(own) if steps > 1 else None,
                [tail for tail in tails if len(tail) > 1],
                bars,
            )
        )
    return out


def choose_limits(chart: Chart, low: float, high: float) -> tuple[float, float]:
    """The vertical axis for values between `low` and `high`: at least `span`, and LEAST of the
    largest value, so that noise stays small.

    >>> choose_limits(Chart("", "", "", "", span=0.1), 0.98, 0.981)
    (0.9305, 1.0305)
    """
    least = max(chart.span, LEAST * max(abs(low), abs(high)))
    if high - low >= least:
        return low, high
    middle = (low + high) / 2
    bottom = middle - least / 2
    bottom = 0.0 if low >= 0 > bottom else bottom
    return round(bottom, 12), round(bottom + least, 12)


def make_axis(group: Group, against: str) -> Callable[[Sequence[int]], list[float]]:
    """RL steps → their place on the horizontal axis: the spending of a run of the group by then, in
    the mean over its seeds. A seed that has ended spends nothing more."""
    if against == "steps":
        return list
    spent = [read_budget(run, against) for run in group.runs]
    known = [(list(own), [0.0, *own.values()]) for own in spent]

    def place(step: int) -> float:
        return math.fsum(sums[bisect_right(steps, step)] for steps, sums in known) / len(known)

    return lambda steps: [place(step) for step in steps]


def phase_starts(group: Group) -> Iterator[tuple[int, str]]:
    """(last step before, name of the phase) of a group's runs."""
    for run in group.runs:
        for step, text in run.switches:
            match = re.match(r"phase .+? → (.+?) after step", text)
            yield step, abridge_name(match[1] if match else text, 24)


def average_metric(group: Group, metric: str) -> float:
    """Mean over all steps of all runs of a group; 0 if it is not measured."""
    values = [value for run in group.runs for value in read_series(run, metric).values()]
    return math.fsum(values) / len(values) if values else 0.0


def name_line(group: Group) -> str:
    """A line's name in a legend, with the number of its seeds."""
    seeds = len({run.seed or 0 for run in group.runs})
    return group.label if seeds == 1 else f"{group.label}, {seeds} seeds"


def abridge_name(text: str, length: int) -> str:
    """Shorten a name, so that it leaves room for the chart."""
    return text if len(text) <= length else text[: length - 1] + "…"


# ----------------------------------------------------------------------------------------- the page

POINTS = 2000  # of a line on the page; a longer one keeps its extremes
BINS = ("0", "to ¼", "to ½", "to ¾", "below 1", "1")  # of solve rates


def page_data(told: Sequence[Chart], groups: Sequence[Group], smooth: int | None) -> dict[str, Any]:
    """The data for the page's script: {groups: […], charts: […]}."""
    lines = [chart for chart in told if chart.metric and chart.against == "steps"]
    return {
        "groups": [_group_data(group, groups) for group in groups],
        "charts": [_chart_data(chart, groups, smooth) for chart in lines],
    }


def _group_data(group: Group, groups: Sequence[Group]) -> dict[str, Any]:
    """A line's name, its phases, and the spending of its runs after each step, for the other
    horizontal axes."""
    steps = sorted({row["step"] for run in group.runs for row in run.rows})
    spent = {
        unit: _round_values(make_axis(group, unit)(steps))
        for unit in ("tokens", "seconds")
        if _report_spending(groups, unit)
    }
    return {
        "label": name_line(group),
        "phases": list(dict.fromkeys(phase_starts(group))),
        "steps": steps,
        "spent": spent,
    }


def _chart_data(chart: Chart, groups: Sequence[Group], smooth: int | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        "name": chart.name,
        "section": chart.section,
        "title": chart.title,
        "unit": chart.unit,
        "metric": chart.metric,
    }
    own |= {"span": chart.span, "healthy": chart.healthy, "joined": chart.joined}
    return own | {"lines": [_curve_data(curve) for curve in draw_curves(chart, groups, smooth)]}


def _curve_data(curve: Curve) -> dict[str, Any]:
    shown = curve.shown
    kept = thin_values(shown.mean)
    out: dict[str, Any] = {
        "group": curve.group,
        "x": [shown.steps[i] for i in kept],
        "y": _round_values(shown.mean[i] for i in kept),
    }
    if shown.spread():
        out |= {
            "low": _round_values(shown.low[i] for i in kept),
            "high": _round_values(shown.high[i] for i in kept),
            "bars": curve.bars,
        }
    if curve.raw:
        kept = thin_values(curve.raw.mean)
        out["raw"] = {
            "x": [curve.raw.steps[i] for i in kept],
            "y": _round_values(curve.raw.mean[i] for i in kept),
        }
    return out | {
        "tails": [{"x": list(tail), "y": _round_values(tail.values())} for tail in curve.tails]
    }


def thin_values(values: Sequence[float]) -> list[int]:
    """Positions of at most POINTS of the values: the first, the last, and the least and the
    greatest of each stretch. No spike is lost."""
    if len(values) <= POINTS:
        return list(range(len(values)))
    count = POINTS // 2 - 1
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    ends = (
        (min(part, key=values.__getitem__), max(part, key=values.__getitem__))
        for part in map(range, edges[:-1], edges[1:])
    )
    return sorted({0, len(values) - 1, *(i for pair in ends for i in pair)})


def _round_values(values: Iterable[float]) -> list[float]:
    """Round to five digits: a chart shows no more, and they take half the size."""
    return [float(f"{value:.5g}") for value in values]


def seconds_data(groups: Sequence[Group]) -> dict[str, Any]:
    """Seconds of a step by part: {names: [part], rows: [[seconds of each part] of each line]}."""
    rows = []
    for group in groups:
        own = [average_metric(group, metric) for metric in PARTS]
        rows.append(
            _round_values([*own, max(0.0, average_metric(group, "perf/step_s") - sum(own))])
        )
    return {"names": [*PARTS.values(), "other"], "rows": rows}


def solve_rates(solved: Sequence[tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Shares of the prompts in each of BINS, over the first and over the last fifth of the steps;
    empty if nothing was played.

    >>> solve_rates([(1, 0.0), (1, 0.5), (9, 1.0)])
    ([0.5, 0.0, 0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    """
    steps = sorted({step for step, _ in solved})
    fifth = max(1, len(steps) // 5)
    sides = (
        [rate for step, rate in solved if step in chosen]
        for chosen in (set(steps[:fifth]), set(steps[-fifth:]))
    )
    early, late = (
        [sum(find_bin(rate) == i for rate in side) / max(1, len(side)) for i in range(len(BINS))]
        for side in sides
    )
    return early, late


def find_bin(rate: float) -> int:
    """Place of a solve rate in BINS."""
    return bisect_left((0.0, 0.25, 0.5, 0.75), rate) + (rate >= 1)
