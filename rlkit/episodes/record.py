"""Rollouts as files: JSON lines and Parquet for machines, plain text for people.

Both formats hold the same rows, one a rollout, of one shape whatever the rollout holds: what is free-form (metadata, rewards by name,
arguments of calls, further keys of messages) is JSON text. So a file opens in `datasets` as it is:

    load_dataset("json", data_files="rollouts.jsonl.gz")    load_dataset("parquet", data_files="rollouts.parquet")

`datasets` guesses the types of JSON from the start of the first file. Where nothing there tells (no tool call at all, no reward), say
`features=Features.from_arrow_schema(rollout_schema())`; Parquet holds its types.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import ConfigError, DataError, visible
from rlkit.rewards import RewardError
from rlkit.system.files import lenient, write_atomic
from rlkit.types import Message, Rollout, Step, Task, ToolCall, ToolResult

if TYPE_CHECKING:
    import pyarrow

FORMATS = (".jsonl.gz", ".jsonl", ".parquet")
FAILED = "failed_rollout.jsonl.gz"  # the rollout on which a reward failed
MEMBER = b"\x1f\x8b\x08\0\0\0\0\0"  # how a gzip member without name and time begins
PIECE = 1 << 16  # bytes that are unpacked at a time
TEXT = json.JSONEncoder(ensure_ascii=False)
ROW_GROUP = 64  # rollouts that a damaged part of a Parquet file takes along, at most


# -------------------------------------------------------------------------------------------------------- saving


def save_rollouts(path: Path | str, rollouts: Sequence[Rollout]) -> None:
    """A file of rollouts, whole or not there; equal rollouts give equal bytes.

    Args:
      path: ends in .jsonl, .jsonl.gz or .parquet, which decides the format. What was there is replaced.
      rollouts: with metadata and arguments of types that JSON knows; tuples in there come back as lists.
    Raises: ConfigError for another ending, TypeError for what JSON does not know.
    """
    path = Path(path)
    write_atomic(path, _parquet(rollouts) if _format(path) == ".parquet" else _json_lines(path, rollouts))


def append_rollouts(path: Path | str, rollouts: Sequence[Rollout]) -> None:
    """Adds rollouts to a .jsonl or .jsonl.gz file, which need not be there yet. A kill in the middle damages these rollouts alone.

    Raises: ConfigError for another ending, TypeError for what JSON does not know; then nothing was written.
    """
    path = Path(path)
    if _format(path) == ".parquet":
        raise ConfigError(
            f"{path}: a Parquet file cannot be appended to; append to a .jsonl.gz file, and in the end "
            "save_rollouts('rollouts.parquet', load_rollouts('rollouts.jsonl.gz'))"
        )
    data = _json_lines(path, rollouts)  # of a .gz: a member of its own
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if path.suffix != ".gz" and file.tell():
            file.seek(-1, os.SEEK_END)
            data = data if file.read(1) == b"\n" else b"\n" + data  # the last line was cut off: it stays alone
        file.write(data)


@contextmanager
def failed_rollout_kept(folder: Path) -> Iterator[None]:
    """Where a reward fails inside, the rollout on which it failed is saved to the folder, and the error's note names the file."""
    try:
        yield
    except RewardError as error:
        if error.rollout is not None:
            with lenient(FAILED):
                save_rollouts(folder / FAILED, [error.rollout])
                error.add_note(f"the rollout on which it failed: {folder / FAILED}")
        raise


def _format(path: Path) -> str:
    for ending in FORMATS:
        if path.name.endswith(ending):
            return ending
    raise ConfigError(f"{path}: a file of rollouts ends in .jsonl, .jsonl.gz or .parquet; name it so")


def _json_lines(path: Path, rollouts: Sequence[Rollout]) -> bytes:
    data = "".join(_line(rollout) + "\n" for rollout in rollouts).encode()
    return gzip.compress(data, compresslevel=3, mtime=0) if path.suffix == ".gz" else data


def _parquet(rollouts: Sequence[Rollout]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([json.loads(_line(rollout)) for rollout in rollouts], schema=rollout_schema())
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP, write_page_checksum=True)
    return sink.getvalue().to_pybytes()


