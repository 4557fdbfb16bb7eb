"""Declare properties of reward functions and aggregators, and read the declarations."""

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
    """Hold the declarations of one function.

    batched   it takes the list of all rollouts and returns a list of scores
    no_gold   the function cannot be tried on gold answers, because its rows have none
    problems  function from tasks to one text per task: why the reward cannot read its truth, or ""
              if it can. None: the reward reads no truth
    fields    keys of `task.metadata` with which the function compares a reply
    """

    batched: bool = False
    no_gold: bool = False
    problems: Callable[..., list[str]] | None = None
    fields: tuple[str, ...] = ()


def read_declarations(fn: Callable[..., Any]) -> Declared:
    """Return the declarations of a function.

    A `functools.partial` has the declarations of its function. Its keywords are also passed to
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
    """Mark a reward function that takes the list of all rollouts and returns a list of scores. This
    has the same effect as `batched: true` in a config."""
    return _declare(fn, batched=True)


def no_gold(fn: F) -> F:
    """Mark a reward that cannot be tried on gold answers, because its rows have none. Instead of a
    gold answer, the environment, a model or the row's own package judges the reply."""
    return _declare(fn, no_gold=True)


def reads_truth(problem: Callable[..., str]) -> Callable[[F], F]:
    """Mark a reward function as a reader of `task.answer`.

    Args:
      problem: function that gets a task, and the keywords bound to the reward function by a config.
        It returns why the reward function cannot read the task's truth, or "" if it can. The text
        ends a sentence that begins with the truth. It is called for every row, so it has to be
        quick.
    """
    return reads_truths(lambda tasks, **keywords: [problem(task, **keywords) for task in tasks])


def reads_truths(problems: Callable[..., list[str]]) -> Callable[[F], F]:
    """Mark a reward function as `reads_truth` does, with a function `problems` for all rows at
    once. It gets the tasks and the keywords, and returns one text per task."""
    return partial(_declare, problems=problems)


def reads_fields(*fields: str) -> Callable[[F], F]:
    """Mark a reward function that compares replies with these fields of `task.metadata`. A program
    that plays the task never sees these fields."""
    return partial(_declare, fields=fields)


def truth_problems(fn: Callable[..., Any], tasks: Sequence[Task]) -> list[str]:
    """Explain for each task why a reward function cannot read its truth. The text is "" if it can,
    and for a function without this mark."""
    problems = read_declarations(fn).problems
    if problems is None or not tasks:
        return [""] * len(tasks)
    return problems(tasks if is_own(problems) else copy_value(list(tasks)))
