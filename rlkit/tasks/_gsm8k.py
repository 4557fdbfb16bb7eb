"""Read GSM8K, a data set of grade-school word problems. Each solution ends in `#### N`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlkit.errors import DataError
from rlkit.tasks.source import read_split
from rlkit.tasks.splits import order_tasks
from rlkit.types import Task, ranges, reaches, safe


@reaches(path="path")
@safe("split", "environment")
@ranges(max_samples=(1, None))
def gsm8k(
    *,
    path: str = "openai/gsm8k",
    split: str,
    seed: int,
    validation: float = 0.05,
    held_out: float = 0.1,
    max_samples: int | None = None,
    environment: str = "tool_use",
) -> Sequence[Task]:
    """Read the problems of one split as tasks for the `numeric` reward.

    Args:
      path: a hub id, or a local file or folder. The rows need the fields `question` and `answer`
        (see `read_rows`).
      split: train, validation or test. GSM8K has no validation rows, so a share of train is used.
      seed: seed of the order. It does not change the split of a row.
      validation, held_out: shares of the questions for validation and test, if the source does not
        have these splits (see `read_split`).
      max_samples: number of problems to keep after the shuffle; None for all.
      environment: name of the environment, written into every task.
    Returns: tasks with the ids gsm8k/SPLIT/ROW. `answer` is the text after the last `####`, or the
      whole answer if it has no `####`. `metadata["solution"]` is the whole gold solution.
    Raises: DataError naming the row if it lacks a question or an answer; see also `read_rows`.
    Source: Cobbe et al. 2021, arXiv:2110.14168.
    """
    question = partial(_text, field="question")
    _, rows = read_split(
        path, split=split, content=question, validation=validation, held_out=held_out, name="main"
    )
    tasks = [_task(f"gsm8k/{split}/{i}", where, row, environment) for i, where, row in rows]
    return order_tasks(tasks, seed=seed, max_samples=max_samples, source=path)


def _task(id: str, where: str, row: dict[str, Any], environment: str) -> Task:
    question, solution = (_text(where, row, field) for field in ("question", "answer"))
    answer = solution.rpartition("####")[2].strip()
    if not answer:
        raise DataError(
            f"{where}: nothing follows the last #### of the answer; write the number there"
        )
    return Task(
        id=id,
        messages=({"role": "user", "content": question},),
        answer=answer,
        reward="numeric",
        environment=environment,
        metadata={"solution": solution},
    )


def _text(where: str, row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: the field {field!r} is missing or empty; task=gsm8k needs `question` and"
            " `answer` as text (for other fields use task=jsonl)"
        )
    return value
