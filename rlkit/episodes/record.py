"""Save and load rollouts: as JSON lines for machines, and as plain text for people.

A row is a rollout, and all rows have the same columns. Free-form values are stored as JSON text:
metadata, rewards by name, arguments of calls, and further keys of messages. Therefore `datasets`
opens a file as it is, and can turn it into Parquet:

    data = load_dataset("json", data_files="rollouts.jsonl.gz", split="train")
    data.to_parquet("rollouts.parquet")

`datasets` guesses the types from the start of the first file. The type of a column without any
value in this part cannot be guessed, for example if no rollout calls a tool. In this case, pass it
`features=Features.from_arrow_schema(rollout_schema())`.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import types
import typing
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.display import split_by_speaker
from rlkit.errors import ConfigError, DataError, show_controls
from rlkit.system import shards
from rlkit.system.files import report_write_errors, write_atomic
from rlkit.system.shards import Part
from rlkit.types import Message, Rollout, Step, Task, ToolCall, ToolResult

if TYPE_CHECKING:
    import pyarrow

FORMATS = (".jsonl.gz", ".jsonl")
FAILED = "failed_rollout.jsonl.gz"  # file for a rollout on which a reward failed
MEMBER = re.compile(rb"\x1f\x8b\x08[\0\x04]\0{4}")  # start of a gzip member without name and time
PIECE = 1 << 16  # number of bytes to unpack at a time
TEXT = json.JSONEncoder(ensure_ascii=False)


# ------------------------------------------------------------------------------------------- saving


def save_rollouts(path: Path | str, rollouts: Sequence[Rollout]) -> None:
    """Write a file of rollouts, completely or not at all. Equal rollouts give equal bytes.

    Args:
      path: the file. Its ending, .jsonl or .jsonl.gz, sets the format. An existing file is
        replaced.
      rollouts: the rollouts. Their metadata and arguments must be JSON types; a tuple in them is
        loaded as a list.
    Raises: ConfigError for another ending, TypeError for a value that JSON does not know.
    """
    write_atomic(Path(path), _json_lines(Path(path), rollouts))


def append_rollouts(path: Path | str, rollouts: Sequence[Rollout]) -> None:
    """Append rollouts to a .jsonl or .jsonl.gz file. The file is created if needed. If the process
    is killed while it writes, only these rollouts are damaged.

    Raises: ConfigError for another ending, TypeError for a value that JSON does not know. After
    either error the file is unchanged.
    """
    path = Path(path)
    data = _json_lines(path, rollouts)  # a .gz file gets a new gzip member
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if path.suffix != ".gz" and file.tell():
            file.seek(-1, os.SEEK_END)
            # if the last line was cut off, do not continue it: start a new line
            data = data if file.read(1) == b"\n" else b"\n" + data
        file.write(data)


def append_step(folder: Path, rl_step: int, rollouts: Sequence[Rollout]) -> None:
    """Append the rollouts of an RL step to the files in a run's folder rollouts/. Raises: TypeError
    or OSError, without having written anything."""
    shards.append_lines(folder, rl_step, _lines(rollouts, rl_step))


@contextmanager
def keep_failed_rollout(folder: Path) -> Iterator[None]:
    """Run the block of a `with` statement. If a reward raises RewardError in the block, save the
    rollout on which it failed to the folder. A note on the error names the file."""
    # imported here, because rewards import torch, and rollout files must be readable without torch
    from rlkit.rewards import RewardError

    try:
        yield
    except RewardError as error:
        if error.rollout is not None:
            with report_write_errors(FAILED):
                save_rollouts(folder / FAILED, [error.rollout])
                error.add_note(f"the rollout on which it failed: {folder / FAILED}")
        raise


def _check_path(path: Path) -> Path:
    if not path.name.endswith(FORMATS):
        raise ConfigError(f"{path}: a file of rollouts must end in .jsonl or .jsonl.gz; rename it")
    return path


def _json_lines(path: Path, rollouts: Sequence[Rollout]) -> bytes:
    compressed = _check_path(path).suffix == ".gz"
    data = _lines(rollouts)
    return gzip.compress(data, compresslevel=3, mtime=0) if compressed else data


def _lines(rollouts: Sequence[Rollout], rl_step: int | None = None) -> bytes:
    return "".join(_line(rollout, rl_step) + "\n" for rollout in rollouts).encode()


# ------------------------------------------------------------------------------------------ loading


def load_rollouts(path: Path | str | Part, *, step: int | None = None) -> list[Rollout]:
    """Load the rollouts of a file, or of one RL step of a run. The loaded rollouts equal the saved
    rollouts. A warning names the file and line of each damage, and all other rollouts are loaded.

    Args:
      path: a file of `save_rollouts` or `append_rollouts`, or a file in a run's folder rollouts/.
        If `step` is given, path is the folder rollouts/ itself.
      step: number of the RL step, from 1. None: the whole file is read.
    Raises: DataError with file and line if a line is damaged and no rollout can be read.
      ConfigError for another ending of the name, or for a step missing from the folder.
    """
    rollouts = []
    damages = []
    for place, row in _json_rows(_part(path, step)):
        try:
            rollouts.append(_rollout(row))
        except DataError as error:
            damages.append(f"{place}: {error}")
    if damages and not rollouts:
        raise DataError(f"{damages[0]}; no rollout of the file can be read")
    for damage in damages:
        warnings.warn(damage, stacklevel=2)
    return rollouts


def _part(path: Path | str | Part, step: int | None) -> Part:
    if isinstance(path, Part):
        return path
    if step is None:
        return Part(_check_path(Path(path)))
    found = shards.index_steps(Path(path))
    if step not in found:
        held = (
            f"it holds {len(found)} steps, from {min(found)} to {max(found)}"
            if found
            else "it holds no step; name a run's rollouts/"
        )
        raise ConfigError(f"{path}: there are no rollouts of step {step}; {held}")
    return found[step]


def _rollout(row: str | DataError) -> Rollout:
    if isinstance(row, DataError):
        raise row
    try:
        return read_row(_parse_line(row))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"not a rollout, left out ({type(error).__name__}: {error})") from error


def _json_rows(part: Part) -> Iterator[tuple[str, str | DataError]]:
    """Yield a pair for each line: the line's place, and its text or, if the line is damaged, a
    DataError. Empty lines are skipped."""
    data = part.read()
    rest = b""
    number = 0
    for text, damage in _members(data) if part.path.suffix == ".gz" else [(data, None)]:
        *lines, rest = (rest + text).split(b"\n")
        for line in lines:
            number += 1
            yield from _json_row(f"{part}:{number}", line)
        if damage is not None:  # reported in place of the line that it cut off
            number += 1
            rest = b""
            yield (
                f"{part}:{number}",
                DataError(
                    "the compressed data is damaged here or before; its complete lines are kept"
                    f" ({damage})"
                ),
            )
    yield from _json_row(f"{part}:{number + 1}", rest)


def _json_row(place: str, line: bytes) -> Iterator[tuple[str, str | DataError]]:
    if line.strip():
        try:
            yield place, line.decode()
        except UnicodeDecodeError as error:
            yield place, DataError(f"not a rollout, left out ({error})")


def _members(data: bytes) -> Iterator[tuple[bytes, str | None]]:
    """Yield a pair for each member of a gzip file: the member's text, and a description of its
    damage. The description is None for an intact member. After a damaged member, reading continues
    with the next member."""
    start = 0
    while start < len(data):
        text, length, damage = _unpack_member(memoryview(data)[start:])
        yield text, damage
        if damage is None:
            start += length
        else:
            following = MEMBER.search(data, start + 1)
            start = following.start() if following else len(data)


def _unpack_member(data: memoryview) -> tuple[bytes, int, str | None]:
    """Unpack the first member of a gzip file, up to its end or its first damaged byte. Return the
    text, the size of the member in bytes, and the error (None without an error)."""
    stream = zlib.decompressobj(wbits=31)
    texts = []
    position = 0
    try:
        while not stream.eof and position < len(data):
            texts.append(stream.decompress(data[position : position + PIECE]))
            position = min(position + PIECE, len(data))
    except zlib.error as error:
        # once more, byte by byte, because a call that raises returns nothing
        stream = zlib.decompressobj(wbits=31)
        texts = [stream.decompress(data[:position])]
        with suppress(zlib.error):
            texts.extend(stream.decompress(data[i : i + 1]) for i in range(position, len(data)))
        return b"".join(texts), position, str(error)
    damage = None if stream.eof else "it ends in the middle"
    return b"".join(texts), position - len(stream.unused_data), damage


# --------------------------------------------------------------------------------------------- rows

# columns to filter by; all except the first can be computed from the other fields
COLUMNS = ("rl_step", "task_id", "num_steps", "response_length", "total_reward")
# the keys of a message with their own columns; its other keys are stored as JSON text
PLAIN = ("role", "content")
# half a surrogate pair, in hexadecimal; a str can contain it, but UTF-8 cannot
LONE = "d[89a-f][0-9a-f]{2}"
RECORDS = (Rollout, Task, Step, ToolCall, ToolResult)
# annotated type of a field → the Python types accepted for its value; a field with any other
# annotation must hold a str
SCALARS: Mapping[Any, Any] = {float: (int, float), int: int, bool: bool, type(None): type(None)}
_fields = functools.cache(typing.get_type_hints)


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """Encode rollouts as the bytes of a .jsonl.gz file. Raises: TypeError for a value that JSON
    does not know."""
    return _json_lines(Path(f"rollouts{FORMATS[0]}"), rollouts)


def decode_rollouts(data: bytes) -> list[Rollout]:
    """Decode rollouts from the bytes of `encode_rollouts`. Raises: DataError for other data."""
    return [_rollout(line) for line in gzip.decompress(data).decode().split("\n") if line]


def rollout_schema() -> pyarrow.Schema:
    """Return the columns of a file of rollouts, with their types in `datasets` and Parquet."""
    import pyarrow as pa

    scalars = {float: pa.float64(), int: pa.int64(), bool: pa.bool_()}

    def kind(hint: Any) -> Any:
        inner = typing.get_args(hint)
        if hint in RECORDS:
            return pa.struct([(name, kind(of)) for name, of in _fields(hint).items()])
        if hint is Message:
            return pa.struct([(name, pa.string()) for name in (*PLAIN, "other")])
        if isinstance(hint, types.UnionType):
            return kind(inner[0])
        return (
            pa.list_(kind(inner[0]))
            if typing.get_origin(hint) is tuple
            else scalars.get(hint, pa.string())
        )

    columns = zip(COLUMNS, map(kind, (int, str, int, int, float)), strict=True)
    return pa.schema([*columns, *((name, kind(of)) for name, of in _fields(Rollout).items())])


def make_row(rollout: Rollout, rl_step: int | None = None) -> dict[str, Any]:
    """Make a row of plain types from a rollout. Every row has the same form: first the columns to
    filter by, then the fields of Rollout in their order."""
    columns = (
        rl_step,
        rollout.task.id,
        len(rollout.steps),
        rollout.response_length,
        rollout.total_reward,
    )
    return dict(zip(COLUMNS, columns, strict=True)) | _make_plain(rollout, Rollout)


def read_row(row: Mapping[str, Any]) -> Rollout:
    """Make a rollout from a row of `make_row`. The row may have been written to JSON and read
    again. Raises: KeyError, TypeError or ValueError for any other row."""
    return _restore_value(
        {name: value for name, value in row.items() if name not in COLUMNS}, Rollout
    )


def _make_plain(value: Any, hint: Any) -> Any:
    """Convert a value of the type `hint` to the form stored in a row. A chat message becomes the
    columns "role", "content" and "other". "role" and "content" are None if the message lacks the
    key, or if its value is not text. "other" holds all remaining entries of the message as JSON
    text, including a "content" that is not text."""
    origin = typing.get_origin(hint)
    if hint in RECORDS:
        return {
            name: _make_plain(getattr(value, name), kind) for name, kind in _fields(hint).items()
        }
    if hint is Message:
        plain = {name: text for name in PLAIN if isinstance(text := value.get(name), str)}
        return (
            dict.fromkeys(PLAIN)
            | plain
            | {"other": TEXT.encode({name: value[name] for name in value if name not in plain})}
        )
    if origin is tuple:
        kind, *_ = typing.get_args(hint)
        return list(value) if kind in SCALARS else [_make_plain(item, kind) for item in value]
    return TEXT.encode(dict(value)) if origin is Mapping else value


def _restore_value(value: Any, hint: Any, path: str = "") -> Any:
    """Convert a value back from the form of `_make_plain`. Raises: TypeError if a field's value
    does not have the annotated type. The message names the first such field."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if hint is Any:
        return value
    if hint in RECORDS and isinstance(value, Mapping):
        kinds = _fields(hint)
        return hint(
            **{
                name: _restore_value(item, kinds[name], f"{path}.{name}".lstrip("."))
                for name, item in value.items()
            }
        )
    if hint is Message and isinstance(value, Mapping):
        return {name: value[name] for name in PLAIN if value[name] is not None} | json.loads(
            value["other"]
        )
    if isinstance(hint, types.UnionType):
        return None if value is None else _restore_value(value, inner[0], path)
    if origin is Mapping and isinstance(value, str):
        items = json.loads(value)
        if isinstance(items, dict):
            return {
                key: _restore_value(item, inner[1], f"{path}.{key}") for key, item in items.items()
            }
    if origin is tuple and isinstance(value, list | tuple):
        if inner[0] not in SCALARS:
            return tuple(
                _restore_value(item, inner[0], f"{path}[{i}]") for i, item in enumerate(value)
            )
        if {*map(type, value)} <= {int, inner[0]}:  # a fast path for token ids and log-probs
            return tuple(value)
    elif (
        origin not in (Mapping, tuple)
        and hint not in (*RECORDS, Message)
        and isinstance(value, SCALARS.get(hint, str))
        and (hint is bool or not isinstance(value, bool))
    ):
        return value
    raise TypeError(f"{path} has another type than rlkit writes")


