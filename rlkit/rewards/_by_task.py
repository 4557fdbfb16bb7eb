"""Score each rollout with the reward named by its row of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlkit.errors import ConfigError, suggest_name
from rlkit.rewards.calls import call_each
from rlkit.rewards.declarations import batched, reads_truths, truth_problems
from rlkit.rewards.terms import Term
from rlkit.types import Rollout, Task, bound, plain, safe


def _truth_problems(
    tasks: Sequence[Task], *, rewards: Mapping[str, Callable[..., Any]]
) -> list[str]:
    """Return one text per task: the reason why the task's own reward cannot read the task's truth.
    The text is "" if the reward can read it. A task with an unknown reward also gets "", because
    `by_task` refuses this task anyway."""
    problems = [""] * len(tasks)
    for name, places in _places(tasks).items():
        if name in rewards:
            found = truth_problems(rewards[name], [tasks[i] for i in places])
            for i, problem in zip(places, found, strict=True):
                problems[i] = problem
    return problems


def _places(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """Return reward name → the positions of the tasks scored by this reward."""
    places: dict[str, list[int]] = {}
    for i, task in enumerate(tasks):
        places.setdefault(task.reward, []).append(i)
    return places


@safe("rewards")
@reads_truths(_truth_problems)
@batched
def by_task(rollouts: Sequence[Rollout], *, rewards: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """Score each rollout with the reward named by its task. This lets each row of a mixture have
    its own reward.

    Args:
      rewards: reward functions by name. A function takes one rollout. If it is marked `@batched`,
        it takes the list of all rollouts of its tasks.
    Returns: for each rollout the value returned by its function, or the exception raised by it.
    Raises: ConfigError if a task names an unknown reward. The message has the row, this name and
      the known names.
    """
    for rollout in rollouts:
        if rollout.task.reward not in rewards:
            raise ConfigError(
                f"task {rollout.task.id!r} asks for the reward {rollout.task.reward!r}, but the"
                f" known rewards are: {', '.join(sorted(rewards)) or 'none'}."
                f"{suggest_name(rollout.task.reward, rewards)} Add it with"
                f" task.rewards=[{','.join([*rewards, rollout.task.reward])}], correct the row's"
                " reward, or set reward= to one option for all rows"
            )
    values: list[Any] = [None] * len(rollouts)
    for name, places in _places([rollout.task for rollout in rollouts]).items():
        found = call_each(Term(1.0, rewards[name]), [rollouts[i] for i in places])
        for i, value in zip(places, found, strict=True):
            values[i] = value
    return values


def list_named_rewards(fn: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    """Return the rewards of a configured `by_task` by name; empty for any other function."""
    return bound(fn).get("rewards", {}) if plain(fn) is by_task else {}
