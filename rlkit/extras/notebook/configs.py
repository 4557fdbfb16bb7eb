"""Configure algorithms with the settings of the notebook of primitives. There is a function for
each algorithm, and a switch between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

import rlkit.functional as F
from rlkit.algorithm import KL, Algorithm, Critic
from rlkit.extras.notebook.data import TrainingConfig


def create_grpo_config(kl_coef: float = 0.1, normalize_advantages: bool = True) -> TrainingConfig:
    """Configure GRPO. The baseline is the mean reward of a prompt's rollouts. With
    normalize_advantages, their standard deviation is the scale."""
    return TrainingConfig("grpo", kl_coef=kl_coef, normalize_advantages=normalize_advantages)


def create_dapo_config(beta: float = 0.1, normalize_advantages: bool = True) -> TrainingConfig:
    """Configure the preference loss over pairs of a prompt's rollouts. It is not the DAPO of Yu et
    al. 2025. beta: > 0, per nat. kl_coef is always 0.1."""
    return TrainingConfig("dapo", beta=beta, normalize_advantages=normalize_advantages)


def create_ppo_config(
    clip_range: float = 0.2, value_loss_coef: float = 0.5, kl_coef: float = 0.0
) -> TrainingConfig:
    """Configure PPO: GAE over the steps of an episode, a value head on the policy's trunk, a
    clipped ratio, and one rollout per prompt."""
    return TrainingConfig(
        "ppo", clip_range=clip_range, value_loss_coef=value_loss_coef, kl_coef=kl_coef, group_size=1
    )


def switch_at_50(iteration: int) -> str:
    """Return grpo for iterations 0 … 49 and dapo afterwards: the default switch_strategy."""
    return "grpo" if iteration < 50 else "dapo"


def get_algorithm_config(
    iteration: int, switch_strategy: Callable[[int], str] = switch_at_50, **numbers: Any
) -> TrainingConfig:
    """Return the config of an iteration, counted from 0. numbers: fields of TrainingConfig, with
    the same values before and after a switch."""
    configs = {
        "grpo": create_grpo_config(),
        "dapo": create_dapo_config(),
        "ppo": create_ppo_config(),
    }
    name = switch_strategy(iteration)
    if name not in configs:
        raise ValueError(
            f"switch_strategy gave {name!r} at iteration {iteration}; choose one of"
            f" {', '.join(configs)}"
        )
    return configs[name]._replace(**numbers)


def make_core(config: TrainingConfig) -> tuple[Algorithm, KL]:
    """Make the core's Algorithm and KL from a config. By default, the KL of a sequence is
    subtracted from its reward, after the statistics of its group have been computed."""
    kl = config.kl or KL("k1", F.k1, "reward_sequence", config.kl_coef)
    if isinstance(config.algorithm, Algorithm):
        return config.algorithm, kl
    clipped = partial(F.clipped, clip_low=config.clip_range, clip_high=config.clip_range)
    parts: dict[str, Any] = {
        "ratio": F.token_ratio,
        "aggregation": F.token_mean,
        "group_filter": F.keep_all,
        "policy_loss": clipped,
    }
    if config.algorithm in ("grpo", "pg"):
        parts |= {"advantage": F.group_mean, "normalization": F.normalize_group}
    elif config.algorithm == "dapo":
        parts |= {"advantage": partial(F.pairwise, beta=config.beta), "policy_loss": F.reinforce}
        parts["aggregation"] = partial(F.sequence_sum, constant=1.0)
    elif config.algorithm == "ppo":
        parts |= {
            "advantage": partial(F.turn_gae, gamma=config.gamma, lam=config.lam),
            "normalization": F.whiten,
        }
        parts["critic"] = Critic("head", squared, coef=config.value_loss_coef)
    else:
        raise ValueError(
            f"TrainingConfig.algorithm is {config.algorithm!r}; choose grpo, pg, dapo or ppo, or"
            " give an rlkit Algorithm"
        )
    if not config.normalize_advantages:
        parts["normalization"] = F.no_normalization
    return Algorithm(config.algorithm, **parts), kl


def squared(
    values: Tensor, values_old: Tensor, returns: Tensor, *, clip: float | None = None
) -> Tensor:
    """Compute the notebooks' value loss: the square without the factor 1/2. With `clip`, the values
    are clipped around the old values."""
    return 2 * (
        F.squared_error(values, returns)
        if clip is None
        else F.clipped_squared_error(values, values_old, returns, clip=clip)
    )
