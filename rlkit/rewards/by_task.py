"""The reward that each row of the data names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlkit.errors import ConfigError
from rlkit.rewards.score import is_batched
from rlkit.types import Rollout


def by_task(rollout: Rollout, *, rewards: Mapping[str, Callable[[Rollout], float | None]]) -> float | None:
    """Score a rollout with the reward that its task names, so that a mixture scores each row its own way.

    Args:
      rewards: name → function of one rollout.
    Returns: what that function returns.
    Raises: ConfigError naming the row, the name it asks for and the known names; also for a function that is marked
      `@batched`, which needs all rollouts at once.
    """
    name = rollout.task.reward
    if name not in rewards:
        raise ConfigError(
            f"task {rollout.task.id!r} asks for the reward {name!r}; known are {', '.join(sorted(rewards)) or 'none'}. "
            "Correct the row's reward, or set reward= to one option for all rows"
        )
    if is_batched(rewards[name]):
        raise ConfigError(f"the reward {name!r} scores whole batches; make it a term of its own in reward.terms")
    return rewards[name](rollout)
