"""Produce the policy's replies in an episode: turn messages into prompt ids, sample a completion,
and read the completion as a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from rlkit.environments import split_reply, tool_schema
from rlkit.environments.session import blame_environment
from rlkit.environments.tool_parsers import none
from rlkit.episodes.episode import Say
from rlkit.errors import EngineError
from rlkit.functional import mix
from rlkit.models.chat import continuation, encode_prompt
from rlkit.system.loops import await_value
from rlkit.types import (
    Engine,
    Environment,
    FinishReason,
    Generation,
    Messages,
    Policy,
    Rollout,
    SamplingParams,
    Session,
    Step,
    Tool,
    missing,
)

# a function from a first prompt and the tools to the prompt's token ids
Encode = Callable[[Messages, Mapping[str, Tool]], tuple[int, ...]]


def make_speaker(
    policy: Policy,
    environment: Environment,
    engine: Engine,
    params: SamplingParams,
    *,
    key: int,
    seed: int,
    encode: Encode,
) -> Say:
    """Return the function `say` of one episode (see `rlkit.episodes.episode.play`). `say` gets the
    policy's replies from an engine.

    Args:
      params: sampling parameters. If the environment has overflow=drop_oldest, the oldest turns are
        dropped from a prompt until the context has room for `max_new_tokens`.
      key: the number by which the engine identifies the episode.
      seed: the episode's seed. The seed of a reply is mix(seed, number of earlier replies).
      encode: encoder of first prompts; see `make_encoder`.
    """

    async def say(rollout: Rollout, messages: Messages, session: Session) -> Step | None:
        ids, dropped = encode_next_prompt(
            policy,
            rollout,
            environment,
            messages,
            session.tools,
            encode,
            room=params.max_new_tokens,
        )
        if len(ids) >= policy.context_length:
            return None
        reply = await await_value(engine.generate(key, ids, mix(seed, len(rollout.steps)), params))
        check_generation(engine, reply)
        return read_reply(policy, environment, rollout, messages, ids, reply, dropped=dropped)

    return say


def check_engine(engine: Any) -> None:
    """Raise EngineError if this object lacks a method of an engine."""
    absent = missing(engine, Engine)
    if absent:
        hint = callable(engine) * (
            ". Give an instance, not a class; rlkit.engines.Batched makes an engine from a plain"
            " function"
        )
        raise EngineError(
            f"the engine {engine!r:.200} has no `{absent[0]}`; an engine has the methods of"
            f" rlkit.types.Engine{hint}"
        )


def check_generation(engine: Any, reply: Any) -> None:
    """Raise EngineError if an engine's reply cannot be used as a completion. The message says what
    is wrong with the reply."""
    if not isinstance(reply, Generation):
        wrong = f"{reply!r:.200} in place of a rlkit.types.Generation"
    elif not reply.token_ids:
        wrong = "no token; a completion has at least one, the end of the turn"
    elif len(reply.logprobs) != len(reply.token_ids):
        wrong = (
            f"{len(reply.logprobs)} log-probs for {len(reply.token_ids)} tokens; give one per token"
        )
    elif not all(map(isfinite, reply.logprobs)):
        wrong = "a log-prob that is not finite; its weights or its arithmetic are broken"
    elif reply.finish_reason not in ("stop", "length"):
        wrong = f'finish_reason="{reply.finish_reason}"; it is "stop" or "length"'
    else:
        return
    raise EngineError(
        f"generation.engine ({type(engine).__module__}.{type(engine).__qualname__}) gave {wrong}"
    )


def make_encoder(policy: Policy) -> Encode:
    """Return an encoder for the first prompts of one call of `collect`. All samples of a task have
    the same first prompt. Therefore the encoder keeps the ids of each prompt and encodes each
    prompt only once."""
    kept: dict[str, tuple[int, ...]] = {}

    def encode(messages: Messages, tools: Mapping[str, Tool]) -> tuple[int, ...]:
        schemas = [tool_schema(tool) for tool in tools.values()]
        key = repr((messages, schemas))
        if key not in kept:
            kept[key] = tuple(encode_prompt(policy.renderer, messages, schemas))
        return kept[key]

    return encode


def read_reply(
    policy: Policy,
    environment: Environment,
    rollout: Rollout,
    messages: Messages,
    ids: tuple[int, ...],
    reply: Generation,
    *,
    dropped: int = 0,
) -> Step:
    """Turn a completion into a step of the episode. The step holds the sampled ids, and the text
    read from these ids: thinking, content and tool calls. It also holds the finish reason.

    Args:
      rollout: the episode before the reply.
      messages: the new messages of the prompt.
      ids: token ids of the whole prompt.
      reply: the completion from the engine.
      dropped: number of exchanges dropped from the prompt.
    """
    ended = bool(reply.token_ids) and reply.token_ids[-1] in policy.eos_token_ids
    tags = policy.renderer.thinking
    thinking, content, closed = split_reply(
        tags, reply.token_ids[: -1 if ended else None], opened=tags.opened(ids)
    )
    with blame_environment("parser of tool calls", rollout.task):
        content, found = (environment.parse_calls or none)(content)
        calls = tuple(call._replace(id="") for call in found)
    first = rollout.steps[0].prompt if rollout.steps else messages
    number = sum(len(m.get("tool_calls") or ()) for m in first) + sum(
        len(s.tool_calls) for s in rollout.steps
    )
    finish: FinishReason = "tool" if calls else "stop"
    if reply.forced:
        finish = "budget"
    if reply.finish_reason == "length":
        finish = "length"
    return Step(
        prompt=tuple(messages),
        prompt_ids=ids,
        response_ids=reply.token_ids,
        logprobs=reply.logprobs,
        finish_reason=finish,
        thinking=thinking,
        content=content,
        thinking_closed=closed,
        tool_calls=tuple(call._replace(id=f"call_{number + i}") for i, call in enumerate(calls)),
        forced=reply.forced,
        dropped=dropped,
        versions=reply.versions,
    )


def encode_next_prompt(
    policy: Policy,
    rollout: Rollout,
    environment: Environment,
    messages: Messages,
    tools: Mapping[str, Tool],
    encode: Encode,
    *,
    room: int = 1,
) -> tuple[tuple[int, ...], int]:
    """Return the ids of the next prompt, and the number of exchanges dropped from it.

    With history=keep_thinking, the prompt is the previous prompt, the sampled ids, and the
    template's text between replies. With history=strip_thinking, the whole conversation is rendered
    again, without earlier thinking.

    An exchange is a reply with the messages that answer it: a tool's results, or a user's message.
    With overflow=drop_oldest, exchanges are dropped if the prompt leaves less than `room` tokens of
    the context free. The oldest exchange is dropped first, until there is enough room or only the
    last exchange is left. The first prompt and the last exchange always stay, so roles alternate
    and every result follows its call. A dropped exchange is never put back. With keep_thinking, the
    ids of dropped exchanges are removed, and all other ids stay exactly as they were sampled.
    """
    if not rollout.steps:
        return encode(messages, tools), 0

    def rendered(dropped: int) -> tuple[int, ...]:
        if environment.history == "keep_thinking":
            return _append_messages(policy, rollout, messages, dropped)
        last = rollout.steps[-1]._replace(
            tool_results=()
        )  # the messages hold what is shown of them
        before = rollout._replace(steps=(*rollout.steps[:-1], last))
        whole = [*before.history(len(before.steps), thinking=False, dropped=dropped), *messages]
        return tuple(
            encode_prompt(policy.renderer, whole, [tool_schema(tool) for tool in tools.values()])
        )

    dropped = rollout.steps[-1].dropped
    ids = rendered(dropped)
    if environment.overflow == "drop_oldest":
        while len(ids) + room > policy.context_length and dropped < len(rollout.steps) - 1:
            dropped += 1
            ids = rendered(dropped)
    return ids, dropped


def _append_messages(
    policy: Policy, rollout: Rollout, messages: Messages, dropped: int
) -> tuple[int, ...]:
    last = rollout.steps[-1]
    context = rollout.context(-1)
    kept = rollout.steps[0].prompt_length
    # The number of ids of each exchange. The prompt of step k + 1 consists of the first prompt and
    # of the exchanges up to k, without the dropped exchanges.
    sizes: list[int] = []
    for step in rollout.steps[1:]:
        sizes.append(step.prompt_length - kept - sum(sizes[step.dropped :]))
    before = context[:kept] + context[kept + sum(sizes[last.dropped : dropped]) :]
    return (
        before
        + last.response_ids
        + tuple(continuation(policy.renderer, messages, last.response_ids[-1]))
    )
