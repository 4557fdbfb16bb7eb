"""Read the rows of a data set: a file, a folder of files, or a data set on the hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlkit.errors import DataError, name_error
from rlkit.tasks.splits import check_split, cut

SUFFIXES = (".jsonl", ".parquet")
ROLES = ("system", "user", "assistant", "tool")
Row = dict[str, Any]
Place = tuple[int, str, Row]  # (index in the source, place of the row for messages, row)
Readers = dict[str, Callable[[], Iterator[tuple[str, Row]]]]  # split → function that reads its rows


def read_rows(path: str, *, split: str, name: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yield the rows of one split, each with its place for messages. A place is "file:line" or
    "data set[split] row i".

    Args:
      path: a .jsonl or .parquet file, a folder with SPLIT.jsonl or SPLIT.parquet, or a hub id. A
        file is read whole, whatever the split. An existing local path is never looked up on the
        hub. Neither is a text with one of these endings, or with / . or ~ at its start. A relative
        path is relative to the current folder.
      split: "train", "validation", "test" or another split of the source.
      name: name of a configuration of a hub data set.
    Raises: DataError with the path, line or row, and the remedy. It is raised if the path does not
      exist, the split is missing, a file cannot be read, a line is not JSON, or a row is not an
      object.
    """
    found = _find_sources(path, name)
    # a file holds the rows of every split
    one_file = path.endswith(SUFFIXES) and not Path(path).expanduser().is_dir()
    yield from _read_split(found, "train" if one_file else split, path)


def read_message(where: str, message: Any, field: str, *, empty: bool = False) -> Any:
    """Read a chat message without its empty fields, and its tool calls in the form of chat
    templates. With `empty`, or with calls, the text may be missing.

    Raises: DataError for a message without a role or a text, or with an unreadable call.
    """
    if isinstance(message, dict) and message.get("role") in ROLES:
        content = message.get("content")
        calls = message.get("tool_calls")
        if isinstance(content, str) or (not content and (empty or calls)):
            kept = {key: value for key, value in message.items() if value is not None}
            kept |= {"content": content or ""}
            if calls:
                kept["tool_calls"] = [_call(where, call, i) for i, call in enumerate(calls)]
            return kept
    raise DataError(
        f"{where}: each message of {field!r} needs a role ({', '.join(ROLES)}) and text as content"
    )


def _call(where: str, call: Any, number: int) -> dict[str, Any]:
    """Read a tool call. A row may hold its arguments as a mapping or as JSON text."""
    try:
        function = call.get("function", call)
        arguments = function["arguments"]
        arguments = dict(json.loads(arguments) if isinstance(arguments, str) else arguments)
        return {
            "id": call.get("id") or f"call_{number}",
            "type": "function",
            "function": {"name": str(function["name"]), "arguments": arguments},
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f'{where}: a tool call must be {{"function": {{"name": …, "arguments": {{…}}}}}}, and'
            f" is {str(call)[:80]}"
        ) from error


def read_split(
    path: str,
    *,
    split: str,
    content: Callable[[str, Row], Any],
    validation: float,
    held_out: float,
    validation_path: str | None = None,
    test_path: str | None = None,
    name: str | None = None,
) -> tuple[str, Sequence[Place]]:
    """Return the rows of a split, and the source they come from. The rows come from a separate
    source or from a split of the source, if there is one. Otherwise they are a share of the
    training rows.

    Args:
      path, name: as in `read_rows`.
      split: train, validation or test.
      content: function from (place for messages, row) to the content that decides the split, for
        example the prompt (see `choose_split`).
      validation, held_out: shares of the training rows for validation and test, if the source does
        not have these splits.
      validation_path, test_path: separate sources for validation and test.
    Raises: ConfigError if the shares leave no training rows; DataError if the split has no rows;
      see also `read_rows`.
    """
    check_split(split, validation, held_out)
    own = {"validation": validation_path, "test": test_path}
    source = own.get(split)
    if source:
        try:
            return source, _number_rows(read_rows(source, split=split))
        except DataError as error:
            # the message names task.path, because the reader knows only this key
            said = str(error).replace("task.path=", f"task.{split}_path=")
            raise DataError(said) from error
    found = _find_sources(path, name)
    if split != "train" and split in found:
        return path, _number_rows(found[split]())
    rows = _number_rows(_read_split(found, "train", path))
    shares = (
        0.0 if own[key] or key in found else share
        for key, share in (("validation", validation), ("test", held_out))
    )
    names = dict(zip(("validation", "held_out"), shares, strict=True))
    return path, cut(
        rows, lambda row: content(*row[1:]), split, f"rows of task.path={path}", **names
    )


