"""Collect the data of an RL step: take the next prompts of the prompt stream, sample episodes from
the policy, and score them. Refills take further prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlkit.algorithm import asks_for, call_part
from rlkit.distributed import ranks
from rlkit.episodes import assemble, collect, count_failures
from rlkit.episodes.samplers import with_outcomes
from rlkit.episodes.scoring import score_spread
from rlkit.episodes.stream import StreamState, take
from rlkit.functional import mix
from rlkit.system import rng
from rlkit.system.copies import copy_value
from rlkit.training.experiment import Experiment
from rlkit.training.metrics import Clock
from rlkit.training.update.micro_batches import name_remedy
from rlkit.types import Policy, Rollout, Task


def experience(
    x: Experiment,
    policy: Policy,
    tasks: Sequence[Task],
    stream: StreamState,
    *,
    step: int,
    version: int | None = None,
    clock: Clock | None = None,
) -> tuple[list[Rollout], list[Rollout], StreamState]:
    """Sample and score the episodes of a step. Return all episodes, the rollouts to train on, and
    the state of the prompt stream after them.

    With `max_refills`, only groups accepted by the group filter are trained on. If fewer than
    batch.prompts groups are accepted, further prompts are played, at most `max_refills` times
    (dynamic sampling, DAPO, Yu et al. 2025, section 3.2). If the filter accepts no group, all
    episodes are returned as rollouts to train on, and the filter later removes their tokens from
    the loss.

    If the advantage asks for `greedy_rewards`, each task is also played once greedily. Only the
    reward of this greedy rollout is kept, as `greedy_reward` of the task's other rollouts.

    Args:
      x: the experiment of this step (`Learner.begin`).
      tasks: the training tasks of the whole run.
      stream: the state of the prompt stream before this step.
      step: RL steps done before this one.
      version: how many RL steps had trained the sampling weights; None: `step`.
      clock: receives the seconds of each part of the work.
    """
    place: Any = {"step": step, "version": version, "clock": clock or Clock()}
    sampled: list[Rollout] = []
    accepted: list[Rollout] = []
    for _ in range(1 + x.algorithm.max_refills):
        missing = x.batch.prompts - len(accepted) // x.batch.group_size
        if not missing:
            break
        drawn, stream = take(tasks, stream, missing, seed=x.seed, sampler=x.sampler)
        # a callback may change a rollout's task, but not the run's own task
        drawn = copy_value(drawn)
        first = len(sampled) // x.batch.group_size
        rollouts = score_fresh(x, policy, drawn, first=first, **place)
        if asks_for(x.algorithm.advantage, "greedy_rewards"):
            greedy = x._replace(
                batch=x.batch._replace(group_size=1),
                generation=x.generation._replace(temperature=0.0),
            )
            own = score_fresh(greedy, policy, drawn, first=first, **place)
            rewards = {r.group: r.total_reward for r in own}
            rollouts = [
                r._replace(greedy_reward=rewards[r.group], greedy_played=True) for r in rollouts
            ]
        sampled += rollouts
        with rng.seed_block(mix(x.seed, step, len(sampled))):
            accepted += accept(x, policy, rollouts) if x.algorithm.max_refills else rollouts
    if stream.sampler is not None:
        stream = stream._replace(sampler=with_outcomes(x.sampler, stream.sampler, sampled))
    return sampled, accepted or sampled, stream


def score_fresh(
    x: Experiment,
    policy: Policy,
    tasks: Sequence[Task],
    *,
    step: int,
    version: int | None,
    first: int,
    clock: Clock,
) -> list[Rollout]:
    """Sample episodes from the current policy, and score them. Every rank plays a share of the
    tasks, and then receives the episodes of all tasks.

    Args:
      first: number of tasks already played in this step; the first of `tasks` has this position.
    """

    def own(tasks: Sequence[Task], begin: int) -> list[Rollout]:
        return (x.algorithm.episodes or collect)(
            policy,
            tasks,
            engine=x.generation.engine,
            environment=x.environment,
            group_size=x.batch.group_size,
            seed=x.seed,
            step=step,
            first=first + begin,
            version=step if version is None else version,
            spent=clock.sessions.append,
            **x.generation.params,
        )

    with (
        clock.measure_sampling(x.generation.engine),
        name_remedy("generation", "lower generation.engine.max_cached_tokens or batch.prompts"),
        ranks.gather_weights(policy.model),
    ):
        rollouts = ranks.split_work(tasks, own)
    count_failures(rollouts)
    if x.algorithm.episodes is not None:
        return rollouts
    with clock.part("reward"), rng.seed_block(mix(x.seed, step, first, 1 + ranks.rank())):
        return score_spread(rollouts, x.reward)


def accept(x: Experiment, policy: Policy, rollouts: list[Rollout]) -> list[Rollout]:
    """Return all rollouts of the accepted groups. A group is accepted if the group filter keeps at
    least one of its rollouts."""
    if not any(rollout.steps for rollout in rollouts):
        return []
    given = assemble(rollouts, pad_token_id=policy.pad_token_id).quantities
    chosen, _ = call_part("group_filter", x.algorithm.group_filter, given)
    kept = {r.group for r, keep in zip(rollouts, chosen.tolist(), strict=True) if keep}
    return [r for r in rollouts if r.group in kept]
