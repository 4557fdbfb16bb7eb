"""Rollouts: whole episodes from a model, a tokenizer and prompts, every hook a function. The loop is the one of training."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from statistics import fmean
from typing import Any

from torch import nn

import rlkit.functional as F
from rlkit.environments import dialogue, execute, hermes, tool_name
from rlkit.episodes import assemble, collect
from rlkit.notebook.data import GenerationConfig, Prompt, as_prompt, as_task
from rlkit.notebook.generation import Asked, Generator, TemplateFn, engine_of, policy_of
from rlkit.notebook.kl import KLHook, compute_forward_kl, compute_kl
from rlkit.notebook.stacked import episodes_of, plain
from rlkit.notebook.tensors import score_batch
from rlkit.notebook.turns import Turn, begin, reply
from rlkit.rewards import Reward, Term, weighted_sum
from rlkit.rewards import score as score_rollouts
from rlkit.types import Environment, Message, Policy, Rollout, Step, Task, Tool, ToolCall, ToolParser, ToolResult

Tools = Mapping[str, Callable[..., Any]] | Sequence[Callable[..., Any]]

# ---------------------------------------------------------------------------------------------------- the environment


def create_environment(
    *,
    prompt_generator_fn: Callable[[Rollout, int], Any] | None = None,
    termination_fn: Callable[[Rollout, Step], bool] | None = None,
    stop_condition: Callable[[list[Message]], bool] | None = None,
    tools: Tools = (),
    tool_parser: Callable[[str], Any] | None = None,
    tool_executor: Callable[[dict[str, Any]], str] | None = None,
    system_prompt: str | None = None,
    max_steps: int = 50,
) -> Environment:
    """What a policy talks to, made of hooks.

    Args:
      prompt_generator_fn: (rollout, step) → the next user message, or messages, or None, which ends the episode; `step` counts replies
        from 0. Without one, a reply that calls no tool ends it.
      termination_fn: (rollout, last_step) → True ends the episode as terminated. stop_condition: (conversation) → True does as well.
      tools: typed functions with docstrings. tool_parser: (text without thinking) → list of calls, ToolCalls or OpenAI's dicts; one that
        gives (text without the calls, calls), as `hermes`, says what of a text is the call.
      tool_executor: (call, as an OpenAI dict) → str in place of calling the function.
      max_steps: replies of an episode; what would go on after the last one is truncated.
    """
    functions = dict(tools) if isinstance(tools, Mapping) else {tool_name(tool): tool for tool in tools}
    called = bool(functions or tool_parser or tool_executor)

    def stop(rollout: Rollout, step: int) -> bool:
        return check_termination_conditions(rollout, termination_fn, stop_condition)

    environment = dialogue(
        prompt_fn=prompt_generator_fn,
        termination_fn=stop,
        tools=functions,
        max_turns=max_steps,
        system_prompt=system_prompt,
        history="keep_thinking" if called else "strip_thinking",
    )
    if called:
        environment = environment._replace(parse_calls=hermes if tool_parser is None else _parser(tool_parser))
    return environment if tool_executor is None else environment._replace(execute=_executor(tool_executor))


def environment_from(
    environment: Environment | Callable[[Task], Environment] | None, **hooks: Any
) -> Environment | Callable[[Task], Environment]:
    """The environment that is given, or one of the hooks."""
    if environment is not None and (odd := sorted({*hooks} - {"max_steps"})):
        raise ValueError(f"the environment that is given knows nothing of {', '.join(odd)}; give one or the other")
    return environment or create_environment(**hooks)


def check_termination_conditions(
    rollout: Rollout,
    termination_fn: Callable[[Rollout, Step], bool] | None = None,
    stop_condition: Callable[[list[Message]], bool] | None = None,
) -> bool:
    """Whether an episode is over after its last reply. The step limit is no such condition: it truncates."""
    if termination_fn is not None and termination_fn(rollout, rollout.steps[-1]):
        return True
    return stop_condition is not None and bool(stop_condition(rollout.conversation))


def _parser(tool_parser: Callable[[str], Any]) -> ToolParser:
    def parse(content: str, /) -> tuple[str, list[ToolCall]]:
        found = tool_parser(content)
        rest, calls = found if isinstance(found, tuple) else (hermes(content)[0], found)
        return rest, [call if isinstance(call, ToolCall) else _tool_call(call) for call in calls]

    return parse


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    """A call as OpenAI writes it; arguments that are no object become an error that the policy reads."""
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        arguments = None
    if not isinstance(arguments, Mapping):
        return ToolCall(str(call.get("id", "")), str(function.get("name", "")), {}, "Error: the arguments of the call are no JSON object.")
    return ToolCall(str(call.get("id", "")), str(function.get("name", "")), arguments)


def _executor(tool_executor: Callable[[dict[str, Any]], str]) -> Callable[[ToolCall, Mapping[str, Tool]], Any]:
    async def execute_hook(call: ToolCall, tools: Mapping[str, Tool], /) -> ToolResult:
        given = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        return await execute(call, {call.name: lambda **_: tool_executor(given)}, timeout=None)

    return execute_hook


# ------------------------------------------------------------------------------------------------------- the episodes


def initialize_rollouts(
    policy: Policy,
    initial_prompts: Sequence[Prompt] | Callable[[int], Sequence[Prompt]],
    n: int | None = None,
    *,
    environment: Environment | Callable[[Task], Environment],
    num_rollouts: int = 1,
    seed: int = 0,
    step: int = 0,
) -> list[Turn | Rollout]:
    """The first turns of episodes that wait for the policy.

    Args:
      initial_prompts: prompts, or initial_prompts_generator (n) → list. n: how many of them; None: all.
      num_rollouts: episodes of each prompt; no two share a list. seed, step: all the randomness there is.
    """
    tasks = _tasks(initial_prompts, n)
    return begin(policy, tasks, environment=environment, group_size=num_rollouts, seed=seed, step=step)


def _tasks(prompts: Sequence[Prompt] | Callable[[int], Sequence[Prompt]], n: int | None) -> list[Task]:
    if callable(prompts):
        if n is None:
            raise ValueError("an initial_prompts_generator needs n, the number of prompts")
        prompts = prompts(n)
    return [as_task(prompt, i) for i, prompt in enumerate(prompts[:n])]


def execute_step(
    policy: Policy,
    turns: Sequence[Turn | Rollout],
    config: GenerationConfig = GenerationConfig(),  # noqa: B008  (immutable)
    *,
    generate: Any = None,
    generator: Generator | None = None,
) -> list[Turn | Rollout]:
    """One reply in every episode that waits, all of them one batch; each becomes its next turn, or the finished Rollout.

    Args:
      turns: of one `initialize_rollouts`; finished rollouts stay as they are. generator: in place of the engine, prompt by prompt.
      generate: the engine, or a plain function for `rlkit.engines.Batched`; None: `rlkit.engines.Transformers`.
    """
    engine = engine_of(generate, config)
    if generator is None:
        return reply(policy, turns, config.params, engine)
    return reply(policy, turns, config.params, engine, lambda turn: Asked(generator, policy, as_prompt(turn.conversation), config))


def run_rollouts(
    model: Any,
    tokenizer: Any,
    initial_prompts: Sequence[Prompt] | Callable[[int], Sequence[Prompt]],
    *,
    n: int | None = None,
    num_rollouts: int = 1,
    reward_fn: Callable[..., Any] | Reward | None = None,
    config: GenerationConfig = GenerationConfig(max_new_tokens=1000),  # noqa: B008  (immutable)
    max_steps: int = 50,
    environment: Environment | Callable[[Task], Environment] | None = None,
    generate: Any = None,
    generator: Generator | None = None,
    template_fn: TemplateFn | None = None,
    use_chat_template: bool = True,
    ref_model: nn.Module | None = None,
    kl_fn: KLHook | None = None,
    seed: int = 0,
    step: int = 0,
    **hooks: Any,
) -> list[Rollout]:
    """Plays whole episodes, all that wait as one batch, and scores them.

    Args:
      initial_prompts, n, num_rollouts, seed, step: of `initialize_rollouts`. generate, generator: of `execute_step`.
      config: how replies are sampled; rollouts to be trained on take `TRAINING`. It is kept in each rollout's metadata.
      environment: None makes one of the hooks, with `max_steps` replies. template_fn, use_chat_template: of `generate_text`.
      ref_model: scores the tokens which the policy sampled; `rollout.kl_penalty` is then their KL by kl_fn (compute_forward_kl).
      hooks: prompt_generator_fn, termination_fn, stop_condition, tools, tool_parser, tool_executor, system_prompt: `create_environment`.
    Returns: prompt by prompt, rollouts of a prompt side by side.
    """
    if kl_fn is not None and ref_model is None:
        raise ValueError("kl_fn is given, and no ref_model to measure a KL from; give one, such as create_reference_model(model)")
    template: dict[str, Any] = {"template_fn": template_fn, "use_chat_template": use_chat_template}
    policy = policy_of(model, tokenizer, enable_thinking=config.enable_thinking, **template)
    tasks = _tasks(initial_prompts, n)
    given: dict[str, Any] = {"environment": environment_from(environment, max_steps=max_steps, **hooks)}
    given |= {"group_size": num_rollouts, "seed": seed, "step": step}
    if generator is None:
        rollouts = with_config(collect(policy, tasks, engine=engine_of(generate, config), **given, **config.params._asdict()), config)
    else:
        rollouts = generated(generator, config, None, policy, tasks, **given)
    if ref_model is not None:
        rollouts = _with_kl(model, ref_model, rollouts, kl_fn or compute_forward_kl, config.params.temperature or 1.0)
    return rollouts if reward_fn is None else assign_rewards(rollouts, reward_fn)


def with_config(rollouts: Sequence[Rollout], config: GenerationConfig) -> list[Rollout]:
    """The rollouts with the config that they were sampled by, for whoever trains on them."""
    return [r._replace(metadata={**r.metadata, "generation": config._asdict()}) for r in rollouts]


def generated(
    generator: Generator,
    config: GenerationConfig,
    reward: Reward | None,
    policy: Policy,
    tasks: Sequence[Task],
    *,
    environment: Environment | Callable[[Task], Environment],
    group_size: int = 1,
    seed: int = 0,
    step: int = 0,
    first: int = 0,
    **_: Any,
) -> list[Rollout]:
    """`rlkit.collect` with a generator in place of the engine; scored where there is a reward."""
    turns = initialize_rollouts(policy, tasks, environment=environment, num_rollouts=group_size, seed=seed, step=step)
    while any(isinstance(turn, Turn) for turn in turns):
        turns = execute_step(policy, turns, config, generator=generator)
    rollouts = [turn._replace(group=turn.group + first) for turn in turns if isinstance(turn, Rollout)]
    return rollouts if reward is None else score_rollouts(rollouts, reward)


def _with_kl(model: nn.Module, ref_model: nn.Module, rollouts: Sequence[Rollout], kl_fn: KLHook, temperature: float) -> list[Rollout]:
    batch = assemble([plain(r) for r in rollouts], pad_token_id=0, device=next(model.parameters()).device)
    positions, mask = episodes_of(batch)
    policy, ref = (F.to_episodes(score_batch(m, batch, temperature).logprobs, positions, mask) for m in (model, ref_model))
    kl = compute_kl(policy, ref, mask, kl_fn).tolist()
    return [r._replace(metadata={**r.metadata, "kl_penalty": value}) for r, value in zip(rollouts, kl, strict=True)]


def create_rollout(model: Any, tokenizer: Any, prompt: Prompt, *, reward_fn: Callable[..., Any] | None = None, **hooks: Any) -> Rollout:
    """One reply to one prompt, scored. Hooks as in `run_rollouts`; without a config it is `GenerationConfig()`."""
    return create_batch_rollouts(model, tokenizer, [prompt], reward_fn=reward_fn, **hooks)[0]


def create_multiturn_rollout(
    model: Any, tokenizer: Any, prompt: Prompt, *, max_turns: int = 5, reward_fn: Callable[..., Any] | None = None, **hooks: Any
) -> Rollout:
    """One episode of at most `max_turns` replies; with tools, or with a prompt_generator_fn that goes on. Hooks as in `run_rollouts`."""
    return create_batch_rollouts(model, tokenizer, [prompt], max_turns=max_turns, reward_fn=reward_fn, **hooks)[0]


def create_batch_rollouts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    *,
    num_rollouts: int = 1,
    max_turns: int = 1,
    reward_fn: Callable[..., Any] | None = None,
    **hooks: Any,
) -> list[Rollout]:
    """`num_rollouts` episodes of each prompt, side by side, all sampled as one batch. Hooks as in `run_rollouts`."""
    settings: dict[str, Any] = {"config": GenerationConfig(), "num_rollouts": num_rollouts, "max_steps": max_turns, "reward_fn": reward_fn}
    return run_rollouts(model, tokenizer, prompts, **settings | hooks)


def assign_rewards(rollouts: Sequence[Rollout], reward_fn: Callable[..., Any] | Reward) -> list[Rollout]:
    """The rollouts with their rewards: by (rollout) → number or None, plain, async or `@batched`, or by a Reward of several terms."""
    return score_rollouts(rollouts, reward_from(reward_fn))


def reward_from(reward_fn: Callable[..., Any] | Reward) -> Reward:
    """A reward_fn as a Reward."""
    return reward_fn if isinstance(reward_fn, Reward) else Reward("reward_fn", {"reward_fn": Term(1.0, reward_fn)}, weighted_sum)


def get_rollout_summary(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Counts and means in plain numbers; `summarize` has many more. `average_reward` is None where nothing could be scored."""
    steps = [rollout.total_steps for rollout in rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    scored = [reward for reward in rewards if reward is not None]
    return {
        "total_rollouts": len(rollouts),
        "average_steps": fmean(steps) if steps else 0.0,
        "min_steps": min(steps, default=0),
        "max_steps": max(steps, default=0),
        "early_terminations": sum(rollout.terminated_early for rollout in rollouts),
        "average_reward": fmean(scored) if scored else None,
        "step_distribution": dict(sorted(Counter(steps).items())),
        "rewards": rewards,
    }


# ------------------------------------------------------------------------------------------------------- the examples

INITIAL_PROMPTS = (
    "Solve step by step: what is 17 times 24?",
    "Write a short story, one sentence at a time.",
    "Plan a week of meals.",
    "Explain how a bicycle stays upright.",
)


def initial_prompts(n: int) -> list[str]:
    """The example initial_prompts_generator: the four of INITIAL_PROMPTS, over and over."""
    return list(islice(cycle(INITIAL_PROMPTS), n))


def early_or_long(rollout: Rollout) -> float:
    """The example reward: half the number of steps for an episode that ended of itself, the number of steps and 10 for one that did not."""
    return 0.5 * rollout.total_steps if rollout.terminated_early else rollout.total_steps + 10.0


def create_random_termination(share: float = 0.1, seed: int = 0) -> Callable[[Rollout, Step], bool]:
    """The example termination_fn: the last reply says DONE; or by chance, after a `share` of the replies, decided by the seed alone."""

    def termination_fn(rollout: Rollout, last_step: Step) -> bool:
        draw = F.mix(seed, rollout.group, rollout.sample, len(rollout.steps)) / 2**63
        return "DONE" in last_step.content or draw < share

    return termination_fn
