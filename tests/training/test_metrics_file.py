"""metrics.jsonl, the truth of a run: rows survive a kill, a resume and the numbers that JSON does
not know."""

from __future__ import annotations

import csv
import json
import random
from types import SimpleNamespace

import pytest
import torch

from rlkit.errors import DataError
from rlkit.system.files import replace_nonfinite, write_atomic, write_json
from rlkit.system.rows import append_row, cut_back, export_csv, read_rows
from rlkit.training.callbacks.metrics import MetricsFile
from rlkit.training.metrics import refill_metrics
from rlkit.types import Rollout, Task

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def path(tmp_path):
    """Rows 1 … 5 in a folder that did not exist."""
    file = tmp_path / "run" / "metrics.jsonl"
    for step in range(1, 6):
        append_row(file, step, {"reward/mean": step / 10, "kl/ref": NAN})
    return file


def test_rows_come_back_as_written_with_their_step_first(path):
    rows = read_rows(path)
    assert rows[2] == {"step": 3, "reward/mean": 0.3, "kl/ref": None} and len(rows) == 5
    assert list(rows[0]) == ["step", "reward/mean", "kl/ref"]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_numbers_that_json_does_not_know_become_null(tmp_path, value):
    """json.dumps writes NaN, which no other reader of JSON takes."""
    append_row(tmp_path / "m.jsonl", 1, {"a": value, "b": {"c": [value, 1.0]}, "d": (value,)})
    text = (tmp_path / "m.jsonl").read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert row == {"step": 1, "a": None, "b": {"c": [None, 1.0]}, "d": [None]}


def test_finite_leaves_everything_else():
    value = {"a": 1, "b": "nan", "c": None, "d": True, "e": 1e308, "f": -0.0}
    assert replace_nonfinite(value) == value


def test_a_last_line_cut_by_a_kill_is_left_out(path):
    text = path.read_text()
    for cut in (1, 5, len(text.splitlines()[-1])):
        path.write_text(text[:-1][:-cut] if cut > 1 else text[:-2])
        assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4]


def test_a_last_line_that_only_lacks_its_end_counts(path):
    path.write_text(path.read_text()[:-1])
    assert len(read_rows(path)) == 5


def test_no_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("step, left", [(3, [1, 2, 3]), (0, []), (9, [1, 2, 3, 4, 5])])
def test_cut_back_to_the_checkpoint(path, step, left):
    """A resumed run writes the rows after its checkpoint again; none may stand twice."""
    cut_back(path, step)
    assert [row["step"] for row in read_rows(path)] == left


def test_cut_back_mends_a_half_written_line_so_that_the_next_row_stands_alone(path):
    path.write_text(path.read_text()[:-9])
    cut_back(path, 9)
    append_row(path, 5, {"reward/mean": 0.9})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5] and read_rows(path)[-1][
        "reward/mean"
    ] == 0.9


def test_cut_back_changes_no_byte_of_the_rows_it_keeps(path):
    """An uninterrupted run and a resumed one end in equal files."""
    before = path.read_bytes()
    cut_back(path, 5)
    assert path.read_bytes() == before


def test_csv_has_every_column_of_every_row(path):
    append_row(path, 6, {"eval/accuracy": 0.5, "odd, name": 1})
    target = export_csv(path)
    assert target == path.with_suffix(".csv")
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "reward/mean", "kl/ref", "eval/accuracy", "odd, name"]
    assert rows[0] == {
        "step": "1",
        "reward/mean": "0.1",
        "kl/ref": "",
        "eval/accuracy": "",
        "odd, name": "",
    }
    assert (rows[5]["reward/mean"], rows[5]["eval/accuracy"], rows[5]["odd, name"]) == (
        "",
        "0.5",
        "1",
    )


def test_prompts_without_a_trained_token_are_not_accepted():
    """Of three prompts with two rollouts each: all of one, one rollout of another, none of the
    third. A filter without refills was reported as if it had kept everything."""
    task = Task("t", ())
    sampled = [Rollout(task, (), group=group) for group in (0, 0, 1, 1, 2, 2)]
    batch = SimpleNamespace(
        rollout_ids=torch.tensor([0, 0, 1, 2, 3, 4, 5]),  # the first has two rows
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
        response_mask=torch.tensor([[1], [1], [1], [0], [1], [0], [0]], dtype=torch.bool),
    )
    found = refill_metrics(sampled, batch)
    assert (found["batch/rollouts"], found["group/sampled"]) == (3, 3)
    assert found["group/acceptance_rate"] == pytest.approx(2 / 3)


