"""The data of the notebook of primitives: named tuples with immutable defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rlkit.algorithm import KL, Algorithm
from rlkit.types import Message as ChatMessage
from rlkit.types import SamplingParams, Task

Prompt = str | Sequence[ChatMessage] | Task
Hook = Callable[..., Any] | None  # a function in place of a part


class Generation(NamedTuple):
    """One reply, or in training all replies of an episode."""

    text: str
    token_ids: Tensor  # [T] int64, the end token included
    logprobs: Tensor | None  # [T] in nats, at the sampler's temperature
    valid_mask: Tensor  # [T] float, 1 on sampled tokens, the end token included
    metadata: Mapping[str, Any] = {}  # thinking and finish_reason


class Message(NamedTuple):
    role: str  # system, user, assistant or tool
    content: str
    # in the tool_parser's form, else in OpenAI's
    tool_calls: Sequence[Mapping[str, Any]] = ()
    metadata: Mapping[str, Any] = {}  # of a tool's result: id, name and ok


class Conversation(NamedTuple):
    messages: Sequence[Message]
    metadata: Mapping[str, Any] = {}


class Rollout(NamedTuple):
    """An episode: the last reply as `generation`, and its reward. `metadata["episode"]` is the
    whole `rlkit.Rollout`."""

    prompt: str
    generation: Generation
    reward: float | np.ndarray | None  # less kl_penalty; None if it cannot be scored
    kl_penalty: float = 0.0  # coefficient × KL in nats, mean over the tokens
    # of `create_multiturn_rollout`, and of episodes in training
    conversation: Conversation | None = None
    metadata: Mapping[str, Any] = {}  # episode, and rewards: component → number


class Batch(NamedTuple):
    rollouts: Sequence[Rollout]
    advantages: Tensor  # [B, T]
    returns: Tensor | None = None  # [B, T]
    metadata: Mapping[str, Any] = {}


class GenerationConfig(NamedTuple):
    """Settings of sampling. Training needs the full distribution: it takes top_p as 1 and top_k as
    0."""

    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 50  # 0 is off
    do_sample: bool = True  # False is greedy, like temperature 0
    enable_thinking: bool | None = False  # for the chat template; None leaves its default
    # with enable_thinking: `generate` leaves the thinking out of the text
    parse_thinking: bool = False
    use_cache: bool = True  # has no effect: the fast engine has a cache

    @property
    def params(self) -> SamplingParams:
        """The same as the engine's parameters."""
        return SamplingParams(
            self.max_new_tokens, self.temperature if self.do_sample else 0.0, self.top_p, self.top_k
        )


class TrainingConfig(NamedTuple):
    """An algorithm and its numbers. The fields after max_grad_norm are not in the document."""

    # grpo, pg, dapo (the pairwise loss) or ppo; or one of the core
    algorithm: str | Algorithm = "grpo"
    learning_rate: float = 1e-4  # for the maker of the optimizer, such as `train`
    kl_coef: float = 0.1  # ≥ 0, in units of reward per nat
    clip_range: float = 0.2  # in (0, 1]
    normalize_advantages: bool = True
    normalize_rewards: bool = False  # by the mean and the deviation of all rewards so far
    max_grad_norm: float = 1.0  # 0: no limit
    group_size: int = 4  # rollouts of each prompt
    beta: float = 0.1  # > 0, per nat, of the pairwise loss
    value_loss_coef: float = 0.5
    value_learning_rate: float = 1e-4  # of the critic
    gamma: float = 0.99  # of PPO, per step
    lam: float = 0.95
    kl: KL | None = None  # a KL of the core in place of kl_coef's


class TrainingState(NamedTuple):
    """Result of an iteration."""

    step: int  # iterations done by this optimizer
    total_tokens: int  # sampled in this iteration
    metrics: Mapping[str, float]
    ema_metrics: Mapping[str, float] = {}


def as_task(prompt: Prompt, index: int) -> Task:
    if isinstance(prompt, Task):
        return prompt
    messages: Sequence[ChatMessage] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    return Task(id=f"prompt_{index}", messages=tuple(messages))
