"""Whether a reward can read the truths of rows, asked of every row before anything is trained or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rlkit.types import Task

F = TypeVar("F", bound=Callable[..., Any])


def reads_truth(problem: Callable[..., str]) -> Callable[[F], F]:
    """Mark a reward function as one that has to read `task.answer`.

    Args:
      problem: (task, and the keywords that a config binds to the function) → why the function cannot read the task's truth, as the end
        of a sentence that begins with the truth; "" where it can. It is asked once for every row, so it has to be quick.
    """
    return reads_truths(lambda tasks, **keywords: [problem(task, **keywords) for task in tasks])


def reads_truths(problems: Callable[..., list[str]]) -> Callable[[F], F]:
    """`reads_truth` for a function that asks about all rows at once: (tasks, keywords) → one problem for each task."""

    def mark(fn: F) -> F:
        fn.truth_problems = problems  # type: ignore[attr-defined]
        return fn

    return mark


def truth_problems(fn: Callable[..., Any], tasks: Sequence[Task]) -> list[str]:
    """Why a reward function cannot read the truth of each task; "" where it can, and for functions that are not marked."""
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial):
        keywords = {**fn.keywords, **keywords}
        fn = fn.func
    problems = getattr(fn, "truth_problems", None)
    return problems(tasks, **keywords) if problems and tasks else [""] * len(tasks)