# ------------------------------------------------------------------------------------------------------- loading


def load_rollouts(path: Path | str, *, strict: bool = False) -> list[Rollout]:
    """The rollouts of a file, equal to those saved.

    Args:
      path: a file of `save_rollouts` or `append_rollouts`.
      strict: True raises at the first damaged place. False warns of each, with file and line (row, in Parquet), and keeps the rest.
    Raises: DataError naming the place, where strict and where there are damaged places only. ConfigError for another ending.
    """
    path = Path(path)
    rollouts, damages = [], []
    for place, row in _parquet_rows(path) if _format(path) == ".parquet" else _json_rows(path):
        try:
            rollouts.append(_rollout(row))
        except DataError as error:
            damages.append(f"{place}: {error}")
            if strict:
                raise DataError(damages[-1]) from error
    if damages and not rollouts:
        raise DataError(f"{damages[0]}; there is no rollout in the file that can be read")
    for damage in damages:
        warnings.warn(damage, stacklevel=2)
    return rollouts


def _rollout(row: str | DataError) -> Rollout:
    if isinstance(row, DataError):
        raise row
    try:
        return from_row(_restored(row))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"not a rollout, left out ({type(error).__name__}: {error})") from error


def _json_rows(path: Path) -> Iterator[tuple[str, str | DataError]]:
    """Each line with its place, or what is wrong there; empty lines hold nothing."""
    data = path.read_bytes()
    rest, number = b"", 0
    for text, damage in _members(data) if path.suffix == ".gz" else [(data, None)]:
        *lines, rest = (rest + text).split(b"\n")
        for line in lines:
            number += 1
            yield from _json_row(f"{path}:{number}", line)
        if damage is not None:  # instead of the line in whose middle it happened
            number, rest = number + 1, b""
            yield f"{path}:{number}", DataError(f"the compressed data is damaged here or before; its whole lines are kept ({damage})")
    yield from _json_row(f"{path}:{number + 1}", rest)


def _json_row(place: str, line: bytes) -> Iterator[tuple[str, str | DataError]]:
    if line.strip():
        try:
            yield place, line.decode()
        except UnicodeDecodeError as error:
            yield place, DataError(f"not a rollout, left out ({error})")


def _members(data: bytes) -> Iterator[tuple[bytes, str | None]]:
    """The members of a gzip file, unpacked, each with what is wrong with it; behind a damaged one it goes on with the next."""
    start = 0
    while start < len(data):
        text, length, damage = _unpacked(memoryview(data)[start:])
        yield text, damage
        following = start + length if damage is None else data.find(MEMBER, start + 1)
        start = following if following > 0 else len(data)


def _unpacked(data: memoryview) -> tuple[bytes, int, str | None]:
    """What comes out of the first member before its end or a damage, how many bytes it takes, and the damage."""
    stream, texts, position = zlib.decompressobj(wbits=31), [], 0
    try:
        while not stream.eof and position < len(data):
            texts.append(stream.decompress(data[position : position + PIECE]))
            position = min(position + PIECE, len(data))
    except zlib.error as error:
        stream = zlib.decompressobj(wbits=31)  # again, up to the very byte: what raises gives nothing
        texts = [stream.decompress(data[:position])]
        with suppress(zlib.error):
            texts.extend(stream.decompress(data[i : i + 1]) for i in range(position, len(data)))
        return b"".join(texts), position, str(error)
    damage = None if stream.eof else "it ends in the middle"
    return b"".join(texts), position - len(stream.unused_data), damage


def _parquet_rows(path: Path) -> Iterator[tuple[str, str | DataError]]:
    """Each row with its number, from 0, as JSON; or what is wrong with a group of rows."""
    from pyarrow import parquet

    number = 0
    try:
        file = parquet.ParquetFile(path, page_checksum_verification=True)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        if isinstance(error, FileNotFoundError):
            raise
        yield f"{path}", DataError(f"not a Parquet file that can be read ({error})")
        return
    with file:
        for i in range(file.num_row_groups):
            count = file.metadata.row_group(i).num_rows
            try:
                for j, row in enumerate(file.read_row_group(i).to_pylist()):
                    yield f"{path} row {number + j}", json.dumps(row, ensure_ascii=False)
            except (OSError, ValueError) as error:
                yield f"{path} rows {number} to {number + count - 1}", DataError(f"the data is damaged, left out ({error})")
            number += count


