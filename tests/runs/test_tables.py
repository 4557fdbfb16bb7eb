"""Held-out figures before and after, and the verdict of the checks."""

from __future__ import annotations

import math

import pytest

from rlkit.runs.reading import group_runs, read_run
from rlkit.runs.tables import (
    WithInterval,
    average_over_seeds,
    find_symptoms,
    mark_change,
    newcombe,
    tabulate_held_out,
)
from rlkit.statistics import wilson


def test_the_interval_of_a_change_is_newcombes():
    """Newcombe 1998, table II, example (a): 56/70 against 48/80, method 10: 0.0524 to 0.3339."""
    first, second = (WithInterval(k / n, *wilson(k, n)) for k, n in ((48, 80), (56, 70)))
    assert newcombe(first, second) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_an_accuracy_over_seeds_stays_within_zero_and_one_and_two_seeds_have_no_interval():
    """Two seeds were 0.906 [0.303, 1.504]: Student's t of one degree of freedom, unbounded."""
    assert all(map(math.isnan, average_over_seeds([0.88, 0.93], bounded=True)[1:]))
    mean, low, high = average_over_seeds([0.9, 0.95, 1.0], bounded=True, resolution=0.01)
    assert 0 <= low < mean < high <= 1 and mean == pytest.approx(0.95)
    assert mark_change(average_over_seeds([0.2, 0.3], bounded=False)) == "open", (
        "without an interval neither good nor bad"
    )


def test_seeds_are_put_together_and_the_reward_is_shown_where_it_is_another_number(make_run):
    rows = tabulate_held_out(
        group_runs(
            [
                read_run(make_run(str(seed), seed=seed, after=after))
                for seed, after in ((0, 0.8), (1, 0.9))
            ]
        )
    )
    assert [(row.figure, row.seeds, row.problems) for row in rows] == [("accuracy", 2, 100)]
    assert (
        rows[0].before.value == 0.5
        and rows[0].after.value == pytest.approx(0.85)
        and rows[0].change.value == pytest.approx(0.35)
    )


def test_a_run_without_an_end_has_no_row(make_run):
    folder = make_run("a")
    (folder / "summary.json").unlink()
    assert tabulate_held_out(group_runs([read_run(folder)])) == []


def test_a_check_that_spoke_names_its_steps(make_run):
    run = read_run(make_run("a", change={"len/truncated_frac": 1.0}))
    (found,) = find_symptoms(run)
    assert (found.check, found.steps) == (
        "most truncated",
        [1, 2, 3, 4],
    ) and "truncated" in found.text
    older = run._replace(
        rows=[{k: v for k, v in row.items() if k != "len/truncated_frac"} for row in run.rows]
    )
    assert find_symptoms(older) == [], "rows that lack a number say nothing"


def test_what_was_not_measured_does_not_speak(make_run):
    """null in metrics.jsonl is nan to a check."""
    run = read_run(make_run("a", change={"ratio/first_mean": None}))
    assert find_symptoms(run) == []
