"""GSM8K rows as tasks: the answer after the last ####, a reproducible order, and rows that lack a
part."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from rlkit.errors import ConfigError, DataError
from rlkit.tasks import gsm8k as gsm8k_with_shares

gsm8k = partial(
    gsm8k_with_shares, validation=0.0, held_out=0.0
)  # the cut has tests of its own, in test_splits.py
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"question": f"{i} + 1?", "answer": f"<<{i}+1={i + 1}>>\n#### {i + 1}"} for i in range(20)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def test_a_row_becomes_a_task(folder):
    task = next(t for t in gsm8k(path=folder, split="train", seed=0) if t.id == "gsm8k/train/7")
    assert task.messages == ({"role": "user", "content": "7 + 1?"},)
    assert (task.answer, task.reward, task.environment) == ("8", "numeric", "tool_use")
    assert task.metadata == {"solution": "<<7+1=8>>\n#### 8"}


def test_the_seed_fixes_the_order_and_max_samples_cuts_after_the_shuffle(folder):
    ids = [t.id for t in gsm8k(path=folder, split="train", seed=1)]
    assert len(set(ids)) == 20
    assert ids == [t.id for t in gsm8k(path=folder, split="train", seed=1)]
    assert ids != [t.id for t in gsm8k(path=folder, split="train", seed=2)]
    assert ids[:5] == [t.id for t in gsm8k(path=folder, split="train", seed=1, max_samples=5)]
    assert ids[:5] != [f"gsm8k/train/{i}" for i in range(5)]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "?"}, "'answer' is missing or empty"),
        ({"question": "", "answer": "#### 1"}, "'question' is missing or empty"),
        ({"question": "?", "answer": 1}, "'answer' is missing or empty"),
        ({"question": "?", "answer": "text ####"}, "nothing follows"),
    ],
)
def test_a_row_that_lacks_a_part_is_named(tmp_path, row, reason):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "?", "answer": "1"}) + "\n" + json.dumps(row) + "\n"
    )
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{reason}"):
        gsm8k(path=str(tmp_path / "rows.jsonl"), split="train", seed=0)


def test_no_rows_and_no_samples_are_refused(folder, tmp_path):
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no rows"):
        gsm8k(path=folder, split="test", seed=0)
    with pytest.raises(ConfigError, match="max_samples is 0"):
        gsm8k(path=folder, split="train", seed=0, max_samples=0)


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K rows of ../shared/data are not here")
def test_real_rows_load_and_their_answers_are_numbers_alone():
    tasks = gsm8k(path=str(GSM8K), split="test", seed=0)
    assert len(tasks) == 400
    train, validation = (
        gsm8k_with_shares(path=str(GSM8K), split=split, seed=0) for split in ("train", "validation")
    )
    assert len(train) + len(validation) == 3000 and 100 < len(validation) < 200
    assert all(t.answer.replace(",", "").lstrip("-").isdigit() for t in tasks)
