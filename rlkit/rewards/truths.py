"""Whether a reward can read the truth of a row, asked of every row before anything is trained or evaluated."""

from __future__ import annotations

from collections.abc import Callable
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

    def mark(fn: F) -> F:
        fn.truth_problem = problem  # type: ignore[attr-defined]
        return fn

    return mark


def truth_problem(fn: Callable[..., Any], task: Task) -> str:
    """Why a reward function cannot read a task's truth; "" where it can, and for functions that are not marked with `reads_truth`."""
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial):
        keywords = {**fn.keywords, **keywords}
        fn = fn.func
    problem = getattr(fn, "truth_problem", None)
    return problem(task, **keywords) if problem else ""