def test_csv_of_a_run_that_wrote_nothing(tmp_path):
    assert export_csv(tmp_path / "metrics.jsonl").read_text().strip() == ""


def test_the_callback_writes_the_row_and_gives_loggers_its_numbers(tmp_path):
    """A logger takes no nan and no words; the file keeps all."""

    class Logger:
        def log_metrics(self, numbers, step):
            self.got = (numbers, step)

    class Stub:
        loggers, rl_step, metrics = (Logger(),), 4, {"a": 1.5, "b": NAN, "c": 2, "d": "word"}
        rollouts, batch = (
            (),
            SimpleNamespace(
                advantages=torch.zeros(1, 1), response_mask=torch.zeros(1, 1, dtype=torch.bool)
            ),
        )
        learner, logged = SimpleNamespace(advance=lambda: ""), {}

    MetricsFile(tmp_path / "m.jsonl").on_train_batch_end(Stub(), Stub())
    assert read_rows(tmp_path / "m.jsonl") == [
        {"step": 4, "a": 1.5, "b": None, "c": 2, "d": "word"}
    ]
    assert Stub.loggers[0].got == ({"a": 1.5, "c": 2}, 4)


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    """A kill between writing and renaming leaves the old file as it was."""
    import os

    path = tmp_path / "a" / "summary.json"
    write_json(path, {"x": NAN, "é": [1]})
    assert json.loads(path.read_text()) == {"x": None, "é": [1]}

    def killed(*_):
        raise KeyboardInterrupt

    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"half")
    assert path.read_bytes() == before


# ------------------------------------------------------------------------- what a resume sets aside

BAD = {
    "cut": b'{"step": 3, "rew',
    "no JSON": b"step 3: reward 0.4",
    "not UTF-8": b'{"step": 3, "a": "\xff\xfe"}',
    "null bytes": bytes(64),
    "no object": b"[3]",
    "no step": b'{"reward/mean": 0.3}',
    "a step in words": b'{"step": "3"}',
    "a step that is a truth value": b'{"step": true}',
    "a step before the first": b'{"step": -1}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("where", ["in the middle", "at the end"])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_line_that_cannot_be_read_costs_no_other_row_and_is_kept(path, bad, where, capsys):
    """It once ended the reading: resume dropped every row behind it, and no command read a file
    that is not UTF-8."""
    lines = path.read_bytes().splitlines()
    lines.insert(3 if where == "in the middle" else 5, bad)
    path.write_bytes(b"\n".join(lines) + b"\n" * (where == "in the middle"))
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4, 5]
    cut_back(path, 4)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3, 4]
    assert path.with_name("metrics.unreadable").read_bytes() == bad + b"\n"
    said = capsys.readouterr().out
    assert "1 line(s) of metrics.jsonl cannot be read: moved to metrics.unreadable" in said
    assert "1 line(s) after step 4: moved to metrics.discarded.jsonl" in said


def test_no_line_is_lost_whatever_stands_in_the_file_and_however_often_a_run_is_resumed(tmp_path):
    """Every line of the file before is in one of the three files after, once and in order."""
    draw = random.Random("lines")
    for number in range(60):
        path = tmp_path / str(number) / "metrics.jsonl"
        path.parent.mkdir()
        steps = [draw.randrange(8) for _ in range(draw.randrange(9))]
        lines = [
            draw.choice([json.dumps({"step": s, "a": i}).encode(), draw.choice(list(BAD.values()))])
            for i, s in enumerate(steps)
        ]
        path.write_bytes(b"\n".join(lines) + draw.choice([b"", b"\n", b"\n\n"]) * bool(lines))
        kept = read_rows(path)
        for step in (6, 3, 3):
            cut_back(path, step)
            kept = [row for row in kept if row["step"] <= step]
            assert read_rows(path) == kept
        files = (
            path,
            path.with_name("metrics.discarded.jsonl"),
            path.with_name("metrics.unreadable"),
        )
        after = [line for file in files if file.exists() for line in file.read_bytes().splitlines()]
        assert sorted(after) == sorted(lines)


def test_a_kill_between_setting_aside_and_cutting_back_leaves_every_row_once(path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rlkit.system.rows.write_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            cut_back(path, 3)
    assert len(read_rows(path)) == 5
    cut_back(path, 3)
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    assert [row["step"] for row in read_rows(path.with_name("metrics.discarded.jsonl"))] == [4, 5]


def test_rows_that_cannot_be_set_aside_are_not_cut(path):
    path.with_name("metrics.discarded.jsonl").mkdir()
    with pytest.raises(DataError, match=r"metrics\.discarded\.jsonl cannot be written"):
        cut_back(path, 3)
    assert len(read_rows(path)) == 5
