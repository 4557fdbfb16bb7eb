"""Play episodes from a model, a tokenizer and prompts, as in training, and return them as
rollouts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlkit import types
from rlkit.environments import execute, single_turn
from rlkit.environments.session import FunctionSession
from rlkit.extras.notebook.data import Conversation, GenerationConfig, Hook, Prompt, Rollout
from rlkit.extras.notebook.generation import (
    choose_engine,
    choose_seed,
    played,
    read_prompts,
    scores,
)
from rlkit.extras.notebook.kl import compute_forward_kl
from rlkit.extras.notebook.views import (
    Arguments,
    call_as_given,
    make_conversation,
    view,
    viewed_reward,
)
from rlkit.rewards import score
from rlkit.types import Environment, Messages, Task, Tool, ToolCall, ToolParser, ToolResult

DEFAULT = GenerationConfig()


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
    """Sample and score one reply to one prompt. The hooks are those of `create_batch_rollouts`."""
    return create_batch_rollouts(
        model, tokenizer, [prompt], gen_config, reward_fn, ref_model, kl_coef, **hooks
    )[0]


def create_multiturn_rollout(
    model: Any,
    tokenizer: Any,
    initial_message: Prompt,
    gen_config: GenerationConfig = DEFAULT,
    reward_fn: Any = None,
    max_turns: int = 5,
    tool_parser: Hook = None,
    tool_executor: Hook = None,
    stop_condition: Hook = None,
    **hooks: Any,
) -> Rollout:
    """Play one episode of at most `max_turns` replies through the chat template. A reply without a
    tool call ends it.

    tool_parser: function from a reply's text, without its thinking, to its calls. A call is
      {"name": …, "args": …} or has OpenAI's form. tool_executor: function that runs a call, plain
      or async. stop_condition: called after the calls of a reply have been answered. hooks: those
      of `create_batch_rollouts`.
    """
    hooks["environment"] = tool_environment(max_turns, tool_parser, tool_executor, stop_condition)
    return create_batch_rollouts(
        model,
        tokenizer,
        [initial_message],
        gen_config,
        reward_fn,
        **{"use_chat_template": True, **hooks},
    )[0]


def create_batch_rollouts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    gen_config: GenerationConfig = DEFAULT,
    reward_fn: Any = None,
    ref_model: nn.Module | None = None,
    kl_coef: float = 0.0,
    *,
    aggregator: Hook = None,
    kl_fn: Hook = None,
    generator: Hook = None,
    engine: Any = None,
    environment: Any = None,
    max_turns: int = 5,
    tool_parser: Hook = None,
    tool_executor: Hook = None,
    stop_condition: Hook = None,
    template_fn: Hook = None,
    use_chat_template: bool = False,
    seed: int | None = None,
) -> list[Rollout]:
    """Play one rollout per prompt, all sampled as one batch. The log-probs are computed by the
    model, with gradient if gradients are enabled.

    Without use_chat_template, the model reads texts as they are. The kl_penalty of a rollout is
      kl_coef × KL on the policy's own tokens, computed by kl_fn. environment: the policy's
      counterpart; None: one reply, or up to max_turns with a hook of
      `create_multiturn_rollout`. template_fn: writes the text of each prompt. engine: the sampling
      engine; None: `rlkit.engines.Cached`. seed: seed of the rollouts; None takes a seed from
      torch's generator.
    """
    policy, tasks = read_prompts(
        model, tokenizer, prompts, gen_config, use_chat_template, template_fn
    )
    other = choose_environment(environment, max_turns, tool_parser, tool_executor, stop_condition)
    sampler = choose_engine(generator, gen_config, engine)
    episodes = played(policy, tasks, gen_config, sampler, other, seed=choose_seed(seed))
    vectors: dict[int, Any] = {}
    if reward_fn is not None:
        kept = vectors if aggregator is None else None
        episodes = score(episodes, viewed_reward(reward_fn, aggregator, kept))
    logprobs = scores(model, episodes, gen_config)
    penalties = [0.0] * len(episodes)
    if ref_model is not None and kl_coef > 0:
        with torch.no_grad():
            pairs = zip(logprobs, scores(ref_model, episodes, gen_config), strict=True)
            penalties = [
                kl_coef * float(compute_forward_kl(own, ref, kl_fn=kl_fn)) for own, ref in pairs
            ]
    given = zip(episodes, logprobs, penalties, strict=True)
    rollouts = [view(episode, logprobs=own, kl_penalty=penalty) for episode, own, penalty in given]
    return [
        r._replace(reward=vectors[i] - r.kl_penalty) if i in vectors else r
        for i, r in enumerate(rollouts)
    ]


# -------------------------------------------------------------------------------------------- tools


def choose_environment(environment: Any, max_turns: int, *hooks: Hook) -> Environment:
    """Return the given environment, or one made from the hooks of `tool_environment`, or one of a
    single reply. Raises: ValueError if an environment and hooks are given."""
    if not any(hooks):
        return environment or single_turn()
    if environment is not None:
        raise ValueError(
            "tool_parser, tool_executor and stop_condition make an environment of their own; give"
            " either these or an environment"
        )
    return tool_environment(max_turns, *hooks)


def tool_environment(
    max_turns: int, tool_parser: Hook, tool_executor: Hook, stop_condition: Hook
) -> Environment:
    """Make the environment of `create_multiturn_rollout` from its hooks. Raises: ValueError for a
    tool_executor without a tool_parser."""
    if tool_executor is not None and tool_parser is None:
        raise ValueError("tool_executor is given, and no tool_parser that returns a reply's calls")
    environment = single_turn()._replace(max_steps=max_turns)
    if tool_parser is not None:
        environment = environment._replace(
            parse_calls=_parser(tool_parser), execute=tool_executor and _executor(tool_executor)
        )
    return environment._replace(
        session=stop_condition and (lambda task: Stopping(environment, task, stop_condition))
    )


class Stopping(FunctionSession):
    """Run a session that calls a stop_condition after every answer."""

    def __init__(self, environment: Environment, task: Task, stop: Callable[[Conversation], bool]):
        super().__init__(environment, task, {})
        self.stop = stop

    async def answer(self, rollout: types.Rollout) -> tuple[types.Rollout, Messages | None]:
        """Return the environment's answer. If stop_condition is true, end the episode instead."""
        rollout, said = await super().answer(rollout)
        return rollout, None if said is None or self.stop(make_conversation(rollout)) else said


