"""A user's own rows: fields by name, an order that the seed fixes, and rows that make no task. The
cut into splits: test_splits.py."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import partial

import pytest

from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.errors import ConfigError, DataError
from rlkit.tasks import jsonl as jsonl_with_shares
from rlkit.tasks import make_tasks
from rlkit.types import SPLITS, Task

jsonl = partial(jsonl_with_shares, validation=0.0, held_out=0.0)
FIELDS = {"prompt": "q", "answer": "a"}


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rows.jsonl", [{"q": f"q{i}", "a": f"a{i}"} for i in range(50)])


def prompts(path: str, split: str, seed: int = 0, **settings) -> list[str]:
    return [
        t.messages[-1]["content"]
        for t in jsonl(path=path, split=split, seed=seed, fields=FIELDS, **settings)
    ]


def test_fields_are_mapped_and_rows_may_choose(tmp_path):
    row = {"q": "2 + 2?", "a": 4, "key": "k7", "how": "numeric", "where": "tool_use"}
    fields = FIELDS | {"id": "key", "reward": "how", "environment": "where"}
    path = write(tmp_path / "train.jsonl", [row])
    (task,) = jsonl(path=str(tmp_path), split="train", seed=0, fields=fields, system_prompt="S")
    (other,) = make_tasks([{"prompt": "?", "answer": Decimal("1.50")}], "train")
    assert other.answer == "1.50"
    assert task.messages == (
        {"role": "system", "content": "S"},
        {"role": "user", "content": "2 + 2?"},
    )
    assert (task.id, task.answer, task.reward, task.environment) == (
        "k7",
        "4",
        "numeric",
        "tool_use",
    )
    (task,) = jsonl(path=path, test_path=path, split="test", seed=0, fields=FIELDS | {"id": None})
    assert (task.id, task.reward, task.environment) == (
        "train/test/0",
        "exact_match",
        "single_turn",
    )


def test_a_prompt_may_be_messages(tmp_path):
    messages = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    write(tmp_path / "train.jsonl", [{"q": messages}])
    (task,) = jsonl(path=str(tmp_path), split="train", seed=0, fields={"prompt": "q"})
    assert task.messages == tuple(messages) and task.answer == ""


def test_tool_calls_of_a_prompt_are_read_in_every_form(tmp_path):
    def row(call: dict, **more) -> list[dict]:
        said = {"role": "assistant", "content": None, "tool_calls": [call], **more}
        return [{"role": "user", "content": "?"}, said, {"role": "tool", "content": "3"}]

    call = {"name": "add", "arguments": {"a": 1}}
    rows = [
        row(call),
        row({"id": "call_0", "function": {"name": "add", "arguments": '{"a": 1}'}}, name=None),
    ]
    path = write(tmp_path / "train.jsonl", [{"q": messages} for messages in rows])
    tasks = jsonl(path=path, split="train", seed=0, fields={"prompt": "q"})
    tasks += make_tasks([Task("a", tuple(messages)) for messages in rows], "train")
    whole = {"id": "call_0", "type": "function", "function": call}
    assert all(
        task.messages[1] == {"role": "assistant", "content": "", "tool_calls": [whole]}
        for task in tasks
    )


def test_the_seed_changes_the_order_and_moves_no_row_between_splits(file):
    splits = {split: prompts(file, split, validation=0.2, held_out=0.2) for split in SPLITS}
    for split, own in splits.items():
        other = prompts(file, split, seed=1, validation=0.2, held_out=0.2)
        assert sorted(other) == sorted(own) and other != own


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"fields": {"answer": "a"}}, ConfigError, r"task\.fields\.prompt is missing"),
        (
            {"fields": FIELDS | {"anwser": "a"}},
            ConfigError,
            r"task\.fields\.anwser is unknown.*answer",
        ),
        ({"max_samples": 0}, ConfigError, r"task\.max_samples is 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(file, settings, error, words):
    with pytest.raises(error, match=words):
        jsonl(**({"path": file, "split": "train", "seed": 0, "fields": FIELDS} | settings))


def test_one_prompt_cannot_be_split(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"q": "What?", "a": "1"}] * 5)
    assert len(prompts(path, "train", held_out=1e-9)) == 5
    with pytest.raises(
        DataError, match=r"task\.held_out=1e-09 leaves no test rows.*none of the 5 rows"
    ):
        prompts(path, "test", held_out=1e-9)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"q": "x"}, r"'a' \(task\.fields\.answer\)"),
        ({"q": "x", "a": " "}, r"'a' \(task\.fields\.answer\)"),
        ({"q": "x", "a": True}, r"'a' \(task\.fields\.answer\)"),
        ({"q": "x", "a": ["1"]}, r"'a' \(task\.fields\.answer\)"),
        ({"a": "1"}, "field 'q' .task.fields.prompt. is missing"),
        ({"q": [], "a": "1"}, "prompt .'q'. is missing"),
        ({"q": ["x"], "a": "1"}, "needs a role"),
        ({"q": [{"role": "robot", "content": "x"}], "a": "1"}, "needs a role"),
        ({"q": [{"role": "user", "content": None}], "a": "1"}, "needs a role"),
        ({"q": [{"role": "assistant", "content": "x"}], "a": "1"}, "the assistant's"),
    ],
)
def test_a_row_that_makes_no_task_is_named(tmp_path, row, words):
    write(tmp_path / "train.jsonl", [{"q": "x", "a": "1"}, row])
    with pytest.raises(DataError, match=rf"train\.jsonl:2: .*{words}"):
        prompts(str(tmp_path), "train")


@pytest.mark.slow
def test_two_problems_with_one_id_are_refused(tmp_path):
    """A sampler that looks at scores never drew the second, and a resume took one for the other."""
    rows = [{"id": 0, "prompt": f"{i}+1?", "answer": str(i + 1)} for i in range(8)]
    path = write(tmp_path / "rows.jsonl", rows)
    words = ["task=jsonl", f"task.path={path}", "+task.fields.id=id", "reward=numeric"]
    with pytest.raises(DataError, match="two different problems have the id '0'"):
        load_tasks(experiment(compose(words)))
    alike = write(tmp_path / "alike.jsonl", [rows[0], rows[0], rows[0] | {"id": 1}] * 9)
    load_tasks(experiment(compose([*words, f"task.path={alike}", "evaluation.n=0"])))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_missing_file_is_named_with_its_own_key(file, split):
    with pytest.raises(DataError, match=rf"task\.{split}_path=nowhere\.jsonl does not exist"):
        jsonl(path=file, fields=FIELDS, split=split, seed=0, **{f"{split}_path": "nowhere.jsonl"})