def _line(rollout: Rollout, rl_step: int | None) -> str:
    """Write a rollout's row as JSON text that UTF-8 can encode. Half a surrogate pair is written as
    U+FFFD, followed by its number in hexadecimal."""
    text = TEXT.encode(make_row(rollout, rl_step))
    # most lines are ASCII, and the search below takes as long as everything above it
    if text.isascii():
        return text
    return re.sub(
        f"[\ud800-\udfff]|\ufffd(?={LONE}|fffd)", lambda found: f"\ufffd{ord(found[0]):x}", text
    )


def _parse_line(line: str) -> Any:
    """Read a row from a line written by `_line`."""
    return json.loads(re.sub(f"\ufffd({LONE}|fffd)", lambda found: chr(int(found[1], 16)), line))


# -------------------------------------------------------------------------------------- transcripts


def write_transcript(rollout: Rollout) -> str:
    """Return the conversation as Markdown that also reads well as plain text. The model's text is
    indented, so it is never read as markup."""
    ending = f"truncated by {rollout.truncation}" if rollout.status == "truncated" else "terminated"
    lines = [
        (
            f"### {show_controls(rollout.task.id)} · sample {rollout.sample} · reward"
            f" {rollout.total_reward} · {ending}"
        ),
        "",
    ]
    for who, text in split_by_speaker(rollout):
        lines += [f"**{show_controls(who)}**", "", _indent(text), ""]
    return "\n".join(lines)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in show_controls(text, kept="\n").splitlines())