def _read_split(found: Readers, split: str, path: str) -> Iterator[tuple[str, Row]]:
    if split not in found:
        there = f"only {', '.join(found)}" if found else "no split at all"
        raise DataError(
            f"task.path={path} has no rows of split={split} ({there}); add {split}.jsonl or"
            f" {split}.parquet"
        )
    return found[split]()


def _number_rows(rows: Iterator[tuple[str, Row]]) -> list[Place]:
    return [(i, where, row) for i, (where, row) in enumerate(rows)]


def _find_sources(path: str, name: str | None) -> Readers:
    """Find the splits of a source, and how to read each. The rows of a single file are all
    "train"."""
    local = Path(path).expanduser()
    if not local.exists() and not path.endswith(SUFFIXES) and not path.startswith(("/", ".", "~")):
        return _hub(path, name)
    if not local.exists():
        raise DataError(
            f"task.path={path} does not exist; give a .jsonl or .parquet file, a folder or a hub id"
        )
    if local.is_dir():
        files = {
            file.stem: file
            for suffix in reversed(SUFFIXES)
            for file in sorted(local.glob(f"*{suffix}"))
        }
    elif local.suffix in SUFFIXES:
        files = {"train": local}
    else:
        raise DataError(
            f"task.path={path} ends in neither .jsonl nor .parquet; convert the file to one of"
            " the two"
        )
    return {
        split: partial(_parquet if file.suffix == ".parquet" else _jsonl, file)
        for split, file in files.items()
    }


def _jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _decode_line(f"{file}:{number}", line)
    except OSError as error:
        raise DataError(f"task.path={file} cannot be read: {error}") from error


def _decode_line(where: str, line: bytes) -> tuple[str, Row]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError also for bytes that are not UTF-8
        raise DataError(
            f"{where}: not a line of JSON ({error}); correct the line, or leave it out"
        ) from error
    return where, _check_row(where, row)


def _check_row(where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a row must be an object with named fields, not {type(row).__name__};"
            " correct it"
        )
    for field, value in row.items():
        try:
            json.dumps({field: value}, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{where}: the field {field!r:.80} holds {half!a}, half of a character (a lone"
                " surrogate), which no tokenizer can read; write the whole character, or leave the"
                " row out"
            ) from None
    return row


def _parquet(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"task.path={file}: reading Parquet needs pyarrow; install it, or convert to .jsonl"
        ) from error
    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                yield f"{file} row {number}", row
                number += 1
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(
            f"task.path={file} is not a Parquet file that can be read: {error}"
        ) from error


def _hub(path: str, name: str | None) -> Readers:
    try:
        from datasets import load_dataset

        found = load_dataset(path, name)
    except Exception as error:
        # whatever the hub client raises, the user has to correct the path or the network
        reason = name_error(error)
        raise DataError(
            f"task.path={path} is no local path, and cannot be loaded from the hub: {reason:.300}."
            " Correct the id, or set task.path to a local .jsonl or .parquet file or to a folder"
            " of them"
        ) from error
    return {split: partial(_hub_rows, f"{path}[{split}]", rows) for split, rows in found.items()}


def _hub_rows(source: str, rows: Any) -> Iterator[tuple[str, Row]]:
    for i, row in enumerate(rows):
        yield f"{source} row {i}", _check_row(f"{source} row {i}", row)
