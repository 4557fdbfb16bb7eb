"""Reading the rows of a data set: a file, a folder of files, or a data set on the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlkit.errors import DataError

SUFFIXES = (".jsonl", ".parquet")
Row = dict[str, Any]
Place = tuple[int, str, Row]  # index in the source, where for messages, the row


def read_rows(path: str, *, split: str, name: str | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of one split, each with the place it comes from (for messages): "file:line" or "data set[split] row i".

    Args:
      path: a .jsonl or .parquet file (the whole file, whatever the split), a folder that holds SPLIT.jsonl or
        SPLIT.parquet, or a hub id. What exists locally, and what looks like a path (it has one of these endings, or
        starts with / . or ~), is never looked up on the hub. Relative paths start at the current folder.
      split: "train", "test" or another name that the source knows.
      name: which configuration of a hub data set.
    Raises: DataError naming the path, line or row, and the remedy: nothing there, no such split, a file that cannot be
      read, a line that is not JSON, a row that is not an object.
    """
    local = Path(path).expanduser()
    if not local.exists() and not path.endswith(SUFFIXES) and not path.startswith(("/", ".", "~")):
        yield from _hub(path, split, name)
        return
    file = _file(local, split)
    yield from _parquet(file) if file.suffix == ".parquet" else _jsonl(file)


def read_side(path: str, test_path: str | None, *, split: str, held_out: float, field: str) -> tuple[str, list[Place]]:
    """Where the rows of a split stand, and the rows: those of `test_path`, or of a single file without one a share of it (see `side`)."""
    source = test_path if split == "test" and test_path else path
    rows = [(i, where, row) for i, (where, row) in enumerate(read_rows(source, split=split))]
    return source, side(rows, field, held_out, split, source) if is_file(path) and not test_path else rows


def side(rows: list[Place], field: str, held_out: float, split: str, source: str) -> list[Place]:
    """The rows on one side of the border: prompts in the order of their hash, the last share of them is "test"."""

    def rank(row: Mapping[str, Any]) -> str:
        return hashlib.sha256(json.dumps(row.get(field), sort_keys=True, default=str).encode()).hexdigest()

    if split not in ("train", "test"):
        raise DataError(f"task.path={source} is one file and has no split {split!r}; use train or test")
    ranks = sorted({rank(row) for _, _, row in rows})
    if len(ranks) < 2:
        raise DataError(f"task.path={source} has {len(ranks)} different prompts, too few to hold some out; set task.test_path, or add rows")
    border = ranks[len(ranks) - min(max(1, round(held_out * len(ranks))), len(ranks) - 1)]
    return [place for place in rows if (rank(place[2]) >= border) == (split == "test")]


def is_file(path: str) -> bool:
    """Whether a path means one file for all splits, existing or not."""
    local = Path(path).expanduser()
    return path.endswith(SUFFIXES) and not local.is_dir()


def _file(path: Path, split: str) -> Path:
    """The file that holds a split, of a path that must be local."""
    if not path.exists():
        raise DataError(f"task.path={path} does not exist; give a .jsonl or .parquet file, a folder or a hub id")
    if not path.is_dir():
        if path.suffix not in SUFFIXES:
            raise DataError(f"task.path={path} ends in neither .jsonl nor .parquet; convert the file to one of the two")
        return path
    for suffix in SUFFIXES:
        if (file := path / f"{split}{suffix}").is_file():
            return file
    raise DataError(f"task.path={path} holds neither {split}.jsonl nor {split}.parquet; add one, or give a file")


def _jsonl(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _decoded(f"{file}:{number}", line)
    except OSError as error:
        raise DataError(f"task.path={file} cannot be read: {error}") from error


def _decoded(where: str, line: bytes) -> tuple[str, Row]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8
        raise DataError(f"{where}: not a line of JSON ({error}); correct the line, or leave it out") from error
    return where, _checked(where, row)


def _checked(where: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a row must be an object with named fields, not {type(row).__name__}; correct it")
    for field, value in row.items():
        if half := _half_pair(value):
            raise DataError(
                f"{where}: the field {field!r:.80} holds {half!a}, half of a character (a lone surrogate), which no tokenizer can read; "
                "write the whole character, or leave the row out"
            )
    return row


def _half_pair(value: Any) -> str:
    """The first lone surrogate in a text, also one inside lists and objects; "" where there is none."""
    if isinstance(value, str):
        found = None if value.isascii() else re.search("[\ud800-\udfff]", value)
        return found[0] if found else ""
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((half for item in inner if (half := _half_pair(item))), "")


def _parquet(file: Path) -> Iterator[tuple[str, Row]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"task.path={file}: reading Parquet needs pyarrow; install it, or convert to .jsonl") from error
    try:
        number = 0
        for batch in parquet.ParquetFile(file).iter_batches():
            for row in batch.to_pylist():
                yield f"{file} row {number}", row
                number += 1
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"task.path={file} is not a Parquet file that can be read: {error}") from error


def _hub(path: str, split: str, name: str | None) -> Iterator[tuple[str, Row]]:
    try:
        from datasets import load_dataset

        rows = load_dataset(path, name, split=split)
    except Exception as error:  # whatever the hub client raises, the user has to mend the path or the network
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"task.path={path} is no local path, and its split {split!r} cannot be loaded from the hub: {reason:.300}. "
            "Correct the id, or set task.path to a local .jsonl or .parquet file or to a folder of them"
        ) from error
    for i, row in enumerate(rows):
        where = f"{path}[{split}] row {i}"
        yield where, _checked(where, row)
