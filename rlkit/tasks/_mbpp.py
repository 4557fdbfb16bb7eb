"""Read MBPP, a data set of small Python problems. Each problem has a reference solution and
tests."""

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

    The prompt shows the first test, because it names the function. Only the other tests count for
    the score, so a program for this one case does not pass.

    Args:
      path: a hub id, or a local file or folder. The rows need the fields `text` (or `prompt`),
        `code` and `test_list` (see `read_rows`).
      split: train, validation or test; the data set has all three.
      seed: seed of the order. It does not change the split of a row.
      validation, held_out: shares of the texts for validation and test, if the source does not have
        these splits (see `read_split`).
      max_samples: number of problems to keep after the shuffle; None for all.
      exclude: values of `task_id` to leave out.
      environment: name of the environment, written into every task.
    Returns: tasks with the ids mbpp/SPLIT/TASK_ID. `answer` is the reference solution in a code
      block. `metadata` has `tests` (hidden), `shown` and `setup`. The sandbox must be able to check
      at least two tests of a row. A row with fewer tests is left out, and a warning in the log
      names it.
    Raises: DataError naming the row if it lacks a field, or if no row is left; see also
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
    setup = row.get("test_setup_code") or "\n".join(map(str, row.get("test_imports") or ()))
    if not (
        isinstance(text, str)
        and isinstance(code, str)
        and isinstance(setup, str)
        and isinstance(tests, list)
    ):
        raise DataError(
            f"{where}: task=mbpp needs `text` (or `prompt`), `code` and `test_setup_code` as text,"
            " and `test_list` as a list; correct the row"
        )
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
    """Replace Windows line ends by Unix line ends. Other line separators are kept, because they may
    be part of a string."""
    return text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def _is_checkable(test: Any, setup: str) -> bool:
    try:
        split_test(str(test), setup)
    except Unsplittable:
        return False
    return True
