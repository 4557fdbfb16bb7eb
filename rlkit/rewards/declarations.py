"""Declarations of reward functions and aggregators, and the one place to read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from rlkit.system.copies import copy_value
from rlkit.system.shared_state import is_own
from rlkit.types import Task

F = TypeVar("F", bound=Callable[..., Any])
MARK = "__declared__"


class Declared(NamedTuple):
    """The declarations of one function.

    batched   it takes the list of all rollouts and returns a list of scores
    no_gold   its rows have no gold answer to try
    problems  (tasks) → for each task why the function cannot read its truth, "" if it can. None:
              the function reads no truth
    fields    keys of `task.metadata` to compare with
    """

    batched: bool = False
    no_gold: bool = False
    problems: Callable[..., list[str]] | None = None
    fields: tuple[str, ...] = ()


def read_declarations(fn: Callable[..., Any]) -> Declared:
    """Return the declarations of a function.

    A `functools.partial` has the declarations of its function, with its keywords bound to
    `problems`.
    """
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial) and not hasattr(fn, MARK):
        keywords = {**fn.keywords, **keywords}
        fn = fn.func
    own: Declared = getattr(fn, MARK, Declared())
    return own._replace(problems=own.problems and partial(own.problems, **keywords))


def _declare(fn: F, **what: Any) -> F:
    setattr(fn, MARK, read_declarations(fn)._replace(**what))
    return fn


def batched(fn: F) -> F:
    """Mark a reward function of the whole batch: (rollouts) → list of scores. The same as
    `batched: true`."""
    return _declare(fn, batched=True)


def no_gold(fn: F) -> F:
    """Mark a reward that cannot be tried on gold answers, because its rows have none. The
    environment, a model or the row's own package judges instead."""
    return _declare(fn, no_gold=True)


def reads_truth(problem: Callable[..., str]) -> Callable[[F], F]:
    """Mark a reward function as a reader of `task.answer`.

    Args:
      problem: (task, and the keywords that a config binds to the function) → why the function
        cannot read the task's truth, as the end of a sentence that begins with the truth; "" if it
        can. It is called for every row, so it has to be quick.
    """
    return reads_truths(lambda tasks, **keywords: [problem(task, **keywords) for task in tasks])


def reads_truths(problems: Callable[..., list[str]]) -> Callable[[F], F]:
    """Like `reads_truth`, for a function that gets all rows in one call: (tasks, keywords) → one
    problem per task."""
    return partial(_declare, problems=problems)


def reads_fields(*fields: str) -> Callable[[F], F]:
    """Mark a reward function that compares with these fields of `task.metadata`. They are never
    shown to a program that plays the task."""
    return partial(_declare, fields=fields)


def truth_problems(fn: Callable[..., Any], tasks: Sequence[Task]) -> list[str]:
    """Why a reward function cannot read the truth of each task; "" if it can, and for unmarked
    functions."""
    problems = read_declarations(fn).problems
    if problems is None or not tasks:
        return [""] * len(tasks)
    return problems(tasks if is_own(problems) else copy_value(list(tasks)))
