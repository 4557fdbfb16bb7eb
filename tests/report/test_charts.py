"""Which charts there are, what their lines are, and what becomes of matplotlib's SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from rlkit.errors import install
from rlkit.runs.report import charts
from rlkit.runs.report.read import group_runs, read_run


def groups(make_run, **changes):
    return group_runs([read_run(make_run("a", **changes)), read_run(make_run("b", lr=1e-4, title="<b>&$x$"))])


def test_smoothing_has_no_bias_towards_the_start():
    """A constant stays itself from the first value on; an exponential mean that starts at 0 would not."""
    assert charts.smoothed([3.0] * 5, 4) == pytest.approx([3.0] * 5)
    assert charts.smoothed([1.0, 2.0], 0) == [1.0, 2.0]


def test_a_seed_that_ended_early_does_not_make_the_mean_jump():
    told = charts.line([{1: 0.0, 2: 0.0, 3: 0.0}, {1: 1.0, 2: 1.0}])
    assert told == charts.Line([1, 2], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0])


def test_charts_that_show_nothing_are_left_out(make_run):
    chosen = {chart.metric for chart in charts.with_values(groups(make_run))}
    assert {"reward/mean", "kl/ref_k3", "policy/entropy", "len/mean", "eval/accuracy", "reward/format/mean"} <= chosen
    assert "parse_fail_frac" not in chosen, "0 throughout"
    assert "value/loss" not in chosen, "never measured"
    assert "reward/task/mean" not in chosen, "the reward itself, by another name"
    assert "eval/reward" not in chosen, "the accuracy, by another name"


def test_a_chart_names_its_lines_and_is_there_for_papers(make_run):
    """Names of runs are text in the picture, whatever characters they hold; a dollar sign starts no formula."""
    drawn = charts.draw_chart(charts.STATIC[0], groups(make_run), 2)
    texts = [element.text for element in ET.fromstring(drawn.svg).iter() if element.tag.endswith("text")]
    assert {"grpo", "<b>&$x$", "step", "Training reward (mean of the step's rollouts)"} <= set(texts)
    assert drawn.pdf.startswith(b"%PDF")


def test_a_phase_is_marked_by_its_name(make_run):
    svg = charts.draw_chart(charts.STATIC[0], groups(make_run, switch=2), None).svg.decode()
    assert ">b</text>" in svg.replace("\n", "")


def test_long_names_leave_room_for_the_chart(make_run):
    """matplotlib warns, which is an error here, where a legend takes all of the figure."""
    many = group_runs([read_run(make_run(str(i), lr=10.0**-i, title="n" * 200)) for i in range(15)])
    for chart in (charts.STATIC[0], charts.Chart("times", charts.TIME, "Times", "")):
        charts.draw_chart(chart, many, None)


def test_equal_runs_give_equal_bytes(make_run):
    shown = groups(make_run)
    assert charts.draw_chart(charts.STATIC[0], shown, None) == charts.draw_chart(charts.STATIC[0], shown, None)


def test_without_matplotlib_the_refusal_says_what_to_install(monkeypatch):
    monkeypatch.setattr(charts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(charts.ConfigError, match=re.escape(install("report"))):
        charts.require_matplotlib()