# ---------------------------------------------------------------------------------------------------------- rows

COLUMNS = ("task_id", "num_steps", "response_length", "total_reward")  # to filter on; told by the rest of the row
PLAIN = ("role", "content")  # of a message; its other keys are JSON text
LONE = "d[89a-f][0-9a-f]{2}"  # half a surrogate pair in hexadecimal: a str may hold it, UTF-8 may not


def rollout_schema() -> pyarrow.Schema:
    """The columns of a file of rollouts, as Parquet and `datasets` call their types."""
    import pyarrow as pa

    text, number, count, ids, flag = pa.string(), pa.float64(), pa.int64(), pa.list_(pa.int64()), pa.bool_()
    messages = pa.list_(pa.struct({"role": text, "content": text, "other": text}))
    task = {"id": text, "messages": messages, "answer": text, "reward": text, "environment": text, "metadata": text, "part": text}
    call = {"id": text, "name": text, "arguments": text, "error": text}
    result = {"id": text, "name": text, "content": text, "ok": flag, "seconds": number}
    step = {
        "prompt": messages,
        "prompt_ids": ids,
        "response_ids": ids,
        "logprobs": pa.list_(number),
        "finish_reason": text,
        "thinking": text,
        "content": text,
        "thinking_closed": flag,
        "tool_calls": pa.list_(pa.struct(call)),
        "tool_results": pa.list_(pa.struct(result)),
        "reward": number,
        "forced": ids,
        "dropped": count,
        "versions": pa.list_(ids),
    }
    rollout = {
        "task": pa.struct(task),
        "steps": pa.list_(pa.struct(step)),
        "status": text,
        "truncation": text,
        "group": count,
        "sample": count,
        "reward": number,
        "rewards": text,
        "metadata": text,
        "statuses": text,
    }
    return pa.schema({"task_id": text, "num_steps": count, "response_length": count, "total_reward": number} | rollout)


def to_row(rollout: Rollout) -> dict[str, Any]:
    """Plain types, the same for every rollout: columns to filter on, then the fields in their order."""
    steps = [
        step._asdict()
        | {"prompt": [_message_row(message) for message in step.prompt]}
        | {"tool_calls": [call._asdict() | {"arguments": _text(call.arguments)} for call in step.tool_calls]}
        | {"tool_results": [result._asdict() for result in step.tool_results]}
        for step in rollout.steps
    ]
    task = rollout.task._asdict() | {
        "messages": [_message_row(message) for message in rollout.task.messages],
        "metadata": _text(rollout.task.metadata),
    }
    free = {"rewards": _text(rollout.rewards), "metadata": _text(rollout.metadata), "statuses": _text(rollout.statuses)}
    columns = (rollout.task.id, len(steps), rollout.response_length, rollout.total_reward)
    return dict(zip(COLUMNS, columns, strict=True)) | rollout._asdict() | {"task": task, "steps": steps} | free


def from_row(row: Mapping[str, Any]) -> Rollout:
    """The inverse of `to_row`, also after a trip through JSON. Raises KeyError, TypeError or ValueError where it is no such row."""
    steps = tuple(
        Step(
            **step
            | {"prompt": tuple(_message(message) for message in step["prompt"])}
            | {name: tuple(step[name]) for name in ("prompt_ids", "response_ids", "logprobs", "forced")}
            | {"versions": tuple(tuple(span) for span in step.get("versions", ()))}
            | {"tool_calls": tuple(ToolCall(**call | {"arguments": json.loads(call["arguments"])}) for call in step["tool_calls"])}
            | {"tool_results": tuple(ToolResult(**result) for result in step["tool_results"])}
        )
        for step in row["steps"]
    )
    messages = tuple(_message(message) for message in row["task"]["messages"])
    task = Task(**row["task"] | {"messages": messages, "metadata": json.loads(row["task"]["metadata"])})
    free = {name: json.loads(row[name]) for name in ("rewards", "metadata", "statuses")}
    rollout = Rollout(**{name: value for name, value in row.items() if name not in COLUMNS} | {"task": task, "steps": steps} | free)
    if wrong := _wrong(rollout):
        raise TypeError(f"{wrong} is of another type than rlkit writes")
    return rollout


