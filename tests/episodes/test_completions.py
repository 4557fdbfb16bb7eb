"""The flat table: what a row says, that its files open everywhere, and that a resumed run leaves
each row once."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from rlkit.episodes.completions import (
    COLUMNS,
    cut_completions,
    make_completion_row,
    make_completions_table,
    write_completions,
)
from rlkit.episodes.record import save_rollouts
from rlkit.system import owner
from rlkit.system.files import LOST
from rlkit.training.callbacks.conversations import Completions, mean_advantages
from rlkit.types import Rollout, Step, Task, ToolCall, ToolResult


def rollout(sample=0, *, reward=1.0, text="4"):
    """One reply."""
    step = Step(
        ({"role": "user", "content": "2 + 2?"},),
        (1,),
        (2, 3),
        (-0.1, -0.1),
        "stop",
        content=text,
        versions=((0, 4),),
    )
    return Rollout(
        Task("row/0", (), answer="4"),
        (step,),
        sample=sample,
        reward=reward,
        rewards={"task": reward, "brief": 0.5},
    )


def rows(steps):
    return [make_completion_row(rollout(i), step, 0.5) for step in steps for i in range(2)]


def test_a_row_says_what_was_asked_said_and_scored():
    row = make_completion_row(rollout(), 5, -0.25)
    assert (
        row["prompt"] == "2 + 2?"
        and row["completion"] == "4"
        and row["answer"] == "4"
        and row["policy_version"] == 4
    )
    assert (row["reward"], row["reward_task"], row["reward_brief"], row["advantage"]) == (
        1.0,
        1.0,
        0.5,
        -0.25,
    )


def test_turns_are_told_apart_in_a_completion():
    call, result = ToolCall("c", "add", {"a": 2}), ToolResult("c", "add", "4", True)
    first = Step(
        ({"role": "user", "content": "?"},),
        (1,),
        (2,),
        (-1.0,),
        "tool",
        thinking="so",
        tool_calls=(call,),
        tool_results=(result,),
    )
    last = Step(
        ({"role": "tool", "content": "4"},), (1, 2, 3), (4,), (-1.0,), "stop", content="It is 4."
    )
    row = make_completion_row(Rollout(Task("t", ()), (first, last)), 1)
    assert (
        row["completion"]
        == 'assistant: <think>\nso\n</think>\n\n\n→ add({"a": 2})\n\ntool: 4\n\nassistant: It is 4.'
    )
    assert row["turns"] == 2 and row["reward"] is None and row["policy_version"] is None


def test_half_a_surrogate_pair_and_an_empty_table_are_no_problem(tmp_path):
    table = make_completions_table([make_completion_row(rollout(text="\ud800"), 1)])
    assert table["completion"].to_pylist() == ["\\ud800"]
    write_completions(tmp_path / "completions", [])
    assert not (tmp_path / "completions").exists()


@pytest.mark.parametrize("library", ["datasets", "pandas", "polars"])
def test_the_table_and_the_record_open_in(library, tmp_path):
    package = pytest.importorskip(library, reason=f"{library} is not installed")
    for steps in ([1, 2], [3]):
        write_completions(tmp_path / "completions", rows(steps))
    save_rollouts(tmp_path / "rollouts.jsonl.gz", [rollout(i) for i in range(2)])
    files, record = str(tmp_path / "completions" / "*.parquet"), str(tmp_path / "rollouts.jsonl.gz")
    if library == "datasets":
        table = package.load_dataset(
            "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
        )
        whole = package.load_dataset(
            "json", data_files=record, split="train", cache_dir=str(tmp_path / "cache")
        )
        columns = table.column_names
    elif library == "pandas":
        table, whole = (
            package.read_parquet(tmp_path / "completions"),
            package.read_json(record, lines=True),
        )
        columns = list(table)
    else:
        table, whole = package.read_parquet(files), package.read_ndjson(record)
        columns = table.columns
    assert len(table) == 6 and len(whole) == 2 and list(table["step"]) == [1, 1, 2, 2, 3, 3]
    assert set(columns) == {*COLUMNS, "reward_task", "reward_brief"}


def played(step):
    """A module after an RL step, of two rollouts with two tokens each; of the second nothing was
    trained on."""
    mask = torch.tensor([[True, True], [False, False]])
    batch = SimpleNamespace(
        response_mask=mask,
        rollout_ids=torch.tensor([0, 1]),
        advantages=torch.tensor([[1.0, 2.0], [9.0, 9.0]]),
    )
    both = [rollout(0), rollout(1)]
    phases = {"": SimpleNamespace(reward=SimpleNamespace(terms={"task": None, "brief": None}))}
    return SimpleNamespace(
        rl_step=step,
        rollouts=both,
        trained=both,
        batch=batch,
        learner=SimpleNamespace(phases=phases),
    )


TRAINER = SimpleNamespace(loggers=[], is_global_zero=True, should_stop=False)


def trained(folder, start, stop, *, saves):
    """A callback through the steps of a run that saves checkpoints after some, and is killed behind
    the last."""
    callback = Completions(folder, every=1, tables=0)
    callback.on_train_start(TRAINER, played(start))
    for step in range(start, stop + 1):
        callback.on_train_batch_end(TRAINER, played(step))
        if step in saves:
            callback.on_save_checkpoint(TRAINER, played(step), {})


def test_a_killed_and_resumed_run_leaves_every_row_once(tmp_path):
    import pandas

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    trained(whole, 1, 8, saves=(4, 8))
    trained(broken, 1, 7, saves=(3, 6))
    cut_completions(broken, 5)  # an older checkpoint, between two files
    trained(broken, 6, 8, saves=(8,))
    assert pandas.read_parquet(whole).equals(pandas.read_parquet(broken))
    assert list(pandas.read_parquet(tmp_path / "broken.discarded")["step"]) == [4, 4, 5, 5, 6, 6]
    cut_completions(broken, 5)
    cut_completions(broken, -1)
    assert not list(broken.iterdir()) and len(list((tmp_path / "broken.discarded").iterdir())) == 4


def test_a_file_that_is_half_written_leaves_a_folder_that_opens(tmp_path, monkeypatch):
    """pandas reads all files of a folder but the hidden ones, and a kill leaves the half for
    ever."""
    import pandas
    import pyarrow.parquet

    write_completions(tmp_path, rows([1]))
    seen = []

    def half(table, file, **_):
        file.write(b"PAR1 half")
        file.flush()
        seen.append(len(pandas.read_parquet(tmp_path)))

    monkeypatch.setattr(pyarrow.parquet, "write_table", half)
    write_completions(tmp_path, rows([2]))
    assert seen == [2]


def test_an_advantage_is_that_of_the_trained_tokens():
    module = played(1)
    assert mean_advantages(module.batch, module.trained) == {(0, 0): 1.5}


def test_a_rollout_that_another_replaced_has_no_advantage(tmp_path):
    """task.reuse trains a group of an earlier step under the number of a group of this one."""
    import pandas

    module = played(1)
    first, second = module.trained
    module.trained = [first._replace(steps=(*first.steps, first.steps[-1])), second]
    callback = Completions(tmp_path, every=1, tables=0)
    callback.on_train_start(TRAINER, module)
    callback.on_train_batch_end(TRAINER, module)
    callback.flush()
    assert pandas.read_parquet(tmp_path)["advantage"].isna().all()


def test_a_process_that_has_lost_its_folder_writes_no_rows(tmp_path, monkeypatch):
    """Its rows were a second time in the folder, when it ended."""
    callback = Completions(tmp_path / "run" / "completions", every=1, tables=0)
    callback.on_train_start(TRAINER, played(1))
    callback.on_train_batch_end(TRAINER, played(1))
    (tmp_path / "run").mkdir()
    with owner.own_folder(tmp_path / "run"):
        file = tmp_path / "run" / owner.NAME
        file.write_text(json.dumps(json.loads(file.read_text()) | {"token": "of another"}))
        callback.on_exception(TRAINER, played(1), owner.TakenOver("gone"))
        callback.on_train_end(TRAINER, played(1))
    assert not callback.folder.exists()


def test_without_pyarrow_the_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    trained(tmp_path / "completions", 1, 2, saves=(2,))
    assert "pyarrow cannot be imported" in capsys.readouterr().err and not list(tmp_path.iterdir())
    LOST.clear()
