"""Read a user's own conversations to imitate, as tasks for algorithm=sft."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any

from rlkit.environments.prompts import with_system_prompt
from rlkit.environments.thinking import split_thinking
from rlkit.errors import DataError
from rlkit.tasks.source import read_message, read_split
from rlkit.tasks.splits import order_tasks
from rlkit.types import Message, Task, ranges, reaches, safe


@reaches(path="path", validation_path="path", test_path="path")
@safe("split", "field", "answer", "reward", "environment", "system_prompt")
@ranges(max_samples=(1, None))
def conversations(
    *,
    path: str,
    split: str,
    seed: int,
    field: str = "messages",
    answer: str | None = None,
    validation_path: str | None = None,
    test_path: str | None = None,
    validation: float = 0.0,
    held_out: float = 0.1,
    max_samples: int | None = None,
    reward: str = "environment",
    environment: str = "single_turn",
    system_prompt: str | None = None,
) -> Sequence[Task]:
    """Read conversations as tasks, one per row. The rows are in a .jsonl or .parquet file, a
    folder, or a hub data set.

    The messages before the first reply become the task's messages. The whole conversation becomes
    `metadata["messages"]`. If a reply has thinking between think tags in its content, it is moved
    to `reasoning_content`.

    Args:
      path, split, seed, validation_path, test_path, max_samples: as in `jsonl`.
      validation, held_out: as in `jsonl`. The prompt consists of all messages before the first
        reply.
      field: name of the field with a row's list of messages. A message has a role (system, user,
        assistant, tool) and content. An assistant's message may also have reasoning_content and
        tool_calls.
      answer: name of the field with the gold answer, if `reward` is to score rollouts of the rows.
        None: the rows have no gold answer.
      reward, environment: names of the reward and of the environment, for all rows. The prompt
        lists the environment's tools.
      system_prompt: put in front of every row's messages.
    Raises: DataError naming the row if it has no messages, an unknown role, or no reply to learn.
    """

    def first_prompt(where: str, row: Mapping[str, Any]) -> list[Message]:
        messages = _messages(where, row.get(field), field)
        return messages[: _first_reply(messages)]

    source, rows = read_split(
        path,
        split=split,
        content=first_prompt,
        validation=validation,
        held_out=held_out,
        validation_path=validation_path,
        test_path=test_path,
    )
    tasks = []
    for i, where, row in rows:
        messages = with_system_prompt(_messages(where, row.get(field), field), system_prompt)
        first = _first_reply(messages)
        said = None if answer is None else row.get(answer)
        gold = str(said) if isinstance(said, str | Number) else ""
        if answer is not None and (isinstance(said, bool) or not gold.strip()):
            raise DataError(
                f"{where}: the field {answer!r} (task.answer) is missing, empty or neither text nor"
                " a number; correct the row, or set task.answer=null"
            )
        name = f"{Path(source).stem}/{split}/{i}"
        tasks.append(
            Task(
                name,
                tuple(messages[:first]),
                gold,
                reward,
                environment,
                {"messages": list(messages)},
            )
        )
    return order_tasks(tasks, seed=seed, max_samples=max_samples, source=source)


def _first_reply(messages: Sequence[Message]) -> int:
    return next(i for i, m in enumerate(messages) if m["role"] == "assistant")


def _messages(where: str, messages: Any, field: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: {field!r} (task.field) must be a list of messages")
    out: list[Message] = []
    for message in messages:
        kept = read_message(where, message, field, empty=True)
        if kept["role"] == "assistant" and not kept.get("reasoning_content"):
            thinking, content, _ = split_thinking(kept["content"])
            kept |= {"content": content} | ({"reasoning_content": thinking} if thinking else {})
        out.append(kept)
    roles = [m["role"] for m in out]
    if (
        "assistant" not in roles
        or roles.index("assistant") == 0
        or (roles[0] == "system" and roles.index("assistant") == 1)
    ):
        raise DataError(
            f"{where}: {field!r} has no reply to learn; a user's message and then an assistant's"
            " are needed"
        )
    if any(a == b == "assistant" for a, b in itertools.pairwise(roles)):
        raise DataError(
            f"{where}: two assistant messages of {field!r} follow one another; join them, or add"
            " the message between them"
        )
    return out