def _wrong(value: Any, hint: Any = Rollout, path: str = "") -> str:
    """The first field below a value that does not hold what its annotation says; "" where all do."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    below: Iterable[tuple[str, Any, Any]] = ()  # (path, value, hint) of what is inside
    if hint is Any:
        return ""
    if origin in (typing.Union, types.UnionType):
        return "" if any(not _wrong(value, option, path) for option in inner) else path
    if origin is tuple and isinstance(value, tuple):
        if inner[0] in (int, float):  # as many as there are tokens
            return "" if {*map(type, value)} <= {int, inner[0]} else path
        below = ((f"{path}[{i}]", item, inner[0]) for i, item in enumerate(value))
    elif (hint is Message or origin is Mapping) and isinstance(value, dict):
        below = ((f"{path}.{key}", item, inner[1] if inner else Any) for key, item in value.items())
    elif hint in HINTS and isinstance(value, hint):
        below = ((f"{path}.{name}".lstrip("."), getattr(value, name), kind) for name, kind in _hints(hint).items())
    elif not isinstance(value, PLAINLY.get(hint, str)) or (isinstance(value, bool) and hint is not bool):
        return path
    return next((wrong for place, item, kind in below if (wrong := _wrong(item, kind, place))), "")


PLAINLY: Mapping[Any, Any] = {float: (int, float), int: int, bool: bool, type(None): type(None)}  # all else is text
HINTS = (Rollout, Task, Step, ToolCall, ToolResult)
_hints = functools.cache(typing.get_type_hints)


def _message_row(message: Message) -> dict[str, str | None]:
    """None stands for a key that is not there, or is no text and so among the others."""
    plain = {name: value for name in PLAIN if isinstance(value := message.get(name), str)}
    return dict.fromkeys(PLAIN) | plain | {"other": _text({name: message[name] for name in message if name not in plain})}  # type: ignore[literal-required]


def _message(row: Mapping[str, Any]) -> Message:
    return {name: row[name] for name in PLAIN if row[name] is not None} | json.loads(row["other"])


def _text(value: Mapping[str, Any]) -> str:
    return TEXT.encode(dict(value))


def _line(rollout: Rollout) -> str:
    """The row as JSON in which every character has a place in UTF-8: half a surrogate pair is written as U+FFFD and its number."""
    text = TEXT.encode(to_row(rollout))
    if text.isascii():  # most are: the search takes as long as all else
        return text
    return re.sub(f"[\ud800-\udfff]|\ufffd(?={LONE}|fffd)", lambda found: f"\ufffd{ord(found[0]):x}", text)


def _restored(line: str) -> Any:
    """The row of a line of `_line`."""
    return json.loads(re.sub(f"\ufffd({LONE}|fffd)", lambda found: chr(int(found[1], 16)), line))


# ---------------------------------------------------------------------------------------------------- transcripts


def transcript(rollout: Rollout) -> str:
    """The conversation as Markdown that also reads well as plain text; text of the model is indented, never markup."""
    lines = [f"### {visible(rollout.task.id)} · sample {rollout.sample} · reward {rollout.reward} · {_ending(rollout)}", ""]
    for message in rollout.conversation:
        lines += [f"**{visible(message['role'])}**", ""]
        if thinking := message.get("reasoning_content"):
            lines += [_indent(f"(thinking) {thinking}"), ""]
        if content := message.get("content"):
            lines += [_indent(content), ""]
        for call in message.get("tool_calls", []):
            lines += [_indent(f"→ {call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})"), ""]
    if rollout.task.answer:
        lines += [f"expected: `{visible(rollout.task.answer)}`", ""]
    return "\n".join(lines)


def _ending(rollout: Rollout) -> str:
    return f"truncated by {rollout.truncation}" if rollout.status == "truncated" else "terminated"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in visible(text, kept="\n").splitlines())
