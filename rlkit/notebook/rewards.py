"""Rewards by the names of the notebooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlkit.rewards import Reward, Term, exact_match, format_match, length, score, tool_usage, weighted_sum
from rlkit.types import Rollout


def compute_scalar_reward(rollout: Rollout, reward_fn: Callable[..., Any]) -> float | None:
    """What a reward function gives a rollout; None: it cannot be scored, which is not 0. Raises RewardError where it fails."""
    return compute_vector_reward(rollout, {"reward": reward_fn})["reward"]


def compute_vector_reward(rollout: Rollout, reward_fns: Mapping[str, Callable[..., Any]]) -> dict[str, float | None]:
    """One number a component, of name → (rollout) → number or None, also async or `@batched`. Aggregate them before training.

    Raises: RewardError naming the component that raises or returns no reward.
    """
    terms = {name: Term(1.0, fn) for name, fn in reward_fns.items()}
    return dict(score([rollout], Reward("vector", terms))[0].rewards)


def aggregate_vector_rewards(
    rewards: Mapping[str, float | None],
    weights: Mapping[str, float] | None = None,
    aggregator: Callable[[Mapping[str, float], Mapping[str, float]], float] = weighted_sum,
) -> float | None:
    """The components as one number: the only one that reaches a token.

    Args:
      weights: name → factor; None: 1 each. One that is missing is 0, so the component is only logged.
      aggregator: weighted_sum, smallest, largest, mean, product, or (scores, weights) → float.
    Returns: None where a component of non-zero weight is None.

    >>> aggregate_vector_rewards({"correctness": 1.0, "safety": 0.5}, {"correctness": 0.5, "safety": 0.5})
    0.75
    """
    factors = {name: weight for name in rewards if (weight := 1.0 if weights is None else weights.get(name, 0.0))}
    scores = {name: value for name in factors if (value := rewards[name]) is not None}
    return aggregator(scores, factors) if len(scores) == len(factors) > 0 else None


def length_penalty(rollout: Rollout, min_words: int = 50, max_words: int = 500) -> float:
    """-0.5 for a final reply of fewer words, -0.3 for one of more, else 0; thinking is not counted. `length` has the other numbers."""
    return length(rollout, low=min_words, high=max_words)


def format_reward(pattern: str) -> Callable[[Rollout], float | None]:
    """A reward: 1 where the final reply holds the regular expression, else 0. Raises ConfigError, on use, for one that is none."""
    return partial(format_match, pattern=pattern)


def exact_match_reward(
    ground_truth_fn: Callable[[Rollout], str], parse_fn: Callable[[str], Any] = str.strip
) -> Callable[[Rollout], float | None]:
    """A reward: 1 where the final reply equals (rollout) → truth, both after parse_fn, else 0; None where either is empty."""

    def reward(rollout: Rollout) -> float | None:
        return exact_match(rollout._replace(task=rollout.task._replace(answer=ground_truth_fn(rollout))), parse=parse_fn)

    return reward


def tool_usage_reward(min_tools: int = 1) -> Callable[[Rollout], float]:
    """A reward: 1 where at least `min_tools` tool calls worked, else 0. Failed calls are no use."""
    return partial(tool_usage, low=min_tools, high=None)


def tool_band_reward(low: int = 1, high: int = 3) -> Callable[[Rollout], float]:
    """A reward: 0 for fewer tool calls that worked, 1 for low … high, 0.5 for more."""
    return partial(tool_usage, low=low, high=high)
