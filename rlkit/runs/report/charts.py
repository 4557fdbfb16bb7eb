"""Charts of runs: which there are, and how one is drawn, as SVG and as PDF."""

from __future__ import annotations

import importlib.util
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.errors import ConfigError, install
from rlkit.runs.report.read import Group, metrics_of, series
from rlkit.runs.report.verdicts import UNITS, budget

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5cc0", "#8a8a00")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)))  # once the colours are used up
INK, SOFT, GRID = "#333333", "#777777", "#dddddd"


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
    against: str = "steps"  # what the horizontal axis counts, one of UNITS


class Drawn(NamedTuple):
    """A chart as the page and the files beside it have it."""

    name: str
    section: str
    title: str
    unit: str
    svg: bytes
    pdf: bytes


LEARNING, COMPONENTS, POLICY = "Learning", "Reward components", "Distance and entropy"
EPISODES, OPTIMISATION, SCHEDULE, TIME = "Episodes", "Optimisation", "Scheduled numbers", "Time"
SECTIONS = (LEARNING, COMPONENTS, POLICY, EPISODES, OPTIMISATION, SCHEDULE, TIME)
STATIC = (
    Chart("reward", LEARNING, "Training reward", "reward/mean", "mean of the step's rollouts"),
    Chart("accuracy", LEARNING, "Validation accuracy", "eval/accuracy", "", False, "eval/accuracy_low", "eval/accuracy_high"),
    Chart("validation_reward", LEARNING, "Validation reward", "eval/reward", "", False, "eval/reward_low", "eval/reward_high"),
    Chart(
        "test_accuracy", LEARNING, "Test accuracy", "test/accuracy", "before and after", False, "test/accuracy_low", "test/accuracy_high"
    ),
    Chart("test_reward", LEARNING, "Test reward", "test/reward", "before and after", False, "test/reward_low", "test/reward_high"),
    Chart("reward_by_tokens", LEARNING, "Training reward by tokens", "reward/mean", "mean of the step's rollouts", against="tokens"),
    Chart("reward_by_seconds", LEARNING, "Training reward by seconds", "reward/mean", "mean of the step's rollouts", against="seconds"),
    Chart("accuracy_by_tokens", LEARNING, "Validation accuracy by tokens", "eval/accuracy", smooth=False, against="tokens"),
    Chart("no_signal", LEARNING, "Prompts without signal", "group/frac_zero_std", "share whose rewards are all equal"),
    Chart("kl_reference", POLICY, "KL to the reference", "kl/ref_k3", "k3, nats per token"),
    Chart("kl_step", POLICY, "KL moved by a step", "kl/step", "nats per token"),
    Chart("kl_start", POLICY, "KL from the start", "kl/start", "nats per token"),
    Chart("entropy", POLICY, "Entropy", "policy/entropy", "nats per token"),
    Chart("mismatch", POLICY, "Sampler against trainer", "mismatch/logp_abs_mean", "|Δ log-prob| per token"),
    Chart("staleness", POLICY, "Staleness", "staleness/steps_mean", "RL steps that the sampler's weights are behind", False),
    Chart("stale_share", POLICY, "Effective share of the rollouts", "staleness/ess_seq", "of weights trainer over sampler"),
    Chart("length", EPISODES, "Length", "len/mean", "sampled tokens an episode"),
    Chart("truncated", EPISODES, "Truncated episodes", "len/truncated_frac", "share"),
    Chart("turns", EPISODES, "Replies an episode", "tools/turns"),
    Chart("calls", EPISODES, "Tool calls an episode", "tools/calls"),
    Chart("call_failures", EPISODES, "Failed tool calls an episode", "tools/failures"),
    Chart("unreadable_calls", EPISODES, "Episodes with an unreadable call", "parse_fail_frac", "share"),
    Chart("gradient", OPTIMISATION, "Gradient norm", "optim/grad_norm", "before clipping"),
    Chart("clip_low", OPTIMISATION, "Clipped below", "clip/low_frac", "share of tokens"),
    Chart("clip_high", OPTIMISATION, "Clipped above", "clip/high_frac", "share of tokens"),
    Chart("explained_variance", OPTIMISATION, "The critic's explained variance", "value/explained_variance"),
    Chart("advantage", OPTIMISATION, "Size of the advantages", "adv/abs_mean", "mean |advantage|"),
    Chart("step_seconds", TIME, "Seconds a step", "perf/step_s", "", False),
    Chart("tokens_per_second", TIME, "Tokens a second", "perf/tokens_per_s", "", False),
)
LONGEST = 100  # characters of a chart's file
NAMED = 12  # lines that a legend names
PARTS = {"perf/generate_s": "generate", "perf/reward_s": "reward", "perf/update_s": "update"}  # of a step's seconds


