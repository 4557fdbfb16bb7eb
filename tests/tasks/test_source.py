"""Reading rows: files, folders and the hub, and what is said of each thing that is wrong."""

from __future__ import annotations

import json
import sys
import types

import pytest

from rlkit.errors import DataError
from rlkit.tasks import read_rows
from rlkit.tasks.source import read_split
from rlkit.types import SPLITS


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """Stands in for the `datasets` package: no test here may reach the network."""
    asked: list[tuple] = []

    def load_dataset(path, name):
        asked.append((path, name))
        if path != "org/rows":
            raise FileNotFoundError(f"no {path}")
        return {"train": [{"a": i} for i in range(50)], "test": [{"a": 1}, {"a": 2}]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return asked


def test_a_jsonl_file_gives_rows_with_their_lines(tmp_path, hub):
    file = tmp_path / "rows.jsonl"
    file.write_bytes('\ufeff{"a": "\u00e9"}\n\n{"a": 2}'.encode())
    assert list(read_rows(str(file), split="train")) == [
        (f"{file}:1", {"a": "\u00e9"}),
        (f"{file}:3", {"a": 2}),
    ]
    assert hub == []


def test_a_folder_gives_the_file_of_the_split(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "test.jsonl").write_text('{"a": 2}\n')
    assert [row for _, row in read_rows(str(tmp_path), split="test")] == [{"a": 2}]


def test_a_parquet_file_gives_the_same_rows(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([{"a": 1}, {"a": 2}]), tmp_path / "train.parquet")
    rows = list(read_rows(str(tmp_path), split="train"))
    assert [row for _, row in rows] == [{"a": 1}, {"a": 2}] and rows[1][0].endswith(
        "train.parquet row 1"
    )


def test_a_hub_id_is_loaded_with_its_name_and_split(hub):
    rows = list(read_rows("org/rows", split="test", name="main"))
    assert rows == [("org/rows[test] row 0", {"a": 1}), ("org/rows[test] row 1", {"a": 2})]
    assert hub == [("org/rows", "main")]
    with pytest.raises(DataError, match=r"org/rows has no rows of split=.* \(only train, test\)"):
        list(read_rows("org/rows", split="validation"))


def test_a_split_that_the_hub_lacks_is_cut_from_its_training_rows(hub):
    shares = {"content": lambda where, row: row["a"], "validation": 0.2, "held_out": 0.2}
    found = {
        split: [row["a"] for *_, row in read_split("org/rows", split=split, **shares)[1]]
        for split in SPLITS
    }
    assert (
        sorted(found["train"] + found["validation"]) == list(range(50))
        and 2 <= len(found["validation"]) <= 20
    )
    assert found["test"] == [1, 2] and len(hub) == 3


def test_an_id_the_hub_does_not_know_names_the_way_out():
    with pytest.raises(DataError, match=r"task\.path=org/none.*no org/none.*local"):
        list(read_rows("org/none", split="test"))


def test_a_local_folder_is_never_looked_up_on_the_hub(tmp_path, monkeypatch, hub):
    (tmp_path / "org" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"add test\.jsonl or test\.parquet"):
        list(read_rows("org/rows", split="test"))
    assert hub == []


@pytest.mark.parametrize(
    "path",
    ["missing.jsonl", "missing.parquet", "./missing", "../missing/x", "/missing", "~/missing"],
)
def test_a_path_that_does_not_exist_is_never_looked_up_on_the_hub(path, tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"task\.path=.*missing.* does not exist"):
        list(read_rows(path, split="train"))
    assert hub == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": 1', "not a line of JSON"),
        (b"\xff\xfe", "not a line of JSON"),
        (b"[" * 10**5, "not a line of JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not a line of JSON"),
        (b"[1, 2]", "must be an object"),
        (b'"text"', "must be an object"),
    ],
    ids=range(6),
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{reason}"):
        list(read_rows(str(tmp_path / "rows.jsonl"), split="train"))


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "rows.csv").write_text("a\n1\n")
    with pytest.raises(DataError, match="convert"):
        list(read_rows(str(tmp_path / "rows.csv"), split="train"))


def test_a_damaged_parquet_file_is_refused(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    (tmp_path / "train.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"train\.parquet is not a Parquet file"):
        list(read_rows(str(tmp_path), split="train"))


@pytest.mark.parametrize(
    "value", ["\ud800", "a \udfff b", ["ok", {"deep": "\udc80"}], {"\ud801": 1}]
)
def test_half_a_character_is_refused_with_its_row(tmp_path, value):
    """JSON may hold a lone surrogate and UTF-8 may not: the tokenizer ended the run with a
    traceback, in the middle of it."""
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ({"prompt": "good"}, {"prompt": value})))
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: the field 'prompt' holds .*half of a character"
    ) as caught:
        list(read_rows(str(file), split="train"))
    str(caught.value).encode()
    file.write_text(json.dumps({"prompt": "\U0001f600"}))  # a whole pair is one character
    assert [row for _, row in read_rows(str(file), split="train")] == [{"prompt": "\U0001f600"}]