def _parser(tool_parser: Callable[[str], Any]) -> ToolParser:
    return lambda content: (content, [_tool_call(call) for call in tool_parser(content)])


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    """Read a call returned by a tool_parser. Its arguments are in "arguments" or "args"; without
    these keys, every key except id, type and name is an argument."""
    function = call.get("function", call)
    rest = {key: value for key, value in function.items() if key not in ("id", "type", "name")}
    arguments = rest.get("arguments", rest.get("args"))
    return ToolCall(
        "",
        str(function.get("name", "")),
        Arguments(arguments if isinstance(arguments, Mapping) else rest, call),
    )


def _executor(tool_executor: Callable[[Any], Any]) -> Callable[[ToolCall, Mapping[str, Tool]], Any]:
    """Turn a tool_executor into the core's form. A result is turned into text with `str`. The
    policy reads an error as the result of the call."""

    async def execute_hook(call: ToolCall, tools: Mapping[str, Tool], /) -> ToolResult:
        async def later(**_: Any) -> str:
            return str(await tool_executor(call_as_given(call)))

        def now(**_: Any) -> str:
            return str(tool_executor(call_as_given(call)))

        return await execute(
            call,
            {call.name: later if inspect.iscoroutinefunction(tool_executor) else now},
            timeout=None,
        )

    return execute_hook
