"""Write rollouts as a flat table in Parquet files, in addition to the full record. A row is a
rollout, and each column holds plain values of one quantity.

    completions/steps_000001-000005.parquet …

`datasets`, pandas and polars open these files as they are:

    load_dataset("parquet", data_files="outputs/NAME/TIME/completions/*.parquet", split="train")
    pandas.read_parquet("outputs/NAME/TIME/completions")
    polars.read_parquet("outputs/NAME/TIME/completions/*.parquet")

A file is complete or absent, and it is never rewritten. Therefore the file's name can hold its
first and last step. All files of a run have the same columns.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import DataError
from rlkit.system.files import open_atomically, put_aside, reason
from rlkit.types import Message, Rollout

if TYPE_CHECKING:
    import pyarrow

# Parquet type of each column. Between `reward` and `advantage`, the table also has a column
# `reward_NAME` for each component of the reward.
COLUMNS: dict[str, str] = {
    "step": "int64",
    "group": "int64",
    "sample": "int64",
    "task_id": "string",
    "prompt": "string",
    "completion": "string",
    "answer": "string",
    "reward": "float64",
    "advantage": "float64",
    "policy_version": "int64",
    "status": "string",
    "tokens": "int64",
    "turns": "int64",
}
FILE = re.compile(r"steps_(\d+)-(\d+)\.parquet")


def list_table_columns(rewards: Iterable[str]) -> dict[str, str]:
    """Return column name → Parquet type for a table with these reward components."""
    named = {f"reward_{name}": "float64" for name in rewards}
    before = {name: COLUMNS[name] for name in list(COLUMNS)[: list(COLUMNS).index("advantage")]}
    return before | named | COLUMNS


def make_completion_row(
    rollout: Rollout, step: int | None, advantage: float | None = None
) -> dict[str, Any]:
    """Make a table row from a rollout.

    prompt           the start of the episode; if it has several messages, each starts with a line
                     `role:`
    completion       everything after the prompt: the replies with their thinking, and the messages
                     of tools and environment between the replies
    reward           the trained reward, including the rewards of steps; null if the rollout cannot
                     be scored. A column `reward_NAME` holds each component in the same way
    advantage        mean over the rollout's trained tokens; null without a trained token
    policy_version   number of RL steps that had trained the weights of the first sampled token
    status           "terminated", or "truncated: " and the reason
    """
    versions = [version for reply in rollout.steps for _, version in reply.versions]
    first: Sequence[Message] = rollout.steps[0].prompt if rollout.steps else rollout.task.messages
    plain = {
        "step": step,
        "group": rollout.group,
        "sample": rollout.sample,
        "task_id": rollout.task.id,
        "prompt": _text(first),
        "completion": _text(rollout.conversation[len(first) :]),
        "answer": rollout.task.answer,
        "reward": rollout.total_reward,
        "advantage": advantage,
        "policy_version": versions[0] if versions else None,
        "status": (
            rollout.status if rollout.status == "terminated" else f"truncated: {rollout.truncation}"
        ),
        "tokens": rollout.response_length,
        "turns": len(rollout.steps),
    }
    return plain | {f"reward_{name}": value for name, value in rollout.rewards.items()}


def _text(messages: Sequence[Message]) -> str:
    """Join messages into one text. A single message gets no `role:` line."""
    said = [_message(message) for message in messages]
    if len(said) == 1:
        return said[0]
    return "\n\n".join(
        f"{message['role']}: {text}" for message, text in zip(messages, said, strict=True)
    )


def _message(message: Message) -> str:
    text = message.get("reasoning_content")
    thinking = f"<think>\n{text}\n</think>\n\n" if text else ""
    called = (call["function"] for call in message.get("tool_calls") or ())
    calls = "".join(
        f"\n→ {call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"
        for call in called
    )
    return f"{thinking}{message.get('content') or ''}{calls}"


def make_completions_table(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None
) -> pyarrow.Table:
    """Make a table from rows of `make_completion_row`. By default the table has every column found
    in any row. Characters that UTF-8 cannot encode are escaped."""
    import pyarrow as pa

    own = columns or list_table_columns(
        dict.fromkeys(key[7:] for row in rows for key in row if key.startswith("reward_"))
    )
    types = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
    data = {name: [row.get(name) for row in rows] for name in own}
    texts = [name for name, kind in own.items() if kind == "string"]
    data |= {
        name: [v and v.encode(errors="backslashreplace").decode() for v in data[name]]
        for name in texts
    }
    return pa.table(data, schema=pa.schema([(name, types[kind]) for name, kind in own.items()]))


def write_completions(
    folder: Path, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str] | None = None
) -> None:
    """Write the rows of consecutive steps as one file, completely or not at all. Raises:
    OSError."""
    if rows:
        _write(folder, make_completions_table(rows, columns))


def _write(folder: Path, table: pyarrow.Table) -> None:
    import pyarrow.compute
    import pyarrow.parquet

    first, last = pyarrow.compute.min_max(table["step"]).as_py().values()
    path = folder / f"steps_{first:06d}-{last:06d}.parquet"
    # readers of the folder skip hidden files, so they never see a half-written file of a killed run
    hidden = path.with_name(f".{path.name}")
    with open_atomically(hidden) as file:
        pyarrow.parquet.write_table(table, file, compression="zstd")
    os.replace(hidden, path)


def cut_completions(folder: Path, step: int) -> None:
    """Move each file with rows of RL steps after `step` to the folder NAME.discarded/. The resumed
    run then writes the rows of these steps again. No file already in NAME.discarded/ is
    overwritten.

    Raises: DataError if a file cannot be moved. This file then stays in place with its rows.
    """
    target = folder.with_name(f"{folder.name}.discarded")
    for path in sorted(folder.glob("steps_*.parquet")):
        found = FILE.fullmatch(path.name)
        if not found or int(found[2]) <= step:
            continue
        try:
            target.mkdir(exist_ok=True)
            if int(found[1]) <= step:
                # The file also holds rows up to the checkpoint: first write these rows to a new
                # file.
                _keep(path, step)
            if (target / path.name).exists():
                put_aside(target / path.name, ".earlier")
            os.replace(path, target / path.name)
        except OSError as error:
            why = (
                f"{target} cannot be written ({reason(error)}), so the rows replaced by the resumed"
                " run would be lost"
            )
            raise DataError(why) from None


def _keep(path: Path, step: int) -> None:
    """Write the rows of a file up to a step as a new file in the same folder."""
    import pyarrow.compute
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    _write(path.parent, table.filter(pyarrow.compute.less_equal(table["step"], step)))
