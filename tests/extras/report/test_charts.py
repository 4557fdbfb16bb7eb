"""Which charts there are, what their lines are, and what becomes of matplotlib's SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from rlkit.extras.report import charts, drawing
from rlkit.runs.reading import group_runs, read_run


def groups(make_run, **changes):
    return group_runs(
        [read_run(make_run("a", **changes)), read_run(make_run("b", lr=1e-4, title="<b>&$x$"))]
    )


def test_smoothing_has_no_bias_towards_the_start():
    """A constant stays itself from the first value on; an exponential mean that starts at 0 would
    not."""
    flat = dict.fromkeys(range(1, 6), 3.0)
    assert charts.smooth_values(flat, 4) == pytest.approx(flat)
    assert charts.smooth_values({1: 1.0, 2: 2.0}, 0) == {1: 1.0, 2: 2.0}


def test_smoothing_fades_by_steps_and_not_by_points(make_run):
    """A metric of two evaluations ended near the mean of both."""
    run = read_run(make_run("a"))
    measured = {0: 0.2, 48: 0.9}
    rows = [{"step": step, "test/part/easy/accuracy": own} for step, own in measured.items()]
    chart = charts.Chart("", charts.OTHER, "", "test/part/easy/accuracy")
    (curve,) = charts.draw_curves(chart, group_runs([run._replace(rows=rows)]), None)
    assert curve.shown.mean == pytest.approx([0.2, 0.9], abs=1e-3)


def test_the_interval_is_of_the_run_that_was_measured(make_run):
    """It was read from the first run, which has no evaluations."""
    first, second = (read_run(make_run(str(seed), seed=seed)) for seed in (0, 1))
    bare = first._replace(rows=[{"step": 1, "reward/mean": 0.5}])
    chart = charts.Chart("", "", "", "eval/accuracy", "", False, "eval/accuracy_low", "x")
    (curve,) = charts.draw_curves(chart, group_runs([bare, second]), None)
    assert curve.shown[:3] == ([0], [0.5], [0.4])


def test_a_seed_that_ended_early_does_not_make_the_mean_jump():
    told = charts.join_seeds([{1: 0.0, 2: 0.0, 3: 0.0}, {1: 1.0, 2: 1.0}])
    assert told == charts.Line([1, 2], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0])


def test_spending_grows_where_a_seed_ended_early(make_run):
    (group,) = group_runs([read_run(make_run("a", steps=2)), read_run(make_run("b", seed=1))])
    assert charts.make_axis(group, "seconds")([0, 1, 2, 3, 4]) == [0, 3, 6, 7.5, 9]


def test_charts_that_show_nothing_are_left_out(make_run):
    chosen = {chart.metric for chart in charts.with_values(groups(make_run))}
    assert {
        "reward/mean",
        "kl/ref_k3",
        "policy/entropy",
        "len/mean",
        "eval/accuracy",
        "reward/format/mean",
    } <= chosen
    assert "parse_fail_frac" not in chosen, "0 throughout"
    assert "value/loss" not in chosen, "never measured"
    assert "reward/task/mean" not in chosen, "the reward itself, by another name"
    assert "eval/reward" not in chosen, "the accuracy, by another name"


@pytest.mark.slow
def test_a_chart_names_its_lines_and_is_there_for_papers(make_run):
    """Names of runs are text in the picture, whatever characters they hold; a dollar sign starts no
    formula."""
    drawn = drawing.draw_chart(charts.STATIC[0], groups(make_run), 2)
    texts = [
        element.text for element in ET.fromstring(drawn.svg).iter() if element.tag.endswith("text")
    ]
    assert {"grpo", "<b>&$x$", "step", "Training reward (mean of the step's rollouts)"} <= set(
        texts
    )
    assert drawn.pdf.startswith(b"%PDF")


@pytest.mark.slow
def test_a_phase_is_marked_by_its_name(make_run):
    svg = drawing.draw_chart(charts.STATIC[0], groups(make_run, switch=2), None).svg.decode()
    assert ">b</text>" in svg.replace("\n", "")


@pytest.mark.slow
def test_long_names_leave_room_for_the_chart(make_run):
    """matplotlib warns, which is an error here, where a legend takes all of the figure."""
    many = group_runs([read_run(make_run(str(i), lr=10.0**-i, title="n" * 200)) for i in range(15)])
    for chart in (charts.STATIC[0], charts.Chart("times", charts.TIME, "Times", "")):
        drawing.draw_chart(chart, many, None)


@pytest.mark.slow
def test_equal_runs_give_equal_bytes(make_run):
    shown = groups(make_run)
    assert drawing.draw_chart(charts.STATIC[0], shown, None) == drawing.draw_chart(
        charts.STATIC[0], shown, None
    )


def test_an_axis_does_not_magnify_noise(make_run):
    """Validation accuracies of 0.5 throughout filled the height of their chart, and so did rounding
    errors of a ratio."""
    svg = drawing.draw_figure(charts.STATIC[1], groups(make_run), None)
    low, high = svg.axes[0].get_ylim()
    assert high - low >= 0.1
    flat = charts.Chart("", "", "", "", span=0.0)
    assert charts.choose_limits(flat, 1.0, 1.0 + 1e-7) == pytest.approx(
        (0.95, 1.05)
    ) and charts.choose_limits(flat, 0.0, 2.0) == (0.0, 2.0)
    assert charts.choose_limits(charts.Chart("", "", "", "", span=0.1), 0.0, 0.01)[0] == 0.0, (
        "a share does not look negative"
    )


def test_a_long_line_keeps_its_spikes(monkeypatch):
    monkeypatch.setattr(charts, "POINTS", 20)
    values = [0.0] * 1000
    values[313], values[777] = 5.0, -5.0
    kept = charts.thin_values(values)
    assert {0, 313, 777, 999} <= set(kept) and len(kept) <= 20
    assert charts.thin_values([1.0] * 20) == list(range(20))


def test_the_page_draws_every_metric_that_varies(make_run):
    """A metric of one's own had no chart, and nothing said so."""
    both = group_runs(
        [
            read_run(make_run("a", change={"mine/share": 1.0})),
            read_run(make_run("b", lr=1e-4, change={"mine/share": 2.0})),
        ]
    )
    told = charts.with_values(both)
    more = charts.chart_others(both, told)
    assert "mine/share" in {chart.metric for chart in more} and "eval/accuracy_low" not in {
        chart.metric for chart in more
    }
    data = charts.page_data([*told, *more], both, None)
    lines = {chart["metric"]: chart["lines"] for chart in data["charts"]}
    assert lines["reward/mean"][0]["x"] == [1, 2, 3, 4] and lines["reward/mean"][0][
        "y"
    ] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert data["groups"][0]["spent"]["seconds"] == [0.0, 3.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize(
    ("rate", "bin"),
    [
        (0.0, 0),
        (0.125, 1),
        (0.25, 1),
        (0.26, 2),
        (0.5, 2),
        (0.75, 3),
        (0.76, 4),
        (0.99, 4),
        (1.0, 5),
    ],
)
def test_a_solve_rate_has_one_bin(rate, bin):
    assert charts.solve_rates([(1, rate)])[1].index(1.0) == bin


def test_bars_stand_where_not_every_step_was_measured(make_run):
    """An accuracy before and after was drawn as a ribbon between the two, over steps at which
    nobody had measured."""
    measured = {"test/accuracy": 0.5, "test/accuracy_low": 0.4, "test/accuracy_high": 0.6}
    (group,) = group_runs([read_run(make_run("a"))])
    (run,) = group.runs
    rows = [
        row
        | (measured if row["step"] in (0, 4) else {})
        | {
            "eval/accuracy": 0.5 + row["step"] / 10,
            "eval/accuracy_low": 0.4,
            "eval/accuracy_high": 1.0,
        }
        for row in run.rows
    ]
    every = [group._replace(runs=[run._replace(rows=rows)])]
    sparse = [
        group._replace(runs=[run._replace(rows=[row for row in rows if row["step"] in (0, 2, 4)])])
    ]
    named = {chart.name: chart for chart in charts.STATIC}
    for name, shown, bars in (
        ("test_accuracy", every, True),
        ("accuracy", every, False),
        ("accuracy", sparse, True),
    ):
        (curve,) = charts.draw_curves(named[name], shown, None)
        (axes,) = drawing.draw_figure(named[name], shown, None).axes
        kinds = {type(own).__name__ for own in axes.collections}
        assert (curve.bars, "LineCollection" in kinds, "FillBetweenPolyCollection" in kinds) == (
            bars,
            bars,
            not bars,
        ), name
    assert [
        own.get_linestyle()
        for own in drawing.draw_figure(named["test_accuracy"], every, None).axes[0].lines
    ] == ["None"]
    assert [
        own["lines"][0]["bars"]
        for own in charts.page_data([named["test_accuracy"]], every, None)["charts"]
    ] == [True]
