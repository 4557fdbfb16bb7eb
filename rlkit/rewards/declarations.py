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

    batched   the function takes the list of all rollouts and returns a list of scores
    no_gold   the function cannot be tried on gold answers, because its rows have none
    problems  function from tasks to one text per task: the reason why the reward cannot read the
              task's truth (its true answer), or "" if it can. None: the reward reads no truth
    fields    keys of `task.metadata` with which the function compares a reply
    """

    batched: bool = False
    no_gold: bool = False
    problems: Callable[..., list[str]] | None = None
    fields: tuple[str, ...] = ()


def read_declarations(fn: Callable[..., Any]) -> Declared:
    """Return the declarations of a function.

    A `functools.partial` has the declarations of its function. Keywords bound by the partial are
    also bound in the declared function `problems`, so both functions see the same settings.
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
    """Mark a reward that cannot be tried on gold answers, because the rows of its task have no gold
    answers. Instead, the reply is judged by the environment, by a model, or by the Python package
    from which the row was loaded."""
    return _declare(fn, no_gold=True)


def reads_truth(problem: Callable[..., str]) -> Callable[[F], F]:
    """Mark a reward function as a reader of `task.answer`.

    Args:
      problem: function of a task, and of the keywords that a config binds to the reward function.
        It returns the reason why the reward function cannot read the task's truth, or "" if there
        is no reason. The reason is the end of a sentence that begins with the truth. The function
        is called for every row, so it has to be quick.
    """
    return reads_truths(lambda tasks, **keywords: [problem(task, **keywords) for task in tasks])


def reads_truths(problems: Callable[..., list[str]]) -> Callable[[F], F]:
    """Mark a reward function as a reader of `task.answer`, like `reads_truth`. The difference is
    that one call of `problems` checks all tasks.

    Args:
      problems: function of the list of all tasks, and of the keywords that a config binds to the
        reward function. It returns one text per task. The text is the reason why the reward
        function cannot read the task's truth, or "" if there is no reason.
    """
    return partial(_declare, problems=problems)


def reads_fields(*fields: str) -> Callable[[F], F]:
    """Mark a reward function that compares replies with these fields of `task.metadata`. A program
    that plays the task never sees these fields."""
    return partial(_declare, fields=fields)


def truth_problems(fn: Callable[..., Any], tasks: Sequence[Task]) -> list[str]:
    """Return one text per task: the reason why a reward function cannot read the task's truth. The
    text is "" if the function can read it, or if the function is not marked by `reads_truth` or
    `reads_truths`."""
    problems = read_declarations(fn).problems
    if problems is None or not tasks:
        return [""] * len(tasks)
    return problems(tasks if is_own(problems) else copy_value(list(tasks)))
