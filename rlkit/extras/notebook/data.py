"""Define the data of the notebook of primitives as named tuples with immutable defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from rlkit.algorithm import KL, Algorithm
from rlkit.types import Message as ChatMessage
from rlkit.types import SamplingParams, Task

Prompt = str | Sequence[ChatMessage] | Task
Hook = Callable[..., Any] | None  # a function that replaces a part


class Generation(NamedTuple):
    """Hold one reply. In training, hold all replies of an episode."""

    text: str
    token_ids: Tensor  # [T] int64, with the end token
    logprobs: Tensor | None  # [T] log-probs in nats, at the sampler's temperature
    valid_mask: Tensor  # [T] float, 1 on sampled tokens, also on the end token
    metadata: Mapping[str, Any] = {}  # thinking and finish_reason


class Message(NamedTuple):
    role: str  # system, user, assistant or tool
    content: str
    # in the form of the tool_parser; without a tool_parser, in OpenAI's form
    tool_calls: Sequence[Mapping[str, Any]] = ()
    metadata: Mapping[str, Any] = {}  # for a tool's result: id, name and ok


class Conversation(NamedTuple):
    messages: Sequence[Message]
    metadata: Mapping[str, Any] = {}


class Rollout(NamedTuple):
    """Hold an episode, with its last reply as `generation`, and its reward. `metadata["episode"]`
    is the whole `rlkit.Rollout`."""

    prompt: str
    generation: Generation
    # reward minus kl_penalty; None if the episode cannot be scored
    reward: float | np.ndarray | None
    kl_penalty: float = 0.0  # coefficient × KL in nats, mean over the tokens
    # set by `create_multiturn_rollout`, and for episodes in training
    conversation: Conversation | None = None
    metadata: Mapping[str, Any] = {}  # `episode`, and `rewards`, the score of each term by name


class Batch(NamedTuple):
    rollouts: Sequence[Rollout]
    advantages: Tensor  # [B, T]
    returns: Tensor | None = None  # [B, T]
    metadata: Mapping[str, Any] = {}


class GenerationConfig(NamedTuple):
    """Hold the settings of sampling. Training needs the full distribution, so it uses top_p=1 and
    top_k=0 instead of these values."""

    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 50  # 0: no limit
    do_sample: bool = True  # False decodes greedily, like temperature 0
    # setting of the chat template; None: the template's default
    enable_thinking: bool | None = False
    # with enable_thinking: whether `generate` leaves the thinking out of the text
    parse_thinking: bool = False
    use_cache: bool = True  # has no effect: the fast engine has a cache

    @property
    def params(self) -> SamplingParams:
        """Return these settings as the engine's parameters."""
        return SamplingParams(
            self.max_new_tokens, self.temperature if self.do_sample else 0.0, self.top_p, self.top_k
        )


class TrainingConfig(NamedTuple):
    """Hold an algorithm and its numbers. The fields after max_grad_norm are not in the document."""

    # grpo, pg, dapo (the pairwise loss) or ppo; or an Algorithm of the core
    algorithm: str | Algorithm = "grpo"
    # read by the function that makes the optimizer, for example `train`
    learning_rate: float = 1e-4
    kl_coef: float = 0.1  # ≥ 0, in units of reward per nat
    clip_range: float = 0.2  # in (0, 1]
    normalize_advantages: bool = True
    # whether to scale by the mean and the standard deviation of all rewards so far
    normalize_rewards: bool = False
    max_grad_norm: float = 1.0  # 0: no limit
    group_size: int = 4  # rollouts of each prompt
    beta: float = 0.1  # number of the pairwise loss, > 0, per nat
    value_loss_coef: float = 0.5
    value_learning_rate: float = 1e-4  # learning rate of the critic
    gamma: float = 0.99  # PPO's discount per step
    lam: float = 0.95
    kl: KL | None = None  # a KL of the core; it replaces the KL made from kl_coef


class TrainingState(NamedTuple):
    """Hold the result of an iteration."""

    step: int  # number of iterations made with this optimizer
    total_tokens: int  # number of tokens sampled in this iteration
    metrics: Mapping[str, float]
    ema_metrics: Mapping[str, float] = {}


def as_task(prompt: Prompt, index: int) -> Task:
    if isinstance(prompt, Task):
        return prompt
    messages: Sequence[ChatMessage] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    )
    return Task(id=f"prompt_{index}", messages=tuple(messages))
