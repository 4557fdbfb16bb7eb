"""The multi-turn loop: tasks in, whole episodes out. The same function serves training, evaluation and plain rollouts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlkit.environments import environment_of, execute, split_reply, tool_schema
from rlkit.errors import EnvironmentFailed, RLKitError, place
from rlkit.functional import mix
from rlkit.models.chat import continuation, encode_prompt
from rlkit.types import (
    Environment,
    FinishReason,
    Generate,
    Generation,
    Message,
    Messages,
    Policy,
    Rollout,
    Session,
    Step,
    Task,
    ToolResult,
    Transition,
)


class Turn(NamedTuple):
    """An episode that waits for the policy: what is new in its context, and the whole context as ids."""

    rollout: Rollout
    environment: Environment
    seed: int
    prompt: tuple[Message, ...]
    context: tuple[int, ...]
    dropped: int = 0  # exchanges that the context no longer holds
    session: Session | None = None  # of an environment with state


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
      settings: for the engine (temperature, max_new_tokens, …). Where an environment drops its oldest turns, `max_new_tokens` is the
        room that a context has to leave.
    Returns: unscored rollouts, task by task, samples of a task side by side.
    """
    waiting = open_episodes(policy, tasks, environment=environment, group_size=group_size, seed=seed, step=step, first=first)
    places = [(turn.rollout.group, turn.rollout.sample) for turn in waiting]
    done: dict[tuple[int, int], Rollout] = {}

    def finish(rollout: Rollout) -> None:
        done[rollout.group, rollout.sample] = rollout
        if on_done is not None:
            on_done(rollout)

    if "follow" in inspect.signature(generate).parameters:
        play_through(policy, waiting, finish, generate=generate, **settings)
        waiting = []
    while waiting:
        following = play_turns(policy, waiting, generate=generate, **settings)
        waiting = [after for after in following if isinstance(after, Turn)]
        for rollout in (after for after in following if isinstance(after, Rollout)):
            finish(rollout)
    return [done[place] for place in places]


def open_episodes(
    policy: Policy,
    tasks: Sequence[Task],
    *,
    environment: Environment | Callable[[Task], Environment],
    group_size: int = 1,
    seed: int = 0,
    step: int = 0,
    first: int = 0,
) -> list[Turn]:
    """The first turns of all episodes, task by task, samples of a task side by side. Arguments as in `collect`."""
    opened = [open_episode(policy, task, environment_of(environment, task), group=i) for i, task in enumerate(tasks, first)]
    return [
        turn._replace(rollout=turn.rollout._replace(sample=j), seed=mix(seed, step, turn.rollout.group, j), session=own_session(turn))
        for turn in opened
        for j in range(group_size)
    ]


def play_turns(policy: Policy, turns: Sequence[Turn], *, generate: Generate, **settings: Any) -> list[Turn | Rollout]:
    """One reply in every episode, all of them one batch, and what follows each: the next turn, or the finished rollout."""
    fitting = [turn for turn in turns if fits(policy, turn)]
    replies = generate(policy, [turn.context for turn in fitting], list(map(reply_seed, fitting)), **settings) if fitting else []
    answered = zip(fitting, replies, strict=True)
    return [after_reply(policy, *next(answered), **settings) if fits(policy, turn) else overflow(turn) for turn in turns]


def play_through(policy: Policy, turns: Sequence[Turn], finish: Callable[[Rollout], None], *, generate: Generate, **settings: Any) -> None:
    """All episodes to their ends, by an engine that goes on with an episode as soon as its reply is there."""
    playing = [turn for turn in turns if fits(policy, turn)]
    for turn in turns:
        if not fits(policy, turn):
            finish(overflow(turn))

    def follow(index: int, reply: Generation) -> tuple[tuple[int, ...], int] | None:
        after = after_reply(policy, playing[index], reply, **settings)
        if isinstance(after, Turn) and not fits(policy, after):
            after = overflow(after)
        if isinstance(after, Rollout):
            finish(after)
            return None
        playing[index] = after
        return after.context, reply_seed(after)

    if playing:
        generate(policy, [turn.context for turn in playing], list(map(reply_seed, playing)), follow=follow, **settings)


