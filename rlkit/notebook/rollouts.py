"""Rollouts: episodes from a model, a tokenizer and prompts, played as training plays them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from rlkit import types
from rlkit.environments import execute, hermes, single_turn, tool_name, tool_use
from rlkit.environments.session import FunctionSession
from rlkit.notebook.data import Conversation, GenerationConfig, Prompt, Rollout
from rlkit.notebook.generation import drawn_seed, engine_of, played, policy_of, scores
from rlkit.notebook.kl import compute_forward_kl
from rlkit.notebook.views import Arguments, as_reward, call_as_given, conversation_of, view
from rlkit.rewards import score
from rlkit.types import Environment, Messages, Task, Tool, ToolCall, ToolParser, ToolResult

DEFAULT = GenerationConfig()
TEMPLATE = ("use_chat_template", "template_fn", "system_prompt")  # hooks of the prompt


def create_rollout(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    gen_config: GenerationConfig = DEFAULT,
    reward_fn: Any = None,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    **hooks: Any,
) -> Rollout:
    """One reply to one prompt, scored. Hooks as in `create_batch_rollouts`."""
    return create_batch_rollouts(model, tokenizer, [prompt], gen_config, reward_fn, ref_model, kl_coef, **hooks)[0]


def create_multiturn_rollout(
    model: Any,
    tokenizer: Any,
    initial_message: Prompt,
    gen_config: GenerationConfig = DEFAULT,
    reward_fn: Any = None,
    max_turns: int = 5,
    tool_parser: Callable[[str], Any] | None = None,
    tool_executor: Callable[[Any], Any] | None = None,
    stop_condition: Callable[[Conversation], bool] | None = None,
    **hooks: Any,
) -> Rollout:
    """One episode of at most `max_turns` replies through the chat template; a reply without a tool call ends it.

    Args:
      tool_parser: (text without thinking) → calls: {"name": …, "args": …} or as OpenAI writes them.
      tool_executor: (call, as the parser gave it) → result, plain or async; its text is what the policy reads.
      stop_condition: (conversation) → True ends the episode, after a reply's calls have been answered.
      hooks: tools (functions, without a tool_executor), and those of `create_batch_rollouts`.
    """
    names: dict[str, Any] = {"tool_parser": tool_parser, "tool_executor": tool_executor, "stop_condition": stop_condition}
    tools, system_prompt = hooks.pop("tools", ()), hooks.pop("system_prompt", None)
    hooks["environment"] = tool_environment(tools, max_turns=max_turns, system_prompt=system_prompt, **names)
    return create_batch_rollouts(model, tokenizer, [initial_message], gen_config, reward_fn, **{"use_chat_template": True, **hooks})[0]


def create_batch_rollouts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    gen_config: GenerationConfig = DEFAULT,
    reward_fn: Any = None,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    *,
    aggregator: Callable[[np.ndarray], float] | None = None,
    kl_fn: Callable[..., Any] | None = None,
    generator: Callable[..., Any] | None = None,
    engine: Any = None,
    environment: Any = None,
    use_chat_template: bool = False,
    template_fn: Callable[..., str] | None = None,
    system_prompt: str | None = None,
    seed: int | None = None,
) -> list[Rollout]:
    """A rollout of each prompt, all sampled as one batch. Their log-probs are the model's, with gradient where gradients are enabled.

    Args:
      prompts: texts, lists of messages or Tasks. A text is read as it is, unless there is a template.
      reward_fn: (rollout) → number, vector or None; a list of these with an `aggregator` (vector) → float; or an rlkit Reward.
      ref_model, kl_coef: kl_coef × KL on the policy's own tokens, by kl_fn (compute_forward_kl), is the kl_penalty.
      generator, template_fn: the document's hooks. engine: None is `rlkit.engines.Cached`. seed: None takes one from torch's generator.
      environment: what the policy talks to (rlkit.environments); None: one reply.
    """
    raw = not (use_chat_template or template_fn) and all(isinstance(prompt, str) for prompt in prompts)
    template: dict[str, Any] = {"template_fn": template_fn, "system_prompt": system_prompt, "enable_thinking": gen_config.enable_thinking}
    policy = policy_of(model, tokenizer, use_chat_template=not raw, **template)
    environment = environment or single_turn(system_prompt=system_prompt)
    sampler = engine_of(generator, gen_config, engine)
    episodes = played(policy, prompts, gen_config, sampler, environment, seed=drawn_seed(seed))
    vectors: dict[int, Any] = {}
    if reward_fn is not None:
        episodes = score(episodes, as_reward(reward_fn, aggregator, vectors if aggregator is None else None))
    logprobs = scores(model, episodes, gen_config)
    penalties = [0.0] * len(episodes)
    if ref_model is not None and kl_coef > 0:
        with torch.no_grad():
            reference = scores(ref_model, episodes, gen_config)
        pairs = [(own.detach()[None], ref[None], torch.ones_like(ref)[None]) for own, ref in zip(logprobs, reference, strict=True)]
        penalties = [kl_coef * float(compute_forward_kl(*pair, kl_fn=kl_fn)) for pair in pairs]
    given = zip(episodes, logprobs, penalties, strict=True)
    rollouts = [view(episode, logprobs=own, kl_penalty=penalty) for episode, own, penalty in given]
    return [r._replace(reward=vectors[i] - r.kl_penalty) if i in vectors else r for i, r in enumerate(rollouts)]


# ---------------------------------------------------------------------------------------------------------------- tools


def tool_environment(
    tools: Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]] = (),
    *,
    max_turns: int = 5,
    tool_parser: Callable[[str], Any] | None = None,
    tool_executor: Callable[[Any], Any] | None = None,
    stop_condition: Callable[[Conversation], bool] | None = None,
    system_prompt: str | None = None,
) -> Environment:
    """What `create_multiturn_rollout` plays in, made of its hooks."""
    functions = dict(tools) if isinstance(tools, Mapping) else {tool_name(tool): tool for tool in tools}
    if functions:
        environment = tool_use(tools=functions, max_turns=max_turns, system_prompt=system_prompt)
    else:
        environment = single_turn(system_prompt=system_prompt)._replace(max_steps=max_turns)
    if functions or tool_parser:
        parser = hermes if tool_parser is None else _parser(tool_parser)
        environment = environment._replace(parse_calls=parser, execute=tool_executor and _executor(tool_executor))
    if stop_condition is None:
        return environment

    async def session(task: Task) -> Stopping:
        return Stopping(environment, task, functions, stop_condition)

    return environment._replace(session=session)


class Stopping(FunctionSession):
    """A session that asks a stop_condition after every answer."""

    def __init__(self, environment: Environment, task: Task, tools: Mapping[str, Tool], stop: Callable[[Conversation], bool]):
        super().__init__(environment, task, tools)
        self.stop = stop

    async def answer(self, rollout: types.Rollout) -> tuple[types.Rollout, Messages | None]:
        """The environment's answer, unless the conversation is to stop."""
        rollout, said = await super().answer(rollout)
        return rollout, None if said is None or self.stop(conversation_of(rollout)) else said


