"""MBPP rows as tasks: one test shown, the others hidden; rows that cannot be checked are named and
left out."""

from __future__ import annotations

import json
import logging
from functools import partial

import pytest

from rlkit.errors import DataError
from rlkit.tasks import mbpp as mbpp_with_shares

mbpp = partial(
    mbpp_with_shares, validation=0.0, held_out=0.0
)  # the cut has tests of its own, in test_splits.py


def row(i: int, **changes):
    tests = [f"assert f({n}) == {n + i}" for n in range(3)]
    return {
        "text": f"Add {i}.",
        "code": f"def f(n):\r\n  return n + {i}",
        "task_id": i,
        "test_setup_code": "",
        "test_list": tests,
    } | changes


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(20)))
    return tmp_path


def test_a_row_becomes_a_task(folder):
    task = next(t for t in mbpp(path=str(folder), split="train", seed=0) if t.id == "mbpp/train/7")
    text = task.messages[0]["content"]
    assert (
        "Add 7." in text
        and "assert f(0) == 7" in text
        and "f(1)" not in text
        and "f(2)" not in text
    )
    assert (
        task.metadata["tests"] == ("assert f(1) == 8", "assert f(2) == 9")
        and task.metadata["shown"] == "assert f(0) == 7"
    )
    assert task.answer == "```python\ndef f(n):\n  return n + 7\n```"
    assert (task.reward, task.environment) == ("code_exec", "single_turn")


def test_the_seed_fixes_the_order_and_rows_are_left_out_by_number(folder):
    ids = [t.id for t in mbpp(path=str(folder), split="train", seed=1)]
    assert (
        ids
        == [t.id for t in mbpp(path=str(folder), split="train", seed=1)]
        != [t.id for t in mbpp(path=str(folder), split="train", seed=2)]
    )
    assert [t.id for t in mbpp(path=str(folder), split="train", seed=1, max_samples=4)] == ids[:4]
    assert "mbpp/train/3" not in [
        t.id for t in mbpp(path=str(folder), split="train", seed=1, exclude=[3])
    ]


def test_only_task_ids_are_left_out_by_number_not_the_places_of_rows(tmp_path):
    """Rows without a task_id once lost number 123 and 414 of the file, which are other problems."""
    rows = [{k: v for k, v in row(i).items() if k != "task_id"} for i in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert len(mbpp(path=str(tmp_path), split="train", seed=0, exclude=[3])) == 5


def test_rows_of_the_sanitized_set_are_read_too(tmp_path):
    changes = {"prompt": "Add.", "test_imports": ["import math"]}
    rows = [
        {k: v for k, v in row(i, **changes).items() if k not in ("text", "test_setup_code")}
        for i in range(3)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    task = mbpp(path=str(tmp_path), split="test", seed=0)[0]
    assert task.metadata["setup"] == "import math" and task.messages[0]["content"].startswith(
        "Add."
    )


def test_rows_without_two_checkable_tests_are_left_out_and_named(tmp_path, caplog):
    rows = [
        row(0),
        row(1, test_list=["assert f(1) != 2", "assert f(1) == 2"]),
        row(2, test_list=["assert f(1) != 2", *row(2)["test_list"]]),
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with caplog.at_level(logging.WARNING):
        tasks = mbpp(path=str(tmp_path), split="train", seed=0)
    assert {t.id for t in tasks} == {"mbpp/train/0", "mbpp/train/2"}
    assert "1 of 3 rows" in caplog.text and "mbpp/train/1" in caplog.text
    assert next(t for t in tasks if t.id == "mbpp/train/2").metadata["shown"] == "assert f(0) == 2"


@pytest.mark.parametrize(
    "changes",
    [{"text": None}, {"code": 3}, {"test_list": "assert"}, {"test_setup_code": ["import math"]}],
)
def test_a_row_that_lacks_a_part_is_named(tmp_path, changes):
    (tmp_path / "train.jsonl").write_text(json.dumps(row(0, **changes)) + "\n")
    with pytest.raises(DataError, match=r"train\.jsonl:1.*task=mbpp needs"):
        mbpp(path=str(tmp_path), split="train", seed=0)