def fits(policy: Policy, turn: Turn) -> bool:
    """Whether the context leaves room for a reply."""
    return len(turn.context) < policy.context_length


def reply_seed(turn: Turn) -> int:
    """The seed of the reply to come."""
    return mix(turn.seed, len(turn.rollout.steps))


def after_reply(policy: Policy, turn: Turn, reply: Generation, **settings: Any) -> Turn | Rollout:
    """`advance`, and the end of the episode's own state where the episode ends."""
    after = advance(policy, turn, reply, room=settings.get("max_new_tokens") or 1)
    return ended(turn, after) if isinstance(after, Rollout) else after


def overflow(turn: Turn) -> Rollout:
    """The episode whose context leaves no room for a reply."""
    return ended(turn, _truncated(turn.rollout, "context"))


def ended(turn: Turn, rollout: Rollout) -> Rollout:
    """The finished rollout; the episode's own state is closed."""
    if turn.session is not None:
        turn.session.close()
    return rollout


def own_session(turn: Turn) -> Session | None:
    """The episode's own state, where its environment has any."""
    with blamed("session", turn.rollout.task):
        return turn.environment.open(turn.rollout.task) if turn.environment.open else None


def open_episode(policy: Policy, task: Task, environment: Environment, *, group: int) -> Turn:
    """The first turn of a task's episodes: its samples share everything but their number and seed."""
    with blamed("first prompt", task):
        prompt = tuple(environment.first_prompt(task))
        tools = [tool_schema(tool) for tool in environment.tools(task).values()]
    context = tuple(encode_prompt(policy.codec, prompt, tools))
    return Turn(Rollout(task, (), group=group), environment, 0, prompt, context)


def advance(policy: Policy, turn: Turn, reply: Generation, *, room: int = 1) -> Turn | Rollout:
    """What follows a reply: the next turn, or the finished rollout. `room`: tokens of a reply, for `next_context`.

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
    with blamed("stop", rollout.task):
        if environment.stop(rollout, index):
            return rollout
    if step.tool_calls:
        step = step._replace(tool_results=answer_calls(rollout, environment))
        rollout = rollout._replace(steps=(*rollout.steps[:-1], step))
        messages: Messages | None = [
            {"role": "tool", "tool_call_id": r.id, "name": r.name, "content": r.content} for r in step.tool_results
        ]
    else:
        with blamed("next prompt", rollout.task):
            following = (turn.session or environment).next_prompt(rollout, index)
        if isinstance(following, Transition):
            rollout = rollout._replace(steps=(*rollout.steps[:-1], step._replace(reward=following.reward)))
            rollout = rollout._replace(metadata={**rollout.metadata, **following.metadata})
            if following.truncation:
                return _truncated(rollout, following.truncation)
            following = following.prompt
        messages = [{"role": "user", "content": following}] if isinstance(following, str) else following
    if messages is None:
        return rollout
    if len(rollout.steps) >= environment.max_steps:
        return _truncated(rollout, "steps")
    context, dropped = next_context(policy, rollout, environment, messages, room=room)
    return turn._replace(rollout=rollout, prompt=tuple(messages), context=context, dropped=dropped)


@contextmanager
def blamed(what: str, task: Task) -> Iterator[None]:
    """Says of an error in the environment's own code which part raised it, for which task, and in which file and line."""
    try:
        yield
    except RLKitError:
        raise
    except Exception as error:
        raise EnvironmentFailed(
            f"the environment's {what} raised {type(error).__name__}: {error} at {place(error)}, in an episode of task {task.id!r}"
        ) from error


