"""The multi-turn loop: tasks in, whole episodes out. The same function serves training, evaluation and plain rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rlkit.environments import environment_of, execute, split_thinking, tool_schema
from rlkit.functional import mix
from rlkit.models.chat import continuation, decode, encode_prompt
from rlkit.types import Environment, Generate, Generation, Message, Messages, Policy, Rollout, Step, Task, ToolResult


class Turn(NamedTuple):
    """An episode that waits for the policy: what is new in its context, and the whole context as ids."""

    rollout: Rollout
    environment: Environment
    seed: int
    prompt: tuple[Message, ...]
    context: tuple[int, ...]


def collect(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    generate: Generate,
    environment: Environment | Callable[[Task], Environment],
    group_size: int = 1,
    seed: int = 0,
    step: int = 0,
    first: int = 0,
    on_done: Callable[[Rollout], None] | None = None,
    **settings: Any,
) -> list[Rollout]:
    """Runs `group_size` independent episodes per task; all episodes that wait are generated as one batch.

    Args:
      policy: what is sampled from; its mode and gradients are the engine's business.
      tasks: the prompts, one group each.
      generate: the engine.
      environment: one for all tasks, or a function that gives each task its own.
      group_size: samples per task, > 0.
      seed, step: of the run and of the RL step. With the position of the task and the sample they are all the randomness
        there is (rlkit.functional.mix), so the same call gives the same rollouts in any batch, on any rank.
      first: position of the first task, where these are further prompts of the same step.
      on_done: called with each episode once it is over.
      settings: for the engine (temperature, max_new_tokens, …).
    Returns: unscored rollouts, task by task, samples of a task side by side.
    """
    opened = [open_episode(policy, task, environment_of(environment, task), group=i) for i, task in enumerate(tasks, first)]
    waiting = [
        turn._replace(rollout=turn.rollout._replace(sample=j), seed=mix(seed, step, turn.rollout.group, j))
        for turn in opened
        for j in range(group_size)
    ]
    done: dict[tuple[int, int], Rollout] = {}

    def finish(rollout: Rollout) -> None:
        done[rollout.group, rollout.sample] = rollout
        if on_done is not None:
            on_done(rollout)

    while waiting:
        fitting = [turn for turn in waiting if len(turn.context) < policy.context_length]
        for turn in waiting:
            if len(turn.context) >= policy.context_length:
                finish(_truncated(turn.rollout, "context"))
        seeds = [mix(turn.seed, len(turn.rollout.steps)) for turn in fitting]
        replies = generate(policy, [turn.context for turn in fitting], seeds, **settings) if fitting else []
        waiting = []
        for turn, reply in zip(fitting, replies, strict=True):
            after = advance(policy, turn, reply)
            if isinstance(after, Turn):
                waiting.append(after)
            else:
                finish(after)
    return [done[turn.rollout.group, j] for turn in opened for j in range(group_size)]


def open_episode(policy: Policy, task: Task, environment: Environment, *, group: int) -> Turn:
    """The first turn of a task's episodes: its samples share everything but their number and seed."""
    prompt = tuple(environment.first_prompt(task))
    tools = [tool_schema(tool) for tool in environment.tools(task).values()]
    context = tuple(encode_prompt(policy.codec, prompt, tools))
    return Turn(Rollout(task, (), group=group), environment, 0, prompt, context)


def advance(policy: Policy, turn: Turn, reply: Generation) -> Turn | Rollout:
    """What follows a reply: the next turn, or the finished rollout.

    The order of the checks: a reply cut by length truncates; `stop` terminates; tool calls are answered; else the
    environment's next prompt, and where there is none the episode terminates. The step limit truncates what would go on.
    """
    environment = turn.environment
    step = read_reply(policy, turn, reply)
    rollout = turn.rollout._replace(steps=(*turn.rollout.steps, step))
    index = len(rollout.steps) - 1
    if reply.finish_reason == "length":
        full = len(step.prompt_ids) + len(step.response_ids) >= policy.context_length
        return _truncated(rollout, "context" if full else "length")
    if environment.stop(rollout, index):
        return rollout
    if step.tool_calls:
        step = step._replace(tool_results=answer_calls(rollout, environment))
        rollout = rollout._replace(steps=(*rollout.steps[:-1], step))
        messages: Messages | None = [
            {"role": "tool", "tool_call_id": r.id, "name": r.name, "content": r.content} for r in step.tool_results
        ]
    else:
        following = environment.next_prompt(rollout, index)
        messages = [{"role": "user", "content": following}] if isinstance(following, str) else following
    if messages is None:
        return rollout
    if len(rollout.steps) >= environment.max_steps:
        return _truncated(rollout, "steps")
    context = next_context(policy, rollout, environment, messages)
    return turn._replace(rollout=rollout, prompt=tuple(messages), context=context)


def read_reply(policy: Policy, turn: Turn, reply: Generation) -> Step:
    """A reply as a step: the ids as sampled, and what they say."""
    ended = bool(reply.token_ids) and reply.token_ids[-1] in policy.eos_token_ids
    text = decode(policy.codec, reply.token_ids[: -1 if ended else None])
    thinking, content, closed = split_thinking(text)
    content, calls = turn.environment.parse_calls(content)
    first = turn.rollout.steps[0].prompt if turn.rollout.steps else turn.prompt
    number = sum(len(m.get("tool_calls") or ()) for m in first) + sum(len(s.tool_calls) for s in turn.rollout.steps)
    return Step(
        prompt=turn.prompt,
        prompt_ids=turn.context,
        response_ids=reply.token_ids,
        logprobs=reply.logprobs,
        finish_reason=reply.finish_reason,
        thinking=thinking,
        content=content,
        thinking_closed=closed,
        tool_calls=tuple(call._replace(id=f"call_{number + i}") for i, call in enumerate(calls)),
    )


def answer_calls(rollout: Rollout, environment: Environment) -> tuple[ToolResult, ...]:
    """Runs the calls of the last step in order; those beyond the limit are answered with a sentence the policy can read."""
    tools: Mapping[str, Callable[..., Any]] = environment.tools(rollout.task)
    limit, run = environment.max_calls, environment.execute or execute
    refusal = f"Error: at most {limit} calls in one reply; this one was not run."
    return tuple(
        run(call, tools) if i < limit else ToolResult(call.id, call.name, refusal, ok=False)
        for i, call in enumerate(rollout.steps[-1].tool_calls)
    )


def next_context(policy: Policy, rollout: Rollout, environment: Environment, messages: Messages) -> tuple[int, ...]:
    """The ids of the next context.

    keep_thinking appends: previous context + sampled ids + what the template writes between replies.
    strip_thinking renders the conversation afresh without earlier thinking.
    """
    if environment.history == "strip_thinking":
        history = rollout.history(len(rollout.steps), thinking=False)
        if messages and messages[0]["role"] != "tool":  # results are part of the history already
            history += messages
        tools = [tool_schema(tool) for tool in environment.tools(rollout.task).values()]
        return tuple(encode_prompt(policy.codec, history, tools))
    last = rollout.steps[-1]
    return last.prompt_ids + last.response_ids + tuple(continuation(policy.codec, messages, last.response_ids[-1]))


def _truncated(rollout: Rollout, why: str) -> Rollout:
    return rollout._replace(status="truncated", truncation=why)
