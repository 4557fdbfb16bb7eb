"""A user's own rows, their fields named in the config."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.environments.prompts import with_system_prompt
from rlkit.errors import ConfigError, DataError
from rlkit.tasks.source import Row, check_message, read_split
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
    """Read the rows of a .jsonl or .parquet file, of a folder of them, or of a hub data set, as
    tasks.

    Args:
      path: see `read_rows`. A folder or a data set provides its own splits. A single file has only
        training rows. Any missing split is cut from "train" as a share, and "train" then leaves it
        out.
      split: train, validation or test.
      seed: of the order. It moves no row from one split to another.
      fields: our name → the row's field; null for an unused name. `prompt` (text, or a list of
        messages) is needed; `answer` (text or a number) as soon as the reward has a truth; `id`,
        `reward` and `environment` let each row choose its own. `metadata` is a mapping, the task's
        metadata. environment=program copies its `files` into the folder of each episode: a mapping
        of path to text, or a folder beside the rows.
      validation_path, test_path: other sources for "validation" and "test".
      validation, held_out: shares of the different prompts for "validation" and "test", at least 0
        and together below 1. `choose_split` hashes the prompt, not the id: rows with
        the same prompt share a split, and neither the order nor the number of rows moves a row.
      max_samples: number of rows after the shuffle; None for all.
      reward, environment: the names for rows without names of their own.
      system_prompt: put in front of every row's messages.
    Returns: tasks; without an `id` field they are called SOURCE/SPLIT/ROW.
    Raises: ConfigError for fields or shares that make no sense. DataError that names the row if it
      lacks a mapped field or its prompt is no prompt. See also `read_rows`.
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
                f"{where}: nothing reads the field '{name}'; set task.fields.{name}={name} where it"
                f" names the row's {unread[name]}, and task.fields.{name}=null to pass over it"
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
            or not isinstance(value, (str, int, float))
            or not str(value).strip()
        ):
            raise DataError(
                f"{where}: the field {fields[name]!r} (task.fields.{name}) is missing, empty or"
                " neither text nor a number; correct the row, or task.fields"
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
    """Read the row's metadata. A folder of its files must stand beside the rows, so that a
    stranger's rows name no other folder."""
    own = (_value(where, row, "metadata", fields) if "metadata" in fields else None) or {}
    if not isinstance(own, Mapping):
        raise DataError(f"{where}: task.fields.metadata names a field that is no mapping")
    files = own.get("files")
    if not isinstance(files, str):
        return dict(own)
    base = Path(where).parent.resolve()
    folder = (base / files).resolve()
    if not folder.is_dir() or not folder.is_relative_to(base):
        raise DataError(f"{where}: its files: there is no folder {files!r:.100} in {base}")
    return {**own, "files": str(folder)}


def _value(where: str, row: Row, name: str, fields: Mapping[str, str]) -> Any:
    """Read a field of a row. Raises: DataError with the names of its fields."""
    if fields[name] not in row:
        there = ", ".join(map(repr, row)) or "none"
        raise DataError(
            f"{where}: the field {fields[name]!r} (task.fields.{name}) is missing; the row has"
            f" {there}"
        )
    return row[fields[name]]


def _messages(where: str, prompt: Any, field: str) -> tuple[Message, ...]:
    """Read a prompt as chat messages. Text is one user message; a list must already be messages,
    and the last must not be a reply."""
    if isinstance(prompt, str) and prompt.strip():
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list) or not prompt:
        raise DataError(
            f"{where}: the prompt ({field!r}) is missing or empty; it must be text, or a list of"
            " messages"
        )
    for message in prompt:
        check_message(where, message, field)
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message of {field!r} is the assistant's; end with what is to be"
            " answered"
        )
    return tuple(prompt)


def make_tasks(rows: Any, split: str) -> list[Task]:
    """Make tasks of rows: Tasks, or mappings with the fields of `FIELDS`, such as a
    `datasets.Dataset`. Only `prompt` is required.

    Raises: ConfigError if they are neither; DataError that names a row without a prompt.
    """
    if isinstance(rows, str | Task | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(NO_TASKS.format(rows))
    return [_make_task(row, f"{split} row {i}", f"{split}/{i}") for i, row in enumerate(rows)]


def _make_task(row: Any, where: str, own_id: str) -> Task:
    if isinstance(row, Task):
        try:
            json.dumps(dict(row.metadata))
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"task: {where}: its metadata is {row.metadata!r:.100} ({error}); give text,"
                " numbers, true, false, None, and lists and mappings of them"
            ) from None
        said = row.messages
        if isinstance(said, tuple | list) and all(
            isinstance(m, dict) and "role" in m for m in said
        ):
            return row
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
