"""Keep groups, to learn from them again in a later step (task.reuse). Each group is kept with the
versions of its sampling weights. The number and the age of kept groups are limited."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import pstdev
from typing import NamedTuple

from torch import Tensor

from rlkit.errors import DataError
from rlkit.training.ahead.flight import unpack_rollouts
from rlkit.training.experiment import Reuse
from rlkit.types import Rollout, Task

Group = tuple[Rollout, ...]


class Reused(NamedTuple):
    """Hold the rollouts to train on in a step, and the groups kept after the step."""

    trained: list[Rollout]
    kept: tuple[Group, ...]
    metrics: dict[str, float]


def with_reused(
    reuse: Reuse, kept: Sequence[Group], trained: Sequence[Rollout], *, step: int, seed: int
) -> Reused:
    """Replace groups whose rollouts all have the same reward by kept groups. Return the step's
    rollouts, and the groups to keep for later steps.

    Kept groups are chosen at random, with a probability in proportion to their score, `Σ|r - mean|
    · std` of the rewards. Each kept group is used at most once in a step, and replaces a group with
    the same number of rollouts. Its oldest token must have been sampled by weights at most
    `reuse.staleness` RL steps old. A kept group gets the number of the replaced group. The tokens
    of the kept group keep their log-probs and versions.

    Afterwards the `reuse.groups` groups with the highest scores are kept. Among equal scores,
    groups of this step come first.

    Args:
      trained: scored rollouts of the step, group by group.
      step: RL steps done before this one.
      seed: the seed of the run.
    Returns: rollouts, kept groups and three metrics. reuse/groups is the number of kept groups used
      in this step. reuse/staleness is the mean age of these groups in RL steps, or nan without any.
      reuse/kept is the number of groups kept after the step. If `reuse` is not active, the rollouts
      are returned unchanged.
    """
    if not reuse.active:
        return Reused(list(trained), (), {})
    groups: dict[int, list[Rollout]] = {}
    for rollout in trained:
        groups.setdefault(rollout.group, []).append(rollout)
    fresh = [tuple(own) for own in groups.values() if score_group(own) > 0]
    pool = [g for g in kept if compute_age(g, step) <= reuse.staleness]
    ages = list[int]()
    out = list[Rollout]()
    source = random.Random(f"task reuse/{seed}/{step}")
    free = list(pool)
    for number, own in groups.items():
        fitting = [g for g in free if len(g) == len(own)] if score_group(own) == 0 else []
        if fitting:
            chosen = source.choices(fitting, [score_group(g) for g in fitting])[0]
            free = [g for g in free if g is not chosen]
            ages.append(compute_age(chosen, step))
            own = [r._replace(group=number) for r in chosen]
        out += own
    later = [g for g in (*fresh, *pool) if compute_age(g, step + 1) <= reuse.staleness]
    best = tuple(sorted(later, key=score_group, reverse=True)[: reuse.groups])
    staleness = sum(ages) / len(ages) if ages else float("nan")
    return Reused(
        out,
        best,
        {"reuse/groups": len(ages), "reuse/staleness": staleness, "reuse/kept": len(best)},
    )


def score_group(group: Sequence[Rollout]) -> float:
    """Return the score of a group, `Σ|r - mean| · std` of its rewards r. The score is 0 if all
    rewards are equal, or if fewer than two rollouts have a reward."""
    rewards = [r.total_reward for r in group if r.total_reward is not None]
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return 0.0
    mean = sum(rewards) / len(rewards)
    return sum(abs(r - mean) for r in rewards) * pstdev(rewards)


def compute_age(group: Sequence[Rollout], step: int) -> int:
    """Return the age of a group in RL steps: `step` minus the oldest version of the weights that
    sampled one of the group's tokens. Replies without versions do not count."""
    return max(
        [0, *(step - version for r in group for reply in r.steps for _, version in reply.versions)]
    )


def unpack_kept(saved: Sequence[Tensor], tasks: Sequence[Task]) -> tuple[Group, ...]:
    """Restore the kept groups of a checkpoint. Each group is encoded by `pack_rollouts`. Raise
    DataError if the task of a group no longer exists."""
    rows = {(task.part, task.id): task for task in tasks} if saved else {}
    try:
        return tuple(
            tuple(r._replace(task=rows[r.task.part, r.task.id]) for r in unpack_rollouts(data))
            for data in saved
        )
    except KeyError as error:
        _, gone = error.args[0]
        raise DataError(
            f"task.reuse: a kept group belongs to the problem {gone!r}, no longer in the task's"
            " data; restore task.path and the data"
        ) from None
