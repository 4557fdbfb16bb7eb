"""Which runs a report is of, and which of them are one line."""

from __future__ import annotations

import pytest

from rlkit.errors import ConfigError
from rlkit.runs.reading import find_runs, group_runs, read_run


def test_runs_below_a_folder_are_found_and_hydras_own_config_is_none(make_run, tmp_path):
    a, b = make_run("sweep/lr=1,seed=0"), make_run("sweep/lr=1,seed=1")
    assert find_runs([tmp_path / "runs"], "compare") == [a, b] == find_runs([a, b, a], "compare")


def test_what_a_sweep_writes_beside_its_runs_is_passed_over(make_run, tmp_path):
    """`rlkit report outputs/sweep/*` names it too."""
    run = make_run("sweep/lr=1,seed=0")
    (run.parent / "comparison.csv").write_text("")
    (run.parent / "jobs").mkdir()
    assert find_runs(sorted(run.parent.iterdir()), "compare") == [run]
    with pytest.raises(ConfigError, match=r"absent"):
        find_runs([run, run.parent / "absent"], "compare")
    with pytest.raises(ConfigError, match=r"jobs"):
        find_runs([run.parent / "jobs"], "compare")


def test_a_link_to_a_run_is_not_another_run(make_run, tmp_path):
    """As outputs/latest."""
    run = make_run("grpo")
    (tmp_path / "latest").symlink_to(run)
    assert len(find_runs([run, tmp_path / "latest"], "compare")) == 1


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        find_runs([tmp_path], "compare")


def test_runs_that_differ_by_seeds_alone_are_one_line(make_run):
    """The run's seed reaches other settings too, such as that of the evaluation."""
    found = [
        read_run(make_run(f"{lr}-{seed}", seed=seed, lr=lr))
        for lr in (1e-3, 1e-4)
        for seed in (0, 1)
    ]
    groups = group_runs(found)
    assert [[run.seed for run in group.runs] for group in groups] == [[0, 1], [0, 1]]
    assert [group.label for group in groups] == [
        "grpo, optimizer.lr=0.001",
        "grpo, optimizer.lr=0.0001",
    ]


def test_a_name_that_tells_runs_apart_is_the_label(make_run):
    groups = group_runs([read_run(make_run("a")), read_run(make_run("b", title="dapo", lr=1e-4))])
    assert [group.label for group in groups] == ["grpo", "dapo"]


def test_rows_of_a_step_are_one_and_switches_are_kept_apart(make_run):
    run = read_run(make_run("a", steps=3, switch=2))
    assert [row["step"] for row in run.rows] == [0, 1, 2, 3]
    assert run.rows[2]["reward/mean"] == 0.2 and "schedule/switch" not in run.rows[2]
    assert run.switches == [(2, "phase a → b after step 2: dapo; keeps weights")]
