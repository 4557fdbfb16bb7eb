"""What the viewer is given: a bounded choice, with the token values that belong to it."""

from __future__ import annotations

import gzip

import pytest

from rlkit.runs.report.conversations import TEXT, chosen_episodes, collect, trimmed
from rlkit.runs.report.read import read_run
from rlkit.types import Rollout, Task


def test_all_are_there_where_there_is_room(make_run):
    shown = collect([read_run(make_run("a", steps=2))], 100)
    assert [(e["step"], e["sample"]) for e in shown["rollouts"]] == [(s, i) for s in (1, 2) for i in range(4)]
    first = shown["rollouts"][0]
    assert [m["role"] for m in first["messages"]] == ["user", "assistant", "tool", "assistant"], "a tool's result stands once"
    assert first["calls"] == 1 and shown["rollouts"][1]["failed"] == 1 and shown["rollouts"][3]["status"] == "truncated: length"
    assert shown["texts"][first["messages"][0]["prompt"]] == "How much is it? #### 4 1"


def test_token_values_stand_with_their_reply(make_run):
    shown = collect([read_run(make_run("a", steps=1))], 100)
    first, second = shown["rollouts"][:2]
    replies = [m for m in first["messages"] if m["role"] == "assistant"]
    assert replies[0]["tokens"] == {"text": ["<3>", "<4>"], "logprobs": [-0.5, -0.1], "advantages": 1.0, "trained": 1}
    assert replies[1]["tokens"] == {"text": ["<6>"], "logprobs": [-1.5], "advantages": 0.5, "trained": 0}
    assert first["values"] and not second["values"]


def test_the_limit_holds_and_every_step_is_seen(make_run):
    runs = [read_run(make_run(name, steps=4)) for name in "ab"]
    shown = collect(runs, 16)["rollouts"]
    assert len(shown) == 16 and {(e["run"], e["step"]) for e in shown} == {(r, s) for r in (0, 1) for s in (1, 2, 3, 4)}


def test_best_worst_and_those_with_token_values_come_first():
    rollouts = [Rollout(Task(f"row/{i}", ()), (), group=i, reward=[0.5, 0.1, 0.9, None, 0.5, 0.5][i]) for i in range(6)]
    assert [r.group for r in chosen_episodes(rollouts, {(4, 0, "row/4"): []}, 3, seed=0)] == [2, 3, 4], "what cannot be scored is worst"
    assert [r.group for r in chosen_episodes(rollouts[:3], {}, 2, seed=0)] == [1, 2]


def test_a_damaged_file_is_said_and_left_out(make_run):
    folder = make_run("a", steps=2)
    (folder / "rollouts" / "step_000001.jsonl.gz").write_bytes(gzip.compress(b"nonsense\n"))
    (folder / "tokens" / "step_000002.jsonl.gz").write_bytes(b"nonsense")
    with pytest.warns(UserWarning) as caught:
        shown = collect([read_run(folder)], 100)["rollouts"]
    assert {e["step"] for e in shown} == {2} and not any(e["values"] for e in shown)
    assert len(caught) == 2


def test_a_long_text_is_cut_and_says_so():
    assert trimmed("x" * TEXT) == "x" * TEXT
    assert trimmed("x" * (TEXT + 1234)).endswith("1,234 more characters are in the run's files")
