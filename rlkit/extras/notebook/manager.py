"""Manage the rollouts of the chat and PPO notebook: parallel chats, step by step. The core samples
each reply."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

import rlkit.functional as F
from rlkit.errors import DataError
from rlkit.extras.notebook.chat import Chat, create_batch, generate_templates
from rlkit.extras.notebook.data import Hook, as_task
from rlkit.types import Rollout, Step


@dataclass
class StepData:
    step_num: int
    prompt: str
    thinking: str
    content: str
    history_wo_thinking: Chat  # the chat up to this turn, with its reply
    history_w_thinking: Chat  # the same, with the thinking of every turn as `reasoning_content`
    tokens: list[int] = field(default_factory=list)  # token ids of context and reply


@dataclass
class RLStepData(StepData):
    """Hold a turn with its data for training. Tensors are constants."""

    logprobs: Tensor | None = None  # [T] log-probs of response_tokens, from the sampling policy
    values: Tensor | None = None  # [1] value of the state before the reply
    response_tokens: list[int] = field(default_factory=list)  # as sampled, with the end token
    advantages: float = 0.0
    returns: float = 0.0
    old_logprobs: Tensor | None = None  # [T] the "old" log-probs of ratios


@dataclass
class RolloutData:
    rollout_id: int
    initial_prompt: str
    steps: list[StepData] = field(default_factory=list)
    is_complete: bool = False
    terminated_early: bool = False
    termination_step: int = -1  # number of steps at its end; -1 before its end
    reward: float | None = 0.0  # None: it cannot be scored
    metadata: dict[str, Any] = field(default_factory=dict)

    def add_step(self, step_data: StepData) -> None:
        self.steps.append(step_data)

    def get_total_steps(self) -> int:
        return len(self.steps)

    def mark_complete(self, early: bool = False) -> None:
        """Mark the rollout as over. `early` says whether it ended by itself before the step
        limit."""
        self.is_complete = True
        self.terminated_early = early
        self.termination_step = len(self.steps)

    def set_reward(self, reward: float | None) -> None:
        self.reward = reward

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), default=Tensor.tolist))


def _rollout_from(plain: Mapping[str, Any]) -> RolloutData:
    """Make a rollout from the result of `to_dict`."""
    steps: list[StepData] = []
    for step in plain["steps"]:
        tensors = {
            n: torch.tensor(step[n])
            for n in ("logprobs", "values", "old_logprobs")
            if step.get(n) is not None
        }
        steps.append(
            RLStepData(**step | tensors) if "response_tokens" in step else StepData(**step)
        )
    return RolloutData(**{**plain, "steps": steps})


def core_rollout(rollout: RolloutData, *, group: int = 0) -> Rollout:
    """Return the rollout in the core's form, without steps that have no log-probs. Its metadata has
    the `advantages` and `returns` of each step."""
    trained = [
        s
        for s in rollout.steps
        if isinstance(s, RLStepData) and s.logprobs is not None and s.response_tokens
    ]
    steps = []
    for s in trained:
        old: Any = s.logprobs if s.old_logprobs is None else s.old_logprobs
        asked = tuple(generate_templates([s.prompt]))
        ids = tuple(s.tokens[: -len(s.response_tokens)])
        steps.append(
            Step(
                asked,
                ids,
                tuple(s.response_tokens),
                tuple(old.tolist()),
                "stop",
                s.thinking,
                s.content,
            )
        )
    numbers = {
        "advantages": [s.advantages for s in trained],
        "returns": [s.returns for s in trained],
    }
    ended: Any = (
        {"status": "terminated"}
        if rollout.terminated_early
        else {"status": "truncated", "truncation": "steps"}
    )
    task = as_task(rollout.initial_prompt, rollout.rollout_id)
    return Rollout(
        task, tuple(steps), group=group, reward=rollout.reward, metadata=numbers, **ended
    )


class RolloutManager:
    """Run n chats in parallel. In every step, each active chat gets one reply, and all replies are
    sampled as one batch.

    generator: an `LLMGenerator`, or any other object with a method `generate`. With another object,
    the steps have no tokens to train on.
    """

    def __init__(self, generator: Any, n_rollouts: int, max_steps: int = 50):
        self.generator = generator
        self.n_rollouts = n_rollouts
        self.max_steps = max_steps
        self.rollouts: list[RolloutData] = []
        self.active_rollout_indices: list[int] = []

    def initialize_rollouts(self, initial_prompts: Sequence[str]) -> None:
        now = datetime.now().isoformat()
        self.rollouts = [
            RolloutData(i, prompt, metadata={"created_at": now})
            for i, prompt in zip(range(self.n_rollouts), initial_prompts, strict=True)
        ]
        self.active_rollout_indices = list(range(self.n_rollouts))

    def execute_step(
        self, step_num: int, prompts: Sequence[str], max_new_tokens: int = 1000
    ) -> None:
        """Sample one reply in every active rollout. The policy reads the history without thinking,
        and then the rollout's prompt. A rollout ends if its context has no room for a reply."""
        active = [self.rollouts[i] for i in self.active_rollout_indices]
        before = [
            (
                (r.steps[-1].history_wo_thinking, r.steps[-1].history_w_thinking)
                if r.steps
                else ([], [])
            )
            for r in active
        ]
        asked = zip(before, generate_templates(prompts), strict=True)
        plain, full = zip(
            *([[*history, message] for history in both] for both, message in asked), strict=True
        )
        replies: list[Rollout | None] = [None] * len(active)
        if hasattr(self.generator, "replies"):
            replies = self.generator.replies(plain, max_new_tokens)
            outputs: Any = [
                (r.steps[0].thinking, r.steps[0].content) if r and r.steps else ("", "")
                for r in replies
            ]
        else:
            outputs = self.generator.generate(
                plain, max_new_tokens=max_new_tokens, num_return_sequences=1
            )
        plain = create_batch(plain, 1, outputs)[0]
        full = create_batch(full, 1, outputs, include_thinking=True)[1]
        for i, (rollout, reply) in enumerate(zip(active, replies, strict=True)):
            data = StepData(step_num, prompts[i], outputs[i][0], outputs[i][1], plain[i], full[i])
            if reply is None:
                rollout.add_step(data)
            elif reply.steps:
                rollout.add_step(_sampled(reply.steps[0], data))
            else:
                rollout.metadata["truncation"] = "context"
                self._end(rollout, early=False)

    def check_termination_conditions(self, termination_fn: Hook = None) -> list[int]:
        """End each rollout that has max_steps replies, or for which termination_fn(rollout,
        last_step) is true. Return the indices of these rollouts."""
        before = list(self.active_rollout_indices)
        for rollout in (self.rollouts[i] for i in before):
            full = rollout.get_total_steps() >= self.max_steps
            if full or (
                termination_fn is not None
                and rollout.steps
                and termination_fn(rollout, rollout.steps[-1])
            ):
                self._end(rollout, early=not full)
        return [i for i in before if i not in self.active_rollout_indices]

    def run_rollouts(
        self,
        prompt_generator_fn: Callable[..., str | None],
        termination_fn: Hook = None,
        max_new_tokens: int = 1000,
    ) -> None:
        """Play all rollouts to their ends. prompt_generator_fn: function from (rollout, step from
        0) to a user message, or None to end the rollout early."""
        for step_num in range(self.max_steps):
            prompts = []
            for i in list(self.active_rollout_indices):
                prompt = prompt_generator_fn(self.rollouts[i], step_num)
                if prompt is None:
                    self._end(self.rollouts[i], early=True)
                else:
                    prompts.append(prompt)
            if not self.active_rollout_indices:
                return
            self.execute_step(step_num, prompts, max_new_tokens)
            self.check_termination_conditions(termination_fn)

    def _end(self, rollout: RolloutData, *, early: bool) -> None:
        rollout.mark_complete(early)
        self.active_rollout_indices.remove(rollout.rollout_id)

    def assign_rewards(self, reward_fn: Callable[[RolloutData], float | None]) -> None:
        for rollout in self.rollouts:
            rollout.set_reward(reward_fn(rollout))

    def get_rollout_summary(self) -> dict[str, Any]:
        """Return counts and means of the rollouts. `avg_reward` is the mean over the scored
        rollouts, or 0 without a scored rollout."""
        steps = [r.get_total_steps() for r in self.rollouts]
        rewards = [r.reward for r in self.rollouts]
        scored = [reward for reward in rewards if reward is not None]
        return {
            "total_rollouts": len(self.rollouts),
            "avg_steps": fmean(steps) if steps else 0,
            "min_steps": min(steps, default=0),
            "max_steps": max(steps, default=0),
            "early_terminations": sum(r.terminated_early for r in self.rollouts),
            "avg_reward": fmean(scored) if scored else 0,
            "step_distribution": steps,
            "rewards": rewards,
        }

    def save_rollouts(self, filepath: str | Path, format: str = "pickle") -> None:
        """Write the rollouts as plain data, as JSON or as a pickle."""
        plain = [r.to_dict() for r in self.rollouts]
        Path(filepath).write_bytes(
            pickle.dumps(plain) if _is_pickle(format) else json.dumps(plain, indent=2).encode()
        )

    @staticmethod
    def load_rollouts(filepath: str | Path, format: str = "pickle") -> list[RolloutData]:
        """Load the rollouts of a file of `save_rollouts`. Raises: DataError if a pickle contains
        more than plain data."""
        with Path(filepath).open("rb") as file:
            return [
                _rollout_from(rollout)
                for rollout in (
                    PlainUnpickler(file).load() if _is_pickle(format) else json.load(file)
                )
            ]