def read_reply(policy: Policy, turn: Turn, reply: Generation) -> Step:
    """A reply as a step: the ids as sampled, and what they say."""
    ended = bool(reply.token_ids) and reply.token_ids[-1] in policy.eos_token_ids
    tags = policy.codec.thinking
    thinking, content, closed = split_reply(tags, reply.token_ids[: -1 if ended else None], opened=tags.opened(turn.context))
    with blamed("parser of tool calls", turn.rollout.task):
        content, calls = turn.environment.parse_calls(content)
    first = turn.rollout.steps[0].prompt if turn.rollout.steps else turn.prompt
    number = sum(len(m.get("tool_calls") or ()) for m in first) + sum(len(s.tool_calls) for s in turn.rollout.steps)
    return Step(
        prompt=turn.prompt,
        prompt_ids=turn.context,
        response_ids=reply.token_ids,
        logprobs=reply.logprobs,
        finish_reason=finish_reason(reply, tools=bool(calls)),
        thinking=thinking,
        content=content,
        thinking_closed=closed,
        tool_calls=tuple(call._replace(id=f"call_{number + i}") for i, call in enumerate(calls)),
        forced=reply.forced,
        dropped=turn.dropped,
    )


def finish_reason(reply: Generation, *, tools: bool) -> FinishReason:
    """How a reply ended, as FinishReason orders it. `tools`: it holds tool calls."""
    if reply.finish_reason == "length":
        return "length"
    return "budget" if reply.forced else "tool" if tools else "stop"


def answer_calls(rollout: Rollout, environment: Environment) -> tuple[ToolResult, ...]:
    """Runs the calls of the last step in order; those beyond the limit are answered with a sentence the policy can read."""
    tools: Mapping[str, Callable[..., Any]] = environment.tools(rollout.task)
    limit, run = environment.max_calls, environment.execute or execute
    refusal = f"Error: at most {limit} calls in one reply; this one was not run."
    return tuple(
        run(call, tools) if i < limit else ToolResult(call.id, call.name, refusal, ok=False)
        for i, call in enumerate(rollout.steps[-1].tool_calls)
    )


def next_context(
    policy: Policy, rollout: Rollout, environment: Environment, messages: Messages, *, room: int = 1
) -> tuple[tuple[int, ...], int]:
    """The ids of the next context, and how many exchanges it has dropped.

    keep_thinking appends: previous context + sampled ids + what the template writes between replies.
    strip_thinking renders the conversation afresh without earlier thinking.

    With `drop_oldest`, a context that leaves less than `room` tokens loses its oldest exchanges, a reply and what was said to it (a tool's
    results, a user's message) each, until it leaves them or one exchange is left. The first prompt and the last exchange always stay, so
    roles alternate and every result follows its call. What is dropped stays dropped. keep_thinking cuts exchanges out of the token
    stream: those that stay are the ids that were sampled.
    """
    context = _appended if environment.history == "keep_thinking" else _rendered
    dropped = rollout.steps[-1].dropped
    ids = context(policy, rollout, environment, messages, dropped)
    if environment.overflow == "drop_oldest":
        while len(ids) + room > policy.context_length and dropped < len(rollout.steps) - 1:
            dropped += 1
            ids = context(policy, rollout, environment, messages, dropped)
    return ids, dropped


def _rendered(policy: Policy, rollout: Rollout, environment: Environment, messages: Messages, dropped: int) -> tuple[int, ...]:
    history = rollout.history(len(rollout.steps), thinking=False, dropped=dropped)
    if messages and messages[0]["role"] != "tool":  # results are part of the history already
        history += messages
    tools = [tool_schema(tool) for tool in environment.tools(rollout.task).values()]
    return tuple(encode_prompt(policy.codec, history, tools))


def _appended(policy: Policy, rollout: Rollout, environment: Environment, messages: Messages, dropped: int) -> tuple[int, ...]:
    last, kept = rollout.steps[-1], len(rollout.steps[0].prompt_ids)
    sizes: list[int] = []  # ids of each exchange; the context of step k + 1 is the first prompt and the exchanges up to k that it holds
    for step in rollout.steps[1:]:
        sizes.append(len(step.prompt_ids) - kept - sum(sizes[step.dropped :]))
    before = last.prompt_ids[:kept] + last.prompt_ids[kept + sum(sizes[last.dropped : dropped]) :]
    return before + last.response_ids + tuple(continuation(policy.codec, messages, last.response_ids[-1]))


def _truncated(rollout: Rollout, why: str) -> Rollout:
    return rollout._replace(status="truncated", truncation=why)
