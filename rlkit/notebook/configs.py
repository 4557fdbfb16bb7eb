"""Algorithms as a notebook sets them: a function each, and the switch between them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import rlkit.functional as F
from rlkit.algorithm import KL, Algorithm, Critic, inputs
from rlkit.types import QUANTITIES

NUMBERS = ("entropy_coef", "epochs", "minibatches", "target_kl", "max_refills")  # of any algorithm


class TrainingConfig(NamedTuple):
    """An algorithm, its KL, and the numbers that a notebook sets beside them."""

    algorithm: Algorithm
    kl: KL = KL("none")
    learning_rate: float = 1e-4
    value_learning_rate: float = 1e-4  # of the critic
    max_grad_norm: float = 1.0
    group_size: int = 4  # samples a prompt
    normalize_rewards: bool = False  # trains on rewards less their running mean, by their running standard deviation


def create_grpo_config(
    *, clip_range: float = 0.2, kl_coef: float = 0.1, normalize_advantages: bool = True, **numbers: Any
) -> TrainingConfig:
    """GRPO: the group's mean as baseline, its standard deviation as scale (normalize_advantages), a clipped ratio, k3 in the loss.

    Args:
      clip_range: 0 < clip_range ≤ 1. kl_coef: ≥ 0, in units of reward per nat.
      numbers: other fields of TrainingConfig, and those of NUMBERS (target_kl, max_refills, …) of `rlkit.Algorithm`.
    """
    scale = F.normalize_group if normalize_advantages else F.no_normalization
    loss = partial(F.clipped, clip_low=clip_range, clip_high=clip_range)
    return _config("grpo", KL("k3", F.k3, "loss", kl_coef), numbers, policy_loss=loss, normalization=scale)


def create_dapo_config(
    *,
    clip_range: float = 0.2,
    clip_high: float = 0.28,
    kl_coef: float = 0.0,
    overlong_limit: int | None = None,
    normalize_advantages: bool = True,
    **numbers: Any,
) -> TrainingConfig:
    """DAPO of Yu et al. 2025, arXiv:2503.14476: two clip widths, a token mean, prompts with equal rewards left out, no KL.

    The notebooks' DAPO is `create_pairwise_config`. With `max_refills` further prompts take the place of those left out.

    Args:
      clip_range, clip_high: widths below and above 1. overlong_limit: tokens of a reply from which the reward is lower by 1, over the
        last fifth gradually; None: no penalty. Others as in `create_grpo_config`.
    """
    scale = F.normalize_group if normalize_advantages else F.no_normalization
    loss = partial(F.clipped, clip_low=clip_range, clip_high=clip_high)
    parts: dict[str, Any] = {"policy_loss": loss, "normalization": scale, "aggregation": F.token_mean, "group_filter": F.mixed_groups}
    if overlong_limit is not None:
        parts["overlong"] = partial(F.soft_penalty, limit=overlong_limit)
    return _config("dapo", KL("k3", F.k3, "loss", kl_coef), numbers, **parts)


def create_pairwise_config(*, beta: float = 0.1, kl_coef: float = 0.1, length_normalise: bool = False, **numbers: Any) -> TrainingConfig:
    """The preference loss over pairs of a prompt, as an advantage with its gradient. The notebooks call it DAPO.

    Args:
      beta: > 0, per nat. kl_coef: ≥ 0; the mean KL of a sequence is taken off its reward. length_normalise: means instead of sums.
    """
    advantage = partial(F.pairwise, beta=beta, length_normalise=length_normalise)
    parts = {"advantage": advantage, "policy_loss": F.reinforce, "aggregation": partial(F.sequence_sum, constant=1.0)}
    return _config("pairwise", KL("k1", F.k1, "reward_sequence", kl_coef), numbers, **parts)


def create_ppo_config(
    *,
    clip_range: float = 0.2,
    kl_coef: float = 0.1,
    value_loss_coef: float = 0.5,
    value_clip_range: float | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    normalize_advantages: bool = True,
    epochs: int = 4,
    critic_warmup: int = 0,
    **numbers: Any,
) -> TrainingConfig:
    """PPO: GAE over steps with a value head on the policy's trunk, a clipped ratio, the mean KL of a sequence in its reward.

    Args:
      clip_range: 0 < clip_range ≤ 1. value_loss_coef: weight of the value loss. value_clip_range: > 0; None: no clipping.
      gamma, lam: 0 … 1, per step of the episode. normalize_advantages: whitened over all tokens of the batch.
      epochs: passes over the rollouts of a step. critic_warmup: steps that train the critic alone.
      numbers: as in `create_grpo_config`; learning_rate is 1e-5, group_size 1.
    """
    value_loss: Any = F.squared_error if value_clip_range is None else partial(F.clipped_squared_error, clip=value_clip_range)
    parts = {
        "advantage": partial(F.turn_gae, gamma=gamma, lam=lam),
        "normalization": F.whiten if normalize_advantages else F.no_normalization,
        "policy_loss": partial(F.clipped, clip_low=clip_range, clip_high=clip_range),
        "aggregation": F.token_mean,
        "critic": Critic("head", value_loss, coef=value_loss_coef, warmup=critic_warmup),
    }
    numbers = {"learning_rate": 1e-5, "group_size": 1, "epochs": epochs} | numbers
    return _config("ppo", KL("k1", F.k1, "reward_sequence", kl_coef), numbers, **parts)


CONFIGS: Mapping[str, Callable[..., TrainingConfig]] = {
    "grpo": create_grpo_config,
    "dapo": create_dapo_config,
    "pairwise": create_pairwise_config,
    "ppo": create_ppo_config,
}


def create_switch_strategy(first: str = "grpo", second: str = "dapo", at: int = 50) -> Callable[[int], str]:
    """A switch_strategy, (iteration) → algorithm name: the first until step `at`, counted from 0, then the second."""
    return lambda iteration: first if iteration < at else second


def get_algorithm_config(
    iteration: int,
    switch_strategy: Callable[[int], str] | None = None,
    *,
    configs: Mapping[str, Callable[..., TrainingConfig]] = CONFIGS,
    **numbers: Any,
) -> TrainingConfig:
    """The config of an iteration. Numbers of the caller hold before and after a switch.

    Args:
      iteration: RL steps done. switch_strategy: (iteration) → name in `configs`; None: `create_switch_strategy()`.
      numbers: for the functions in `configs`; each gets those that it takes.
    Raises: ValueError for a name that is not in `configs`, TypeError for a number that none of them takes.

    >>> get_algorithm_config(49).algorithm.name, get_algorithm_config(50).algorithm.name
    ('grpo', 'dapo')
    """
    name = (switch_strategy or create_switch_strategy())(iteration)
    if name not in configs:
        raise ValueError(f"switch_strategy gave {name!r} at iteration {iteration}; choose one of {', '.join(configs)}")
    shared = dict.fromkeys({*TrainingConfig._fields, *NUMBERS} - {"algorithm", "kl"})
    taken = {key: {*named(make), *accepted(make, shared)} for key, make in configs.items()}
    if odd := sorted({*numbers}.difference(*taken.values())):
        raise TypeError(f"no algorithm takes {', '.join(odd)}")
    return configs[name](**{key: value for key, value in numbers.items() if key in taken[name]})


def algorithm_of(name: str, **parts: Any) -> Algorithm:
    """GRPO without clip and scale, but for `parts`."""
    common = {"advantage": F.group_mean, "ratio": F.token_ratio, "aggregation": F.sequence_mean, "group_filter": F.keep_all}
    return Algorithm(name, **common | parts)


def _config(name: str, kl: KL, numbers: dict[str, Any], **parts: Any) -> TrainingConfig:
    own = {key: numbers.pop(key) for key in NUMBERS if key in numbers}
    return TrainingConfig(algorithm_of(name, **parts | own), kl, **numbers)


# What a hook asks for, read from its signature.


def asks_for(function: Callable[..., Any], quantity: str) -> bool:
    """Whether a function is one of the core: all that it asks for are quantities, this one among them."""
    asked = inputs(function)
    return quantity in asked and set(asked) <= set(QUANTITIES)


def named(function: Callable[..., Any]) -> set[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds}


def accepted(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keywords that a function takes."""
    if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        return dict(keywords)
    return {name: value for name, value in keywords.items() if name in named(function)}
