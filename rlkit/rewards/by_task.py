"""The reward that each row of the data names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlkit.errors import ConfigError, Refusal
from rlkit.rewards.aggregators import batched
from rlkit.rewards.score import is_batched
from rlkit.types import Rollout


@batched
def by_task(rollouts: Sequence[Rollout], *, rewards: Mapping[str, Callable[..., Any]]) -> list[Any]:
    """Score rollouts with the rewards that their tasks name, so that a mixture scores each row its own way.

    Args:
      rewards: name → function of one rollout, or of the list of them where it is marked `@batched`; such a one sees all rollouts
        whose tasks name it.
    Returns: for each rollout what its function returns, or the exception that it raises, which `score` takes for that rollout's.
    Raises: ConfigError naming the row, the name it asks for and the known names; a Refusal of a function passes.
    """
    for rollout in rollouts:
        if rollout.task.reward not in rewards:
            raise ConfigError(
                f"task {rollout.task.id!r} asks for the reward {rollout.task.reward!r}; known are {', '.join(sorted(rewards)) or 'none'}. "
                "Correct the row's reward, or set reward= to one option for all rows"
            )
    scores: list[Any] = [None] * len(rollouts)
    for name in dict.fromkeys(rollout.task.reward for rollout in rollouts):
        places = [i for i, rollout in enumerate(rollouts) if rollout.task.reward == name]
        for i, value in zip(places, _values(name, rewards[name], [rollouts[i] for i in places]), strict=True):
            scores[i] = value
    return scores


def _values(name: str, function: Callable[..., Any], rollouts: Sequence[Rollout]) -> list[Any]:
    if not is_batched(function):
        return [_tried(function, rollout) for rollout in rollouts]
    values = _tried(function, list(rollouts))
    if isinstance(values, Exception):
        return [values] * len(rollouts)
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(rollouts):
        return [TypeError(f"the reward {name!r} is batched and must return a list, one score a rollout")] * len(rollouts)
    return list(values)


def _tried(function: Callable[..., Any], argument: Any) -> Any:
    """What a function returns, or the exception that it raises."""
    try:
        return function(argument)
    except Refusal:
        raise
    except Exception as error:
        return error