class PlainUnpickler(pickle.Unpickler):
    """Read a pickle of lists, dicts, texts and numbers only. A pickle that names a class or a
    function could run any code, so it is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise DataError(
            f"the pickle names {module}.{name}; load_rollouts reads the plain data of save_rollouts"
            " only"
        )


def _is_pickle(format: str) -> bool:
    if format not in ("pickle", "json"):
        raise ValueError(f"there is no format {format!r}; choose 'pickle' or 'json'")
    return format == "pickle"


def _sampled(reply: Step, data: StepData) -> RLStepData:
    """Return a turn with the tokens sampled by the core."""
    logprobs = torch.tensor(reply.logprobs)
    tokens = list(reply.response_ids)
    given: dict[str, Any] = vars(data) | {
        "tokens": [*reply.prompt_ids, *tokens],
        "response_tokens": tokens,
    }
    return RLStepData(**given, logprobs=logprobs, old_logprobs=logprobs.clone())


# ------------------------------------------------------------------------------------- the examples


def dummy_reward_function(rollout: RolloutData) -> float:
    """Return half a point per step if the rollout ended early, else one point per step plus 10 (an
    example of a reward)."""
    return (
        0.5 * rollout.get_total_steps()
        if rollout.terminated_early
        else rollout.get_total_steps() + 10.0
    )


def dummy_termination_check(rollout: RolloutData, last_step: StepData) -> bool:
    """Return whether the reply says DONE, in capitals or not (an example of a termination_fn). It
    is also true in one of ten cases at random. The rollout and the reply decide this, so a repeated
    call gives the same result."""
    draw = F.mix(rollout.rollout_id, len(rollout.steps), crc32(last_step.content.encode())) / 2**63
    return "DONE" in last_step.content.upper() or draw < 0.1


def dummy_prompt_generator(rollout: RolloutData, step_num: int) -> str:
    """Return the initial prompt, and later "Continue with step n", with n from 2 (an example of a
    prompt_generator_fn)."""
    return rollout.initial_prompt if step_num == 0 else f"Continue with step {step_num + 1}"