def require_matplotlib() -> None:
    """Raises ConfigError where it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"rlkit report draws with matplotlib, which is not installed: {install('report')}")


def with_values(groups: Sequence[Group]) -> list[Chart]:
    """The charts that show something: a metric with a value that is not 0 throughout. A validation or test reward only where it is not the
    accuracy, a component only where it is not the reward."""
    found = metrics_of(run for group in groups for run in group.runs)
    values = {metric: [series(run, metric) for group in groups for run in group.runs] for metric in found}
    told = [chart for chart in (*STATIC, *dynamic(found)) if any(any(own.values()) for own in values.get(chart.metric, ()))]
    told = [chart for chart in told if chart.against == "steps" or (len(groups) > 1 and _spent(groups, chart.against))]
    twins = {"eval/reward": "eval/accuracy", "test/reward": "test/accuracy"} | {
        m: "reward/mean" for m in found if m.startswith("reward/") and m.endswith("/mean")
    }
    twins.pop("reward/mean", None)
    told = [chart for chart in told if chart.metric not in twins or values[chart.metric] != values.get(twins[chart.metric])]
    timed = [Chart("where_time_goes", TIME, "Where a step's time goes", "", "mean seconds a step")] if "perf/step_s" in values else []
    return sorted([*told, *timed], key=lambda chart: SECTIONS.index(chart.section))


def _spent(groups: Sequence[Group], unit: str) -> bool:
    """Whether the runs of all lines tell what they spent."""
    return all(any(budget(run, unit).values()) for group in groups for run in group.runs)


def dynamic(found: Sequence[str]) -> Iterator[Chart]:
    """Charts of what a run's own config names: components of the reward, parts of a mixture, scheduled numbers."""
    for number, metric in enumerate(found):
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", metric.replace("/", "."))
        name = name if len(name) <= LONGEST else f"{name[:LONGEST]}_{number}"  # of a file
        if match := re.fullmatch(r"reward/([^/]+)/mean", metric):
            yield Chart(name, COMPONENTS, match[1], metric, "mean score")
        elif match := re.fullmatch(r"part/(.+)/reward/mean", metric):
            yield Chart(name, COMPONENTS, f"Reward of {match[1]}", metric, "mean of the part's rollouts")
        elif metric.startswith("schedule/") and metric != "schedule/phase":
            yield Chart(name, SCHEDULE, metric.removeprefix("schedule/"), metric, "", False)


# ------------------------------------------------------------------------------------------------------ numbers


def smoothed(values: Sequence[float], steps: int) -> list[float]:
    """Exponential mean with the weights normalised to sum to 1 from the start on; `steps` ≤ 1 leaves the values.

    m_t = (1 - a) Σ_i a^(t-i) x_i / (1 - a^(t+1)), a = 1 - 1 / steps

    >>> [round(v, 3) for v in smoothed([0.0, 1.0, 1.0], 2)]
    [0.0, 0.667, 0.857]
    """
    if steps <= 1:
        return list(values)
    keep, total, weight, out = 1 - 1 / steps, 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


class Line(NamedTuple):
    """A group's line: mean over the seeds, and the lowest and highest of them, at the steps that all seeds have."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


def line(curves: Sequence[Mapping[int, float]]) -> Line:
    """Seeds put together. A seed that ended early ends the line: a mean of fewer would jump where it is missing."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    at = [[curve[step] for curve in curves] for step in steps]
    return Line(steps, [math.fsum(v) / len(v) for v in at], [min(v) for v in at], [max(v) for v in at])


def window(groups: Sequence[Group]) -> int:
    """Steps to smooth over where nobody says: a twelfth of the longest run."""
    longest = max((int(run.rows[-1]["step"]) for group in groups for run in group.runs), default=0)
    return round(longest / 12)


# ------------------------------------------------------------------------------------------------------ drawing


def draw_chart(chart: Chart, groups: Sequence[Group], smooth: int | None) -> Drawn:
    """The chart on white, with its title and legend."""
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": chart.name,
        "text.parse_math": False,  # a dollar sign in a name is one
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": SOFT,
        "xtick.color": INK,
        "ytick.color": INK,
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    svg, pdf = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(settings):
        figure = figure_of(chart, groups, smooth)
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.set_layout_engine("none")  # what the first file found is the second's: finding it takes half the time
        figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
    return Drawn(chart.name, chart.section, chart.title, chart.unit, svg.getvalue(), pdf.getvalue())


def figure_of(chart: Chart, groups: Sequence[Group], smooth: int | None) -> Any:
    """The chart as matplotlib's figure."""
    from matplotlib.figure import Figure

    legend = not chart.metric or len(groups) > 1 or len(groups[0].runs) > 1
    named = min(len(groups), NAMED) if chart.metric else len(PARTS) + 1
    height = 3.0 + (0.2 * named if chart.metric and legend else 0.3 * max(0, len(groups) - 4))
    figure = Figure(figsize=(4.8, height), layout="constrained")
    axes = figure.add_subplot()
    if chart.metric:
        draw_lines(axes, chart, groups, window(groups) if smooth is None else smooth)
        axes.set_xlabel("step" if chart.against == "steps" else UNITS[chart.against])
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.margins(x=0.02)
    else:
        draw_times(axes, groups)
    axes.set_axisbelow(True)
    title = f"{chart.title}{f' ({chart.unit})' if chart.unit else ''}"
    axes.set_title(_clipped(title, 60), loc="left", fontsize=9.5)
    if legend:
        handles, names = axes.get_legend_handles_labels()
        where: Any = {"loc": "outside lower center", "ncols": 1 if chart.metric else 4}
        figure.legend(handles[:named], [_clipped(name, 64) for name in names[:named]], fontsize=8, frameon=False, **where)
    return figure


