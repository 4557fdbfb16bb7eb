"""What the viewer is given: a bounded choice."""

from __future__ import annotations

import json

import pytest

from rlkit.episodes import load_rollouts
from rlkit.episodes.record import to_row
from rlkit.runs.report.conversations import TEXT, best_worst_random, collect, trimmed
from rlkit.runs.report.read import read_run
from rlkit.system import shards
from rlkit.types import Rollout, Task


def test_all_are_there_where_there_is_room(make_run):
    shown = collect([read_run(make_run("a", steps=2))], 100)
    assert [(e["step"], e["sample"]) for e in shown["rollouts"]] == [(s, i) for s in (1, 2) for i in range(4)]
    first = shown["rollouts"][0]
    assert [m["role"] for m in first["messages"]] == ["user", "assistant", "tool", "assistant"], "a tool's result stands once"
    assert first["calls"] == 1 and shown["rollouts"][1]["failed"] == 1 and shown["rollouts"][3]["status"] == "truncated: length"
    assert shown["texts"][first["messages"][0]["prompt"]] == "How much is it? #### 4 1"


def test_the_limit_holds_and_every_step_is_seen(make_run):
    runs = [read_run(make_run(name, steps=4)) for name in "ab"]
    shown = collect(runs, 16)["rollouts"]
    assert len(shown) == 16 and {(e["run"], e["step"]) for e in shown} == {(r, s) for r in (0, 1) for s in (1, 2, 3, 4)}


def test_the_best_and_the_worst_come_first():
    rollouts = [Rollout(Task(f"row/{i}", ()), (), group=i, reward=[0.5, 0.1, 0.9, None, 0.5, 0.5][i]) for i in range(6)]
    assert [r.group for r in best_worst_random(rollouts, 2, seed=0)] == [2, 3], "what cannot be scored is worst"
    assert {2, 3} < {r.group for r in best_worst_random(rollouts, 3, seed=0)}


def test_a_damaged_file_is_said_and_left_out(make_run):
    folder = make_run("a", steps=2)
    shards.append_lines(folder / "rollouts", 3, b"nonsense\n")
    with pytest.warns(UserWarning, match="left out"):
        shown = collect([read_run(folder)], 100)["rollouts"]
    assert {e["step"] for e in shown} == {1, 2}


def test_runs_with_a_file_for_each_step_are_shown_too(make_run):
    """As they once were, and with contexts that are whole in every step."""
    folder = make_run("a", steps=2)
    rollouts = load_rollouts(folder / "rollouts", step=2)
    assert [s.kept for s in rollouts[0].steps] == [0, 0]
    rows = [{k: v for k, v in to_row(r).items() if k != "rl_step"} for r in rollouts]
    for row in rows:
        for step in row["steps"]:
            del step["kept"]
    (folder / "rollouts" / "step_000007.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_rollouts(folder / "rollouts", step=7) == rollouts
    assert {e["step"] for e in collect([read_run(folder)], 100)["rollouts"]} == {1, 2, 7}


def test_a_long_text_is_cut_and_says_so():
    assert trimmed("x" * TEXT) == "x" * TEXT
    assert trimmed("x" * (TEXT + 1234)).endswith("1,234 more characters are in the run's files")
