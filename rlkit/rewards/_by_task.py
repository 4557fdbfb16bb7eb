"""The reward that each row of the data names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlkit.errors import ConfigError
from rlkit.rewards.calls import call_each
from rlkit.rewards.declarations import batched, reads_truths, truth_problems
from rlkit.rewards.terms import Term
from rlkit.types import Rollout, Task, bound, plain, safe


def _truth_problems(
    tasks: Sequence[Task], *, rewards: Mapping[str, Callable[..., Any]]
) -> list[str]:
    """What the reward says that each row names; an unknown name is refused when it is asked for."""
    problems: dict[int, str] = {}
    for name in dict.fromkeys(task.reward for task in tasks):
        places = [i for i, task in enumerate(tasks) if task.reward == name and name in rewards]
        problems |= (
            dict(
                zip(places, truth_problems(rewards[name], [tasks[i] for i in places]), strict=True)
            )
            if places
            else {}
        )
    return [problems.get(i, "") for i in range(len(tasks))]


@safe("rewards")
@reads_truths(_truth_problems)
@batched
def by_task(rollouts: Sequence[Rollout], *, rewards: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """Score rollouts with the rewards that their tasks name, so that a mixture scores each row its
    own way.

    Args:
      rewards: name → function of one rollout, or of the list of them where it is marked `@batched`;
        such a one sees all rollouts whose tasks name it.
    Returns: for each rollout what that function returns, or the exception that it raises.
    Raises: ConfigError naming the row, the name it asks for and the known names.
    """
    for rollout in rollouts:
        if rollout.task.reward not in rewards:
            raise ConfigError(
                f"task {rollout.task.id!r} asks for the reward {rollout.task.reward!r}; known are"
                f" {', '.join(sorted(rewards)) or 'none'}. Add it with"
                f" task.rewards=[{','.join([*rewards, rollout.task.reward])}], correct the row's"
                " reward, or set reward= to one option for all rows"
            )
    values: list[Any] = [None] * len(rollouts)
    for name in dict.fromkeys(rollout.task.reward for rollout in rollouts):
        places = [i for i, rollout in enumerate(rollouts) if rollout.task.reward == name]
        for i, value in zip(
            places, call_each(Term(1.0, rewards[name]), [rollouts[i] for i in places]), strict=True
        ):
            values[i] = value
    return values


def named_rewards(fn: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
    """Return the rewards by name of a configured `by_task`; none of any other function."""
    return bound(fn).get("rewards", {}) if plain(fn) is by_task else {}
