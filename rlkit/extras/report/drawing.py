"""Charts as SVG and PDF for papers, drawn by matplotlib on white."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlkit.extras.report.charts import (
    PARTS,
    Chart,
    abridge_name,
    choose_limits,
    draw_curves,
    make_axis,
    name_line,
    phase_starts,
    seconds_data,
)
from rlkit.runs.reading import Group
from rlkit.runs.verdicts import UNITS

# Okabe and Ito's colours; the colour-blind can tell them apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5cc0", "#8a8a00")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)))  # once the colours are used up
INK = "#333333"
SOFT = "#777777"
GRID = "#dddddd"
HEALTHY = "#009e73"
NAMED = 12  # lines named in a legend


class Drawn(NamedTuple):
    """A chart in the form of the files beside the page."""

    name: str
    svg: bytes
    pdf: bytes


def has_matplotlib() -> bool:
    """Whether charts can be drawn for papers; the page draws its own."""
    return importlib.util.find_spec("matplotlib") is not None


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
    svg = io.BytesIO()
    pdf = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure = draw_figure(chart, groups, smooth)
        figure.savefig(svg, format="svg", metadata={"Date": None})
        # The second file takes the layout of the first: finding it takes half the time.
        figure.set_layout_engine("none")
        figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
    return Drawn(chart.name, svg.getvalue(), pdf.getvalue())


def draw_figure(chart: Chart, groups: Sequence[Group], smooth: int | None) -> Any:
    """The chart as matplotlib's figure."""
    from matplotlib.figure import Figure

    legend = not chart.metric or len(groups) > 1 or len(groups[0].runs) > 1
    named = min(len(groups), NAMED) if chart.metric else len(PARTS) + 1
    height = 3.0 + (0.2 * named if chart.metric and legend else 0.3 * max(0, len(groups) - 4))
    figure = Figure(figsize=(4.8, height), layout="constrained")
    axes = figure.add_subplot()
    if chart.metric:
        draw_lines(axes, chart, groups, smooth)
        axes.set_xlabel("step" if chart.against == "steps" else UNITS[chart.against])
        axes.grid(axis="y", color=GRID, linewidth=0.7)
        axes.margins(x=0.02)
    else:
        draw_times(axes, groups)
    axes.set_axisbelow(True)
    title = f"{chart.title}{f' ({chart.unit})' if chart.unit else ''}"
    axes.set_title(abridge_name(title, 60), loc="left", fontsize=9.5)
    if legend:
        handles, names = axes.get_legend_handles_labels()
        where: Any = {"loc": "outside lower center", "ncols": 1 if chart.metric else 4}
        figure.legend(
            handles[:named],
            [abridge_name(name, 64) for name in names[:named]],
            fontsize=8,
            frameon=False,
            **where,
        )
    return figure


def draw_lines(axes: Any, chart: Chart, groups: Sequence[Group], smooth: int | None) -> None:
    """Draw lines with the spread of the seeds, or one run's interval: a band if every step was
    measured, else bars at the points.

    Unsmoothed values are faint behind, and phases are dotted lines.
    """
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=7 if chart.against == "steps" else 4, integer=True)
    )
    for curve in draw_curves(chart, groups, smooth):
        group = groups[curve.group]
        shown = curve.shown
        colour, dash = choose_style(curve.group)
        mark = "o" if len(shown.steps) <= 12 or curve.bars else None
        drawn = {"color": colour, "linestyle": dash if chart.joined else "none"}
        at = make_axis(group, chart.against)
        axes.plot(
            at(shown.steps),
            shown.mean,
            marker=mark,
            markersize=3,
            linewidth=1.6,
            label=name_line(group),
            **drawn,
        )
        if curve.raw:
            axes.plot(at(curve.raw.steps), curve.raw.mean, linewidth=0.8, alpha=0.35, **drawn)
        for tail in curve.tails:
            axes.plot(
                at(list(tail)),
                list(tail.values()),
                marker=None if chart.joined else ".",
                linewidth=0.9,
                alpha=0.6,
                **drawn,
            )
        if shown.spread() and curve.bars:
            axes.vlines(
                at(shown.steps), shown.low, shown.high, color=colour, alpha=0.6, linewidth=1.4
            )
        elif shown.spread():
            axes.fill_between(
                at(shown.steps), shown.low, shown.high, color=colour, alpha=0.18, linewidth=0
            )
    low, high = axes.dataLim.intervaly
    if math.isfinite(low):
        own = choose_limits(chart, low, high)
        if own != (low, high):
            axes.set_ylim(*own)
    if chart.healthy:
        bottom, top = axes.get_ylim()
        axes.axhspan(*chart.healthy, color=HEALTHY, alpha=0.07, linewidth=0, zorder=0)
        axes.set_ylim(bottom, top)
    if chart.against == "steps":
        draw_switches(axes, groups)


def draw_switches(axes: Any, groups: Sequence[Group]) -> None:
    """Draw a dotted line at the start of a phase. Write its name if there is only one line, or room
    for it."""
    marked = [
        (index, switch)
        for index, group in enumerate(groups)
        for switch in dict.fromkeys(phase_starts(group))
    ]
    for index, (step, name) in marked:
        axes.axvline(
            step, color=choose_style(index)[0], linewidth=1, linestyle=(0, (2, 2)), alpha=0.8
        )
        if len(marked) <= 3:
            axes.annotate(
                name,
                (step, 1),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2),
                textcoords="offset points",
                va="top",
                fontsize=8,
            )


def draw_times(axes: Any, groups: Sequence[Group]) -> None:
    """Draw a bar a group: mean seconds of the parts of a step."""
    names = [group.label for group in groups]
    data = seconds_data(groups)
    left = [0.0] * len(groups)
    for index, name in enumerate(data["names"]):
        widths = [row[index] for row in data["rows"]]
        axes.barh(
            range(len(groups)),
            widths,
            left=left,
            height=0.6,
            color=COLOURS[index] if index < len(PARTS) else SOFT,
            label=name,
        )
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(groups)), [abridge_name(text, 28) for text in names])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_ylim(len(groups) - 0.3, -0.7)


def choose_style(index: int) -> tuple[str, Any]:
    """Colour and dash of the n-th line."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
