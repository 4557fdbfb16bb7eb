"""Evaluate a policy on held-out tasks, with the environments and verifiers of training but other
sampling settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from rlkit.distributed import ranks
from rlkit.environments import Setting
from rlkit.episodes._collect import collect
from rlkit.episodes.scoring import score_spread
from rlkit.episodes.summary import count_failures, group_by_part, measure_reward_functions
from rlkit.errors import ConfigError
from rlkit.rewards import Reward, score
from rlkit.statistics import count_independent, mean_interval, pass_at_k, share_interval
from rlkit.tasks.splits import identify_problem
from rlkit.types import Policy, Rollout, Task

# smallest score of a right answer, unless the task's metadata sets another score as `correct_from`
CORRECT = 1.0


def is_correct(rollout: Rollout) -> bool:
    """Return whether a rollout counts as right: whether its total reward, including the rewards of
    the steps, is at least a threshold. The threshold is `correct_from` in the task's metadata, or
    CORRECT without this entry."""
    least = rollout.task.metadata.get("correct_from")
    total = rollout.total_reward
    return total is not None and total >= (CORRECT if least is None else least)


def greedy_accuracy(
    policy: Policy,
    tasks: Sequence[Task],
    environment: Setting,
    *,
    reward: Reward,
    temperature: float = 0.0,
    **collecting: Any,
) -> tuple[dict[str, Any], list[Rollout]]:
    """Play one episode per task and measure the accuracy. Decoding is greedy unless a temperature
    is given. All ranks share the work, and every rank returns the whole result.

    Args:
      reward: the verifier. `is_correct` decides whether a score is right.
      temperature: sampling temperature, ≥ 0; 0 is greedy. An untrained policy may produce nothing
        but repetition with greedy decoding.
      collecting: engine, version and max_new_tokens, passed to `collect`.
    Returns: the result of `summarise_accuracy`, and the rollouts. For a mixture, `parts` in the
      result holds the same figures for each part of the mixture.
    """

    if not tasks:
        raise ConfigError("an accuracy needs at least one task, and there is none")

    def play(own: Sequence[Task], begin: int) -> list[Rollout]:
        return collect(policy, own, environment, temperature=temperature, first=begin, **collecting)

    played = ranks.split_work(tasks, play)
    count_failures(played)
    rollouts = score_spread(played, reward)
    return _with_parts(rollouts, partial(summarise_accuracy, temperature=temperature)), rollouts


def sampled_accuracy(
    policy: Policy,
    tasks: Sequence[Task],
    environment: Setting,
    *,
    reward: Reward,
    samples: int,
    k: Sequence[int],
    temperature: float,
    **collecting: Any,
) -> tuple[dict[str, Any], list[Rollout]]:
    """Sample several episodes per task and measure avg@samples, pass@k and the mean reward.

    Returns: the result of `summarise_curves` with 95 % intervals over problems, and the rollouts.
      For a mixture, `parts` in the result holds the same figures for each part of the mixture.
    Raises: ValueError if a k is larger than `samples`.
    """
    if max(k) > samples:
        raise ValueError(
            f"evaluation.k: pass@{max(k)} needs at least {max(k)} samples per task;"
            f" evaluation.samples is {samples}"
        )
    played = collect(
        policy, tasks, environment, group_size=samples, temperature=temperature, **collecting
    )
    count_failures(played)
    rollouts = score(played, reward)
    return _with_parts(rollouts, partial(summarise_curves, samples=samples, k=k)), rollouts


def _with_parts(
    rollouts: Sequence[Rollout], measure: Callable[[Sequence[Rollout]], dict[str, Any]]
) -> dict[str, Any]:
    """Apply `measure` to all rollouts together. For a mixture, also apply it to the rollouts of
    each part, and put these results under the key `parts`."""
    parts = {part: measure(own) for part, own in group_by_part(rollouts).items()}
    return measure(rollouts) | ({"parts": parts} if parts else {})


def summarise_accuracy(rollouts: Sequence[Rollout], *, temperature: float = 0.0) -> dict[str, Any]:
    """Compute the share of right rollouts and the mean reward of scored rollouts, with 95 %
    intervals over distinct problems.

    `truncated` is the share of truncated rollouts. A row that repeats a problem is no new evidence.
    Therefore the intervals count distinct problems (`distinct`), but the means count rows (`n`). If
    the reward has several terms, `metrics` holds the mean of each term. It also holds the means of
    the metrics returned by the reward's functions.
    """
    right = sum(map(is_correct, rollouts))
    problems = _group_by_problem(rollouts)
    sizes = [len(own) for own in problems]
    mean, low, high = _mean_interval(problems)
    result = {"accuracy": right / len(rollouts), "interval": list(_share_interval(right, sizes))}
    cut = sum(bool(r.truncation) for r in rollouts)
    result |= {"n": len(rollouts), "distinct": len(sizes), "truncated": cut / len(rollouts)}
    result |= {"reward": mean, "reward_interval": [low, high], "temperature": temperature}
    columns = {
        name: [value for r in rollouts if (value := r.rewards[name]) is not None]
        for name in rollouts[0].rewards
    }
    terms = {
        f"reward/{name}/mean": fmean(own)
        for name, own in columns.items()
        if own and len(columns) > 1
    }
    own = terms | measure_reward_functions(rollouts)
    return result | ({"metrics": own} if own else {})


def summarise_curves(
    rollouts: Sequence[Rollout], *, samples: int, k: Sequence[int]
) -> dict[str, Any]:
    """Compute avg@samples, every pass@k and the mean reward. The samples of a task must be
    consecutive in `rollouts`."""
    tasks = [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]
    # problem → number of right samples of each task with this problem
    rows: dict[str, list[int]] = {}
    for own in tasks:
        rows.setdefault(identify_problem(own[0].task), []).append(sum(map(is_correct, own)))
    weights = [len(right) for right in rows.values()]
    estimates = {f"avg@{samples}": partial(pass_at_k, samples, k=1)} | {
        f"pass@{j}": partial(pass_at_k, samples, k=j) for j in k
    }
    out = {}
    for name, estimate in estimates.items():
        mean, low, high = mean_interval(
            [fmean(estimate(c) for c in right) for right in rows.values()], weights
        )
        out[name] = {"value": mean, "interval": [low, high]}
    mean, low, high = _mean_interval(_group_by_problem(rollouts))
    return out | {"reward": {"value": mean, "interval": [low, high]}}


def _group_by_problem(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Group the rollouts by distinct problem."""
    out: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        out.setdefault(identify_problem(rollout.task), []).append(rollout)
    return list(out.values())


def _mean_interval(problems: Sequence[Sequence[Rollout]]) -> tuple[float, float, float]:
    """Return the mean total reward of the scored rollouts, and the lower and upper end of its 95 %
    confidence interval. All three numbers are nan if no rollout is scored.

    The interval counts problems, not rollouts: a problem's mean reward is one observation
    (`mean_interval`). If all rewards are 0 or 1, the interval is Wilson's interval, as for the
    accuracy.
    """
    totals = [[total for r in own if (total := r.total_reward) is not None] for own in problems]
    known = [own for own in totals if own]
    weights = [len(own) for own in known]
    if not known:
        return math.nan, math.nan, math.nan
    if all(total in (0.0, 1.0) for own in known for total in own):
        right = sum(total for own in known for total in own)
        return right / sum(weights), *_share_interval(right, weights)
    return mean_interval(list(map(fmean, known)), weights)


def _share_interval(right: float, sizes: Sequence[int]) -> tuple[float, float]:
    """Return the 95 % interval of the share of right rows. `sizes` holds the number of rows of each
    distinct problem."""
    trials = count_independent(sizes)
    return share_interval(min(trials, right * trials / sum(sizes)), trials)
