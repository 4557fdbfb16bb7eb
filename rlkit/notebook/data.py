"""The data of a notebook, where the core has no shape of its own for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.rewards import Moments
from rlkit.types import FinishReason, Message, Rollout, SamplingParams, Task

Conversation = list[Message]
Prompt = str | Sequence[Message] | Task


class GenerationConfig(NamedTuple):
    """How replies are sampled. The defaults are the notebooks' numbers, for rollouts without training; `TRAINING` is its opposite."""

    max_new_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 50  # 0 is off
    do_sample: bool = True  # False is greedy, as temperature 0 is
    enable_thinking: bool | None = None  # for the chat template; None leaves its default
    parse_thinking: bool = True  # False leaves thinking and its tags in the text of `generate_text`
    use_cache: bool = True

    @property
    def params(self) -> SamplingParams:
        """How an engine samples by it."""
        return SamplingParams(self.max_new_tokens, self.temperature if self.do_sample else 0.0, self.top_p, self.top_k)


TRAINING = GenerationConfig(max_new_tokens=256, temperature=1.0, top_p=1.0, top_k=0)  # the full distribution


class TextGeneration(NamedTuple):
    """One reply in words, and as the tokens that were sampled, its end token included. A `generator` gives it."""

    text: str
    token_ids: Sequence[int]  # [T]
    logprobs: Sequence[float] | None = None  # [T], of the distribution that was sampled, constants
    valid_mask: Sequence[bool] | None = None  # [T], True where a token belongs to the reply; None: everywhere
    metadata: Mapping[str, Any] = {}  # thinking and finish_reason among others


class StepView(NamedTuple):
    """One turn by the names of the notebooks' StepData and RLStepData; `Step` is what is stored."""

    step_num: int
    prompt: tuple[Message, ...]
    thinking: str
    content: str
    history: Conversation  # up to and with this turn, thinking left out
    history_with_thinking: Conversation
    tokens: tuple[int, ...]  # context and reply
    response_tokens: tuple[int, ...]
    logprobs: Any  # [T] of response_tokens
    old_logprobs: Any  # [T], of `attach_logprobs`; None without it
    finish_reason: FinishReason
    reward: float | None  # the step's own
    value: float | None = None
    advantage: float | None = None
    return_: float | None = None


def view_steps(
    rollout: Rollout,
    *,
    values: Sequence[float] | None = None,
    advantages: Sequence[float] | None = None,
    returns: Sequence[float] | None = None,
) -> list[StepView]:
    """The turns of a rollout by the notebooks' names.

    Args:
      values, advantages, returns: one number a step, such as a row of `compute_advantages_and_returns`.
    """
    views, start, old = [], 0, rollout.metadata.get("old_logprobs")
    numbers: list[list[Any]] = [
        [None] * len(rollout.steps) if row is None else list(map(float, row)) for row in (values, advantages, returns)
    ]
    for i, step in enumerate(rollout.steps):
        end = start + len(step.response_ids)
        before = None if old is None else old[start:end]
        histories = [rollout.history(i + 1, thinking=thinking) for thinking in (False, True)]
        said = i, step.prompt, step.thinking, step.content, *histories, step.prompt_ids + step.response_ids, step.response_ids
        views.append(StepView(*(*said, step.logprobs, before, step.finish_reason, step.reward, *(row[i] for row in numbers))))
        start = end
    return views


class TrainingState(NamedTuple):
    """Where a run stands, for the next iteration and for the checkpoint."""

    step: int = 0  # RL steps done
    total_tokens: int = 0  # of all rollouts trained on, prompts included
    metrics: Mapping[str, float] = {}  # of the last step
    ema_metrics: Mapping[str, float] = {}
    moments: Sequence[float] = Moments()  # of all rewards so far, for normalize_rewards
    stream: Sequence[int] = ()  # where `train_model` stands in the order of its prompts
    learner: Mapping[str, Any] = {}  # what else decides the steps to come (rlkit.training.learner.Learner.saved)


def update_ema_metrics(ema_metrics: Mapping[str, float], metrics: Mapping[str, float], decay: float = 0.9) -> dict[str, float]:
    """decay · average + (1 - decay) · value, by name. A new name starts at its value; a value that is not finite changes nothing.

    >>> update_ema_metrics({"loss": 1.0}, {"loss": 0.0, "reward": 2.0, "kl": float("nan")})
    {'loss': 0.9, 'reward': 2.0}
    """
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {**ema_metrics, **{name: decay * ema_metrics.get(name, value) + (1 - decay) * value for name, value in finite.items()}}


def as_messages(prompt: Prompt) -> tuple[Message, ...]:
    """A prompt as chat messages."""
    if isinstance(prompt, Task):
        return prompt.messages
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def as_task(prompt: Prompt, index: int) -> Task:
    """A prompt as a task."""
    return prompt if isinstance(prompt, Task) else Task(id=f"prompt_{index}", messages=as_messages(prompt))


def as_prompt(messages: Sequence[Message]) -> Prompt:
    """Messages as a hook gets them: the text, where a user's message is all there is."""
    return messages[0]["content"] if len(messages) == 1 and messages[0]["role"] == "user" else list(messages)
