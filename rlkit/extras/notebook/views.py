"""Show episodes of the core in the document's form, and turn the document's hooks into functions of
the core's episodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkit import types
from rlkit.commands.agent import convert_to_dict
from rlkit.config.parts import make_reward
from rlkit.extras.notebook.data import Conversation, Generation, Hook, Message, Rollout
from rlkit.rewards import Reward, batched, read_declarations

SHOWN = "notebook_prompt"  # key of a task's metadata: the prompt before its template_fn


class Arguments(dict[str, Any]):
    """Hold a call's arguments, together with the call as its tool_parser returned it."""

    def __init__(self, arguments: Mapping[str, Any], call: Mapping[str, Any]):
        super().__init__(arguments)
        self.call = call


def call_as_given(call: types.ToolCall) -> Mapping[str, Any]:
    """Return a call as its tool_parser returned it. Without a tool_parser, return it in OpenAI's
    form."""
    return call.arguments.call if isinstance(call.arguments, Arguments) else convert_to_dict(call)


def view(
    episode: types.Rollout,
    *,
    logprobs: Tensor | None = None,
    kl_penalty: float = 0.0,
    whole: bool = False,
) -> Rollout:
    """Show an episode in the document's form. kl_penalty is subtracted from its reward.

    logprobs: [T] log-probs of the tokens, instead of the sampler's. whole: whether to take the
    tokens of all replies, as a loss needs, or only of the last reply.
    """
    steps = episode.steps if whole else episode.steps[-1:]
    ids = [step.response_ids[i] for step in steps for i in step.sampled]
    own = (
        torch.tensor([step.logprobs[i] for step in steps for i in step.sampled])
        if logprobs is None
        else logprobs
    )
    said = (
        {"thinking": steps[-1].thinking, "finish_reason": steps[-1].finish_reason} if steps else {}
    )
    tokens = torch.tensor(ids, dtype=torch.int64, device=own.device)
    mask = torch.ones_like(own.detach())
    reward = None if episode.reward is None else episode.reward - kl_penalty
    metadata = {**episode.metadata, "episode": episode, "rewards": episode.rewards}
    asked = [m.get("content", "") for m in episode.task.messages if m["role"] == "user"]
    prompt = episode.task.metadata.get(SHOWN, asked[-1] if asked else "")
    generation = Generation(episode.final_content, tokens, own, mask, said)
    return Rollout(prompt, generation, reward, kl_penalty, make_conversation(episode), metadata)


def make_conversation(episode: types.Rollout) -> Conversation:
    """Return the messages of an episode, without thinking."""
    results = {
        r.id: {"id": r.id, "name": r.name, "ok": r.ok}
        for step in episode.steps
        for r in step.tool_results
    }
    calls = iter([call_as_given(call) for call in step.tool_calls] for step in episode.steps)
    messages = []
    for m in episode.history(len(episode.steps), thinking=False):
        ours = next(calls, []) if m["role"] == "assistant" else []
        messages.append(
            Message(
                m["role"],
                m.get("content", ""),
                tuple(ours),
                results.get(m.get("tool_call_id", ""), {}),
            )
        )
    return Conversation(tuple(messages))


def viewed_reward(
    reward_fn: Any, aggregator: Hook = None, vectors: dict[int, np.ndarray] | None = None
) -> Reward:
    """Turn a reward function of views, or a list of reward functions, into a Reward of the core. If
    a function returns vectors, `vectors` collects them by the position of the prompt."""
    if isinstance(reward_fn, Reward):
        return reward_fn
    mean: Callable[..., float] = aggregator or (lambda vector: float(np.mean(vector)))
    if callable(reward_fn):
        return make_reward({"reward_fn": _of_view(reward_fn, mean, vectors)}, "reward_fn")
    names = [getattr(fn, "__name__", "reward_fn") for fn in reward_fn]
    names = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]
    viewed = [_of_view(fn, mean, None) for fn in reward_fn]
    return make_reward(dict(zip(names, viewed, strict=True)), "reward_fn")._replace(
        name="reward_fns",
        aggregator=lambda scores, weights: float(mean(np.array(list(scores.values())))),
    )


def _of_view(
    reward_fn: Callable[..., Any],
    aggregator: Callable[..., float],
    vectors: dict[int, np.ndarray] | None,
) -> Callable[..., Any]:
    """Wrap a reward function. It receives views, and a vector that it returns becomes one
    number."""

    def number(found: Any, episode: types.Rollout) -> Any:
        if not np.ndim(found):
            return found.item() if isinstance(found, np.generic) else found
        if vectors is not None:
            vectors[episode.group] = found
        return float(aggregator(found))

    async def later(found: Any, episode: types.Rollout) -> Any:
        return number(await found, episode)

    def reward(episode: types.Rollout) -> Any:
        found = reward_fn(view(episode))
        return later(found, episode) if inspect.isawaitable(found) else number(found, episode)

    if read_declarations(reward_fn).batched:
        return batched(lambda episodes: reward_fn([view(episode) for episode in episodes]))
    return reward


def stacked(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Return log-probs and mask [B, T] of the rollouts' tokens, padded on the right."""
    if any(r.generation.logprobs is None for r in rollouts):
        raise ValueError("a rollout has no log-probs; give generate(…, compute_logprobs=True)")
    pad = torch.nn.utils.rnn.pad_sequence
    logprobs = pad([r.generation.logprobs for r in rollouts], batch_first=True)  # type: ignore[misc]
    return logprobs, pad([r.generation.valid_mask.bool() for r in rollouts], batch_first=True).to(
        logprobs.device
    )


def task_rewards(rollouts: Sequence[Rollout]) -> Tensor:
    """Return the rewards [B] before the KL penalty; nan without a reward. Raises: ValueError if a
    reward is a vector."""
    if any(np.ndim(r.reward) > 0 for r in rollouts if r.reward is not None):
        raise ValueError(
            "a rollout's reward is a vector; make it a number with aggregate_vector_rewards before"
            " training on it"
        )
    return torch.tensor(
        [float("nan") if r.reward is None else float(r.reward) + r.kl_penalty for r in rollouts]
    )


def groups(rollouts: Sequence[Rollout]) -> Tensor:
    """Return a number for each rollout, [B] int64. Rollouts of the same prompt have the same
    number."""
    kept = [r.metadata.get("episode") for r in rollouts]
    keys = [
        r.prompt if e is None else str(e.task.messages) for r, e in zip(rollouts, kept, strict=True)
    ]
    return torch.tensor([keys.index(key) for key in keys])
