"""Read a user's own rows as tasks. The config names their fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from rlkit.environments.prompts import with_system_prompt
from rlkit.errors import ConfigError, DataError
from rlkit.tasks.source import Row, read_message, read_split
from rlkit.tasks.splits import order_tasks
from rlkit.types import Message, Task, ranges, reaches, safe

FIELDS = ("prompt", "answer", "id", "reward", "environment", "metadata")
NO_TASKS = (
    "task: {!r:.100} is no task; give a list of Task or of rows with a prompt and an answer, a"
    " Splits, or a function (split=…) → tasks"
)


@reaches(path="path", validation_path="path", test_path="path")
@safe("split", "fields", "reward", "environment", "system_prompt")
@ranges(max_samples=(1, None))
def jsonl(
    *,
    path: str,
    split: str,
    seed: int,
    fields: Mapping[str, str | None],
    validation_path: str | None = None,
    test_path: str | None = None,
    validation: float = 0.1,
    held_out: float = 0.1,
    max_samples: int | None = None,
    reward: str = "exact_match",
    environment: str = "single_turn",
    system_prompt: str | None = None,
) -> Sequence[Task]:
    """Read rows as tasks, from a .jsonl or .parquet file, a folder of these files, or a hub data
    set.

    Args:
      path: the source of the rows; see `read_rows`. A folder or a data set may have its own splits.
        A single file has only training rows. If the source lacks a split, a share of its training
        rows becomes this split, and "train" no longer contains them.
      split: train, validation or test.
      seed: seed of the order. It does not change the split of a row.
      fields: name of the row's field for each of rlkit's names; null for an unused name. `prompt`
        is required: text, or a list of messages. `answer`, text or a number, is required if the
        reward reads a truth. `id`, `reward` and `environment` let each row have its own values.
        `metadata` is a mapping with the task's metadata. environment=program copies the metadata's
        `files` into the folder of each episode: a mapping of path to text, or a folder beside the
        rows.
      validation_path, test_path: separate sources for "validation" and "test".
      validation, held_out: shares of the distinct prompts for "validation" and "test", at least 0
        and together below 1. `choose_split` hashes the prompt, not the id. So rows with the same
        prompt are in the same split, and a row stays in its split if rows are added, removed or
        reordered.
      max_samples: number of rows to keep after the shuffle; None for all.
      reward, environment: names of the reward and of the environment for rows that name none.
      system_prompt: put in front of every row's messages.
    Returns: the tasks. Without an `id` field, their ids are SOURCE/SPLIT/ROW.
    Raises: ConfigError for an unknown or missing name in `fields`, or for shares out of range.
      DataError naming the row if it lacks a field of `fields`, or if its prompt is neither text nor
      messages. See also `read_rows`.
    """
    named = {name: field for name, field in fields.items() if field}
    _check(named)
    prompt = named["prompt"]
    source, rows = read_split(
        path,
        split=split,
        content=lambda where, row: _messages(where, _value(where, row, "prompt", named), prompt),
        validation=validation,
        held_out=held_out,
        validation_path=validation_path,
        test_path=test_path,
    )
    defaults = Task(
        id=f"{Path(source).stem}/{split}", messages=(), reward=reward, environment=environment
    )
    unread = {"reward": "reward function", "environment": "environment"}
    unread = {name: what for name, what in unread.items() if name not in {*fields, *named.values()}}
    for _, where, row in rows:
        for name in unread.keys() & row.keys():
            raise DataError(
                f"{where}: nothing reads the field '{name}'; if it names the row's {unread[name]},"
                f" set task.fields.{name}={name}; to ignore it, set task.fields.{name}=null"
            )
    tasks = [
        _task(where, row, named, defaults._replace(id=f"{defaults.id}/{i}"), system_prompt)
        for i, where, row in rows
    ]
    return order_tasks(tasks, seed=seed, max_samples=max_samples, source=source)


def _check(fields: Mapping[str, str]) -> None:
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise ConfigError(f"task.fields.{unknown[0]} is unknown; the names are {', '.join(FIELDS)}")
    if "prompt" not in fields:
        raise ConfigError("task.fields.prompt is missing; name the field that holds the prompt")


def _task(
    where: str, row: Row, fields: Mapping[str, str], defaults: Task, system_prompt: str | None
) -> Task:
    def text(name: str, default: str) -> str:
        if name not in fields:
            return default
        value = _value(where, row, name, fields)
        if (
            isinstance(value, bool)
            or not isinstance(value, (str, Number))
            or not str(value).strip()
        ):
            raise DataError(
                f"{where}: the field {fields[name]!r} (task.fields.{name}) has {value!r:.40}, which"
                " is empty or neither text nor a number; correct the row, or task.fields"
            )
        return str(value)

    return Task(
        id=text("id", defaults.id),
        messages=with_system_prompt(
            _messages(where, _value(where, row, "prompt", fields), fields["prompt"]), system_prompt
        ),
        answer=text("answer", ""),
        reward=text("reward", defaults.reward),
        environment=text("environment", defaults.environment),
        metadata=_metadata(where, row, fields),
    )


def _metadata(where: str, row: Row, fields: Mapping[str, str]) -> dict[str, Any]:
    """Read the row's metadata. If its `files` name a folder, the rows must be of a local file, and
    the folder beside it. Otherwise a stranger's rows could name any folder of this machine."""
    own = (_value(where, row, "metadata", fields) if "metadata" in fields else None) or {}
    if not isinstance(own, Mapping):
        raise DataError(f"{where}: task.fields.metadata names a field that is no mapping")
    _check_json(where, own)
    if own.get("harbor") is not None:
        raise DataError(
            f"{where}: its metadata has the key 'harbor', which names folders of this machine; use"
            " task=harbor, or rename the key"
        )
    files = own.get("files")
    if not isinstance(files, str):
        return dict(own)
    source = Path(re.split(r":\d+$| row \d+$", where)[0])
    base = source.parent.resolve()
    folder = (base / files).resolve()
    if not source.is_file() or not folder.is_dir() or not folder.is_relative_to(base):
        raise DataError(
            f"{where}: its files: there is no folder {files!r:.100} beside the file of rows"
        )
    return {**own, "files": str(folder)}


