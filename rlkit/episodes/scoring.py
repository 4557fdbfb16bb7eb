"""Score rollouts on all ranks. rlkit.rewards scores them in one process, and needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.distributed import ranks
from rlkit.rewards import Reward, read_declarations, score
from rlkit.types import Rollout


def score_spread(rollouts: Sequence[Rollout], reward: Reward) -> list[Rollout]:
    """Score rollouts as `score` does, but share the work between all ranks. Each rank gets all
    scored rollouts.

    If a function takes the whole batch, or if `max_error_rate` is above 0, the first rank scores
    all rollouts.
    """
    if (
        reward.max_error_rate > 0
        or read_declarations(reward.aggregator).batched
        or any(term.takes_all for term in reward.terms.values())
    ):
        return ranks.broadcast(lambda: score(rollouts, reward))
    return ranks.split_work(rollouts, lambda own, _: score(own, reward))
