"""MBPP: small Python problems, each with a reference solution and tests."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rlkit.errors import DataError
from rlkit.sandbox import Unsplittable
from rlkit.sandbox import split as split_test
from rlkit.tasks.source import Row, read_split
from rlkit.tasks.splits import order_tasks
from rlkit.types import Task, ranges, reaches, safe

INSTRUCTION = (
    "Answer with one Python program in a ```python block. It must pass tests like this one:"
)


@reaches(path="path")
@safe("split", "exclude", "environment")
@ranges(max_samples=(1, None))
def mbpp(
    *,
    path: str = "google-research-datasets/mbpp",
    split: str,
    seed: int,
    validation: float = 0.1,
    held_out: float = 0.1,
    max_samples: int | None = None,
    exclude: Sequence[int] = (123, 414),
    environment: str = "single_turn",
) -> Sequence[Task]:
    """Read the problems of one split as tasks for the `code_exec` reward.

    The prompt shows the first test, because it names the function. Only the other tests score, so a
    program written for one case does not pass.

    Args:
      path: a hub id, or a local file or folder of rows with `text` (or `prompt`), `code` and
        `test_list` (see `read_rows`).
      split: train, validation or test; the data set has all three.
      seed: of the order. It moves no row from one split to another.
      validation, held_out: shares of the texts, for splits missing from the source (see
        `read_split`).
      max_samples: number of problems after the shuffle; None for all.
      exclude: task_ids to leave out.
      environment: its name in every task.
    Returns: tasks called mbpp/SPLIT/TASK_ID. `answer` is the reference solution in a block;
      `metadata` has `tests` (hidden), `shown` and `setup`. The sandbox must be able to check at
      least two tests of a row. Other rows are left out, and a warning in the log names them.
    Raises: DataError that names the row without a field, or if no row is left; see also
      `read_rows`.
    Source: Austin et al. 2021, arXiv:2108.07732.
    """
    name = "full" if path == "google-research-datasets/mbpp" else None
    _, rows = read_split(
        path, split=split, content=_problem, validation=validation, held_out=held_out, name=name
    )
    tasks: list[Task] = []
    dropped: list[Task] = []
    for i, where, row in rows:
        if row.get("task_id") in exclude:
            continue
        task = _task(f"mbpp/{split}/{row.get('task_id', i)}", where, row, environment)
        (tasks if len(task.metadata["tests"]) > 0 else dropped).append(task)
    if dropped:
        names = ", ".join(task.id for task in dropped[:20])
        logging.getLogger(__name__).warning(
            "%d of %d rows have no tests that can be checked: %s", len(dropped), len(rows), names
        )
    return order_tasks(tasks, seed=seed, max_samples=max_samples, source=path)


def _problem(_: str, row: Row) -> Any:
    return row.get("text") or row.get("prompt")


def _task(id: str, where: str, row: Row, environment: str) -> Task:
    text = _problem(where, row)
    code = row.get("code")
    tests = row.get("test_list")
    if not isinstance(text, str) or not isinstance(code, str) or not isinstance(tests, list):
        raise DataError(
            f"{where}: task=mbpp needs `text` (or `prompt`) and `code` as text, and `test_list` as"
            " a list; correct the row"
        )
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    shown, *hidden = [test for test in tests if _is_checkable(test, setup)] or [""]
    return Task(
        id=id,
        messages=({"role": "user", "content": f"{text.strip()}\n\n{INSTRUCTION}\n\n{shown}"},),
        answer=f"```python\n{_lines(code)}\n```",
        reward="code_exec",
        environment=environment,
        metadata={"tests": tuple(hidden), "shown": shown, "setup": _lines(setup)},
    )


def _lines(text: str) -> str:
    """Replace the rows' Windows line ends by Unix ones. Other separators may stand in strings and
    stay."""
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def _is_checkable(test: Any, setup: str) -> bool:
    try:
        split_test(str(test), setup)
    except Unsplittable:
        return False
    return True