def _check_json(where: str, metadata: Mapping[str, Any]) -> None:
    """Raise DataError unless JSON can hold a row's metadata, as the record of a run has to."""
    try:
        json.dumps(dict(metadata))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: its metadata is {metadata!r:.100} ({error}); give text, numbers, true,"
            " false, None, and lists and mappings of them"
        ) from None


def _value(where: str, row: Row, name: str, fields: Mapping[str, str]) -> Any:
    """Read a field of a row. Raises: DataError if the field is missing, with the names of the row's
    fields."""
    if fields[name] not in row:
        there = ", ".join(map(repr, row)) or "none"
        raise DataError(
            f"{where}: the field {fields[name]!r} (task.fields.{name}) is missing; the row has"
            f" {there}"
        )
    return row[fields[name]]


def _messages(where: str, prompt: Any, field: str) -> tuple[Message, ...]:
    """Read a prompt as chat messages. A text becomes one user message. A list must already be
    messages, and its last message must not be a reply."""
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f"{where}: the prompt ({field!r}) is missing or empty; it must be text, or a list of"
            " messages"
        )
    said = tuple(read_message(where, message, field) for message in prompt)
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message of {field!r} is the assistant's; end with what is to be"
            " answered"
        )
    return said


def make_tasks(rows: Any, split: str) -> list[Task]:
    """Make tasks from rows. A row is a Task, or a mapping with the fields of `FIELDS`, as in a
    `datasets.Dataset`. Only `prompt` is required.

    Raises: ConfigError if a row is neither; DataError naming the row if it has no prompt.
    """
    if isinstance(rows, str | Task | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(NO_TASKS.format(rows))
    return [_make_task(row, f"{split} row {i}", f"{split}/{i}") for i, row in enumerate(rows)]


def _make_task(row: Any, where: str, own_id: str) -> Task:
    if isinstance(row, Task):
        _check_json(f"task: {where}", row.metadata)
        if not (isinstance(row.id, str) and isinstance(row.answer, str)):
            raise DataError(
                f"task: {where}: its id is {row.id!r:.100} and its answer {row.answer!r:.100}; give"
                " two texts"
            )
        said = row.messages
        if isinstance(said, tuple | list) and all(
            isinstance(m, dict) and "role" in m for m in said
        ):
            where = f"task: {where}"
            return row._replace(
                messages=tuple(read_message(where, m, "messages", empty=True) for m in said)
            )
        raise DataError(
            f"task: {where}: the messages of a Task are a list of {{'role': …, 'content': …}}, not"
            f" {said!r:.100}"
        )
    if not isinstance(row, Mapping):
        raise ConfigError(NO_TASKS.format(row))
    if "prompt" not in row:
        there = ", ".join(map(repr, row)) or "no field"
        raise DataError(f"task: {where}: there is no 'prompt', but {there}; rename the field")
    fields = {name: name for name in FIELDS if name in row}
    return _task(f"task: {where}", dict(row), fields, Task(own_id, ()), None)
