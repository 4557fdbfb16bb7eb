"""What the viewer is given: a bounded choice."""

from __future__ import annotations

import base64
import gzip
import json

import pytest

from rlkit.extras.report import conversations
from rlkit.extras.report.conversations import (
    TEXT,
    Turn,
    collect,
    select_best_worst_random,
    trim_text,
)
from rlkit.runs.reading import read_run
from rlkit.system import shards
from rlkit.types import Rollout, Task


def said(shown, entry):
    """What the viewer opens for an entry of the list: its messages, with the texts of prompts put
    in."""
    page = json.loads(gzip.decompress(base64.b64decode(shown.pages[entry["page"]])))
    own = page["said"][entry["at"]]
    return [
        {**m, "text": page["texts"][m["prompt"]] if "prompt" in m else m["text"]}
        for m in own["messages"]
    ]


def test_all_are_there_where_there_is_room(make_run):
    shown = collect([read_run(make_run("a", steps=2))], 100)
    assert [(e["step"], e["sample"]) for e in shown.entries] == [
        (s, i) for s in (1, 2) for i in range(4)
    ] and not shown.notes
    first = shown.entries[0]
    assert [m["role"] for m in said(shown, first)] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ], "a tool's result stands once"
    assert (
        first["calls"] == 1
        and shown.entries[1]["failed"] == 1
        and shown.entries[3]["status"] == "truncated: length"
    )
    assert (
        said(shown, first)[0]["text"] == "How much is it? #### 4 1"
        and first["answer"] == "#### 4 1"
    )


@pytest.mark.slow
def test_thousands_are_complete_in_pages(make_run, monkeypatch):
    """Beyond a fixed number of steps and characters conversations were dropped."""
    monkeypatch.setattr(conversations, "PAGE", 2000)
    shown = collect([read_run(make_run("a", steps=80))], 10_000)
    assert len(shown.entries) == 320 and len(shown.pages) > 10 and not shown.notes
    assert all(
        said(shown, e)[-1]["text"] in (f"#### 4 {e['step']}", "eh") for e in shown.entries[::37]
    )


def test_the_limit_holds_every_step_is_seen_and_the_rest_is_counted(make_run):
    runs = [read_run(make_run(name, steps=4)) for name in "ab"]
    shown = collect(runs, 16)
    assert len(shown.entries) == 16 and {(e["run"], e["step"]) for e in shown.entries} == {
        (r, s) for r in (0, 1) for s in (1, 2, 3, 4)
    }
    assert [note[:25] for note in shown.notes] == ["8 more conversations are i"[:25]] * 2


def test_solve_rates_and_turns_are_those_of_whole_steps(make_run):
    """Of a choice of best and worst they would be others."""
    (played,) = collect([read_run(make_run("a", steps=2))], 4).played
    assert played.solved[:2] == [(1, 2 / 3), (1, 0.0)]
    first, second = played.turns
    steps = len({step for step, _ in played.solved})
    assert (
        first == Turn(4 * steps, 8 * steps, 3 * steps, steps, steps, steps, 0.0)
        and second.replies == 3 * steps == second.ended
    )
    assert second.reward == pytest.approx(steps)


def test_solve_rates_have_both_ends_of_a_run_at_any_limit(make_run):
    (played,) = collect([read_run(make_run("a", steps=9))], 1).played
    assert {step for step, _ in played.solved} == {1, 9}


def test_runs_of_a_bench_have_different_names(make_run):
    """The folders of a bench end in the seed."""
    runs = [read_run(make_run(f"{task}/grpo/0")) for task in ("noisy", "needle")]
    told = ["grpo, seed 0 · noisy/grpo/0", "grpo, seed 0 · needle/grpo/0"]
    assert collect(runs, 4).runs == told


def test_the_best_and_the_worst_come_first():
    rollouts = [
        Rollout(Task(f"row/{i}", ()), (), group=i, reward=[0.5, 0.1, 0.9, None, 0.5, 0.5][i])
        for i in range(6)
    ]
    two = select_best_worst_random(rollouts, 2, seed=0)
    assert [*two] == [2, 3], "what cannot be scored is worst"
    assert {2, 3} < select_best_worst_random(rollouts, 3, seed=0).keys()
    assert all(rollout is rollouts[place] for place, rollout in two.items())


def test_a_damaged_file_is_said_and_left_out(make_run):
    folder = make_run("a", steps=2)
    shards.append_lines(folder / "rollouts", 3, b"nonsense\n")
    with pytest.warns(UserWarning, match="left out"):
        shown = collect([read_run(folder)], 100)
    assert {e["step"] for e in shown.entries} == {1, 2}


def test_a_long_text_is_cut_and_says_so():
    assert trim_text("x" * TEXT) == "x" * TEXT
    assert trim_text("x" * (TEXT + 1234)).endswith("1,234 more characters are in the run's files")