def draw_lines(axes: Any, chart: Chart, groups: Sequence[Group], smooth: int) -> None:
    """Lines with the band of the seeds, or of one run's interval; unsmoothed values faint behind; phases as dotted lines."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7 if chart.against == "steps" else 4, integer=True))
    for index, group in enumerate(groups):
        colour, dash = style(index)
        curves = [own for run in group.runs if (own := series(run, chart.metric))]
        if not curves:
            continue
        steps = smooth if chart.smooth else 0
        smooth_curves = [dict(zip(own, smoothed(list(own.values()), steps), strict=True)) for own in curves]
        shown = line(smooth_curves)
        label = group.label if len(group.runs) == 1 else f"{group.label}, {len(group.runs)} seeds"
        mark = "o" if len(shown.steps) <= 12 else None
        drawn = {"color": colour, "linestyle": dash}
        at = axis(group, chart.against)
        axes.plot(at(shown.steps), shown.mean, marker=mark, markersize=3, linewidth=1.6, label=label, **drawn)
        if steps > 1:
            raw = line(curves)
            axes.plot(at(raw.steps), raw.mean, linewidth=0.8, alpha=0.35, **drawn)
        for own in smooth_curves:  # what goes on after another seed has ended
            rest = {step: value for step, value in own.items() if not shown.steps or step >= shown.steps[-1]}
            axes.plot(at(list(rest)), list(rest.values()), linewidth=0.9, alpha=0.6, **drawn)
        if len(curves) > 1:
            axes.fill_between(at(shown.steps), shown.low, shown.high, color=colour, alpha=0.18, linewidth=0)
        elif chart.low:
            low, high = series(group.runs[0], chart.low), series(group.runs[0], chart.high)
            both = sorted(low.keys() & high.keys())
            axes.fill_between(both, [low[s] for s in both], [high[s] for s in both], color=colour, alpha=0.18, linewidth=0)
    if chart.against == "steps":
        draw_switches(axes, groups)


def axis(group: Group, against: str) -> Callable[[Sequence[int]], list[float]]:
    """RL steps → where they stand on the horizontal axis: what a run of the group had spent by then, in the mean over its seeds."""
    if against == "steps":
        return list
    spent = [budget(run, against) for run in group.runs]
    return lambda steps: [math.fsum(own.get(step, 0.0) for own in spent) / len(spent) for step in steps]


def draw_switches(axes: Any, groups: Sequence[Group]) -> None:
    """A dotted line where a phase began; its name where it is of the only line, or there is room for it."""
    marked = [(index, switch) for index, group in enumerate(groups) for switch in dict.fromkeys(phase_starts(group))]
    for index, (step, name) in marked:
        axes.axvline(step, color=style(index)[0], linewidth=1, linestyle=(0, (2, 2)), alpha=0.8)
        if len(marked) <= 3:
            axes.annotate(
                name, (step, 1), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points", va="top", fontsize=8
            )


def phase_starts(group: Group) -> Iterator[tuple[int, str]]:
    """(last step before, name of the phase) of a group's runs."""
    for run in group.runs:
        for step, text in run.switches:
            match = re.match(r"phase .+? → (.+?) after step", text)
            yield step, _clipped(match[1] if match else text, 24)


def draw_times(axes: Any, groups: Sequence[Group]) -> None:
    """A bar a group: mean seconds of the parts of a step."""
    names = [group.label for group in groups]
    total = [mean_of(group, "perf/step_s") for group in groups]
    left = [0.0] * len(groups)
    for index, (metric, name) in enumerate([*PARTS.items(), ("", "other")]):
        widths = [mean_of(group, metric) if metric else max(0.0, t - at) for group, t, at in zip(groups, total, left, strict=True)]
        axes.barh(range(len(groups)), widths, left=left, height=0.6, color=COLOURS[index] if metric else SOFT, label=name)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(groups)), [_clipped(text, 28) for text in names])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylim(len(groups) - 0.3, -0.7)


def _clipped(text: str, length: int) -> str:
    """A name that leaves room for the chart."""
    return text if len(text) <= length else text[: length - 1] + "…"


def mean_of(group: Group, metric: str) -> float:
    """Over all steps of all runs of a group; 0 where it is not measured."""
    values = [value for run in group.runs for value in series(run, metric).values()]
    return math.fsum(values) / len(values) if values else 0.0


def style(index: int) -> tuple[str, Any]:
    """Colour and dash of the n-th line."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
