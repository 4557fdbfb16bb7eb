"""The tables of the page: held-out figures before and after, means over seeds, and rewards."""

from __future__ import annotations

import math
import random

import pytest

from parametrise import cases
from rlkit.extras.report.charts import name_line
from rlkit.extras.report.page import verdict_list
from rlkit.extras.report.tables import (
    average_over_seeds,
    mark_change,
    reward_rows,
    tabulate_held_out,
)
from rlkit.runs.reading import group_runs, read_run
from run_folders import damage_run


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


def test_copies_of_one_run_are_one_seed(make_run):
    """Ten of them were ten seeds with a tiny interval, and the change was called a gain."""
    groups = group_runs([read_run(make_run(str(i), after=0.51)) for i in range(10)])
    (row,) = tabulate_held_out(groups)
    assert row.seeds == 1 and row.change.low < 0 < row.change.high
    assert name_line(groups[0]) == "grpo"
    assert "several runs of seed 0" in verdict_list(groups)


def test_a_run_without_an_end_has_no_row(make_run):
    folder = make_run("a")
    (folder / "summary.json").unlink()
    assert tabulate_held_out(group_runs([read_run(folder)])) == []


def test_rewards_are_told_at_the_start_and_at_the_end(make_run):
    own = {
        "reward/format/ok_frac": 0.75,
        "reward/format/wrong_frac": 0.25,
        "reward/format/variance_share": 0.3,
    }
    whole, task, format_ = reward_rows(group_runs([read_run(make_run("a", change=own))]))
    assert (whole.name, task.name, format_.name) == ("", "task", "format")
    assert (whole.first, whole.last) == pytest.approx((0.1, 0.4)) and math.isnan(task.explains)
    assert format_.statuses == {"ok": 0.75, "wrong": 0.25} and format_.explains == pytest.approx(
        0.3
    )


@pytest.mark.parametrize(
    "first, last", cases([(0, 1), *((n, n + 2) for n in range(1, 17, 2))], [(0, 1)], unpack=True)
)
def test_the_tables_survive_whatever_stands_in_a_run_folder(first, last, tmp_path):
    """Each number, text and mapping of metrics.jsonl and summary.json is replaced by another type,
    at random."""
    generator = random.Random(first)
    found = []
    for case in range(first, last):
        folder = tmp_path / "runs" / str(case)
        damage_run(folder, case, generator)
        found.append(read_run(folder))
    groups = group_runs(found)
    tabulate_held_out(groups)
    reward_rows(groups)