def _parser(tool_parser: Callable[[str], Any]) -> ToolParser:
    def parse(content: str, /) -> tuple[str, list[ToolCall]]:
        found = tool_parser(content)
        rest, calls = found if isinstance(found, tuple) else (content, found)
        return rest, [call if isinstance(call, ToolCall) else _tool_call(call) for call in calls]

    return parse


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    """A call that a tool_parser gave: all that is neither name nor id is its arguments, unless it says which are."""
    function = call.get("function", call)
    rest = {key: value for key, value in function.items() if key not in ("id", "type", "name")}
    arguments = next((rest[key] for key in ("arguments", "args") if key in rest and len(rest) == 1), rest)
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    named = str(call.get("id", "")), str(function.get("name", ""))
    if "function" in call and not isinstance(arguments, Mapping):
        return ToolCall(*named, {}, "Error: the arguments of the call are no JSON object.")
    return ToolCall(*named, Arguments(arguments if isinstance(arguments, Mapping) else rest, call))


def _executor(tool_executor: Callable[[Any], Any]) -> Callable[[ToolCall, Mapping[str, Tool]], Any]:
    """A tool_executor as the core has one. Its results are text as they print; what it raises is an error that the policy reads."""

    async def execute_hook(call: ToolCall, tools: Mapping[str, Tool], /) -> ToolResult:
        async def later(**_: Any) -> str:
            return str(await tool_executor(call_as_given(call)))

        def now(**_: Any) -> str:
            return str(tool_executor(call_as_given(call)))

        return await execute(call, {call.name: later if inspect.iscoroutinefunction(tool_executor) else now}, timeout=None)

    return execute_hook
