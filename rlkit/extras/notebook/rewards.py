"""Provide the rewards of the notebook of primitives: functions of a rollout in the document's form,
and functions of several rewards as a vector."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlkit.extras.notebook.data import Rollout

RewardFn = Callable[[Rollout], Any]


def compute_scalar_reward(rollout: Rollout, reward_fn: RewardFn) -> Any:
    """Score a rollout with a reward function. None means "cannot be scored", and differs from 0."""
    return reward_fn(rollout)


def compute_vector_reward(rollout: Rollout, reward_fns: Sequence[RewardFn]) -> np.ndarray:
    """Return one number per reward function; nan if the function cannot score the rollout."""
    return np.array([reward_fn(rollout) for reward_fn in reward_fns], dtype=float)


def aggregate_vector_rewards(
    vector_rewards: np.ndarray, aggregator: Callable[[np.ndarray], float]
) -> float:
    """Turn a vector of components into one number with the aggregator."""
    return aggregator(vector_rewards)


def length_penalty_reward(min_length: int = 50, max_length: int = 500) -> RewardFn:
    """Return a reward function: -0.5 for a reply with fewer than min_length words, -0.3 for more
    than max_length words, else 0."""

    def reward_fn(rollout: Rollout) -> float:
        length = len(rollout.generation.text.split())
        if length < min_length:
            return -0.5
        return -0.3 if length > max_length else 0.0

    return reward_fn


def format_reward(pattern: str) -> RewardFn:
    """Return a reward function: 1 if the regular expression matches in the reply, else 0."""
    return lambda rollout: float(re.search(pattern, rollout.generation.text) is not None)


def exact_match_reward(
    ground_truth_fn: Callable[[str], Any], parse_fn: Callable[[str], Any]
) -> RewardFn:
    """Return a reward function: 1 if parse_fn(reply) equals ground_truth_fn(prompt), else 0. It
    returns None if the prompt has no truth."""

    def reward_fn(rollout: Rollout) -> float | None:
        truth = ground_truth_fn(rollout.prompt)
        return (
            None
            if truth is None or truth == ""
            else float(parse_fn(rollout.generation.text) == truth)
        )

    return reward_fn


def tool_usage_reward(min_tools: int = 1) -> RewardFn:
    """Return a reward function: 1 if at least `min_tools` tool calls succeeded, else 0."""

    def reward_fn(rollout: Rollout) -> float:
        messages = () if rollout.conversation is None else rollout.conversation.messages
        failed = sum(not message.metadata.get("ok", True) for message in messages)
        return float(sum(len(message.tool_calls) for message in messages) - failed >= min_tools)

    return reward_fn


def weighted_sum_aggregator(weights: Sequence[float]) -> Callable[[np.ndarray], float]:
    """Return an aggregator: Σ weight × component."""
    return lambda vector: float(np.dot(vector, weights))


def min_aggregator(vector: np.ndarray) -> float:
    return float(np.min(vector))


def max_aggregator(vector: np.ndarray) -> float:
    return float(np.max(vector))


def mean_aggregator(vector: np.ndarray) -> float:
    return float(np.mean(vector))
