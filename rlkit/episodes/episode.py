"""Play one episode, from its first prompt to its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from rlkit.environments import tool_schema
from rlkit.environments.session import blame_environment, open_session, with_state
from rlkit.errors import EpisodeOver, Hung
from rlkit.functional import mix
from rlkit.system import rng
from rlkit.system.copies import copy_value
from rlkit.system.deadline import Countdown, DeadlinePassed, call_user
from rlkit.system.loops import run
from rlkit.system.shared_state import guard_state
from rlkit.types import Environment, Message, Messages, Rollout, Session, Step, Task, Tool

# A function from (rollout so far, new messages, session) to the policy's reply as a step. It
# returns None if the context leaves no room for a reply.
Say = Callable[[Rollout, Messages, Session], Awaitable[Step | None]]


async def play(
    task: Task,
    environment: Environment,
    say: Say,
    *,
    group: int = 0,
    sample: int = 0,
    seed: int = 0,
    said: Callable[[], None] = lambda: None,
    spent: Callable[[float], None] = lambda seconds: None,
    so_far: Callable[[Rollout], None] = lambda rollout: None,
) -> Rollout:
    """Play one episode: prompt, reply, the session's answer, reply, … The episode ends when the
    session has no further message, or when a limit is reached.

    After each reply, the checks come in this order. If the reply reached its length limit, the
    episode is truncated. Then the session answers, and it may end the episode. If the session has
    not ended the episode, the step limit may truncate it.

    Args:
      say: function that returns the policy's reply. All handling of tokens is in this function
        (`rlkit.episodes.replies.make_speaker`).
      group, sample: position of the prompt in the batch, and of this episode among the samples of
        its prompt.
      seed: seed of the random generators of python, numpy and torch while the session runs. Each
        answer of the session has its own seed, derived from this one.
      said: called after the last message, before the session is asked for its end state and closed.
        Both may take a while.
      spent: called at the end with the seconds that the episode spent in its session.
      so_far: called with the rollout each time a step is added.
    Returns: the unscored rollout. `truncation` is "context" (no room for a reply), "length",
      "steps", "deadline", "error" (a call outlasted its limit), or the session's own reason.
    Raises: EnvironmentFailed if the environment's code raises, and every error of `say`.
    """
    played = [Rollout(task, (), group=group, sample=sample)]

    def keep(rollout: Rollout) -> None:
        played.append(rollout)
        so_far(rollout)

    try:
        return await _play_to_the_end(played[0], environment, say, seed, said, spent, keep)
    except Hung as error:
        said()
        return mark_failed(played[-1], str(error))


async def _play_to_the_end(
    rollout: Rollout,
    environment: Environment,
    say: Say,
    seed: int,
    said: Callable[[], None],
    spent: Callable[[float], None],
    keep: Callable[[Rollout], None],
) -> Rollout:
    """Do the work of `play`, but raise Hung if a call into the environment outlasts its time
    limit."""
    task = rollout.task
    limit = Countdown(environment.deadline)
    session = None
    # the session gets a copy of the rollout, so it cannot change the training rows or the record
    theirs = copy_value(rollout)
    async with AsyncExitStack() as stack:
        stack.callback(lambda: spent(limit.spent))
        try:
            async with limit.running():
                session = await rng.await_with_seed(
                    mix(seed, 0), stack.enter_async_context(open_session(environment, theirs.task))
                )
                prompt: Messages | None = await rng.await_with_seed(
                    mix(seed, 1), _first_prompt(session, theirs.task)
                )
            while prompt is not None:
                step = await say(rollout, prompt, session)
                if step is None:
                    rollout = cut_off(rollout, "context")
                    break
                rollout = rollout.add(step)
                # only the tokens beyond the step before, as in the record
                theirs = theirs._replace(steps=(*theirs.steps, copy_value(rollout.steps[-1])))
                keep(rollout)
                if step.finish_reason == "length":
                    rollout = cut_off(rollout, "length")
                    break
                async with limit.running():
                    with blame_environment("answer", task):
                        given = theirs
                        draws = mix(seed, 1 + len(rollout.steps))
                        theirs, prompt = await rng.await_with_seed(draws, _answer(session, given))
                        rollout = keep_record(theirs, given, rollout)
                if prompt is not None and len(rollout.steps) >= environment.max_steps:
                    rollout = cut_off(rollout, "steps")
                    prompt = None
        except DeadlinePassed:
            rollout = cut_off(rollout, "deadline")
        except EpisodeOver:
            rollout = cut_off(rollout, "environment")
        said()
        return rollout if session is None else await with_state(rollout, session)


def keep_record(said: Rollout, given: Rollout, record: Rollout) -> Rollout:
    """Return an episode's record, updated with the changes of a session. A session receives a copy
    of the record, and may change rewards, results, metadata and the ending in the copy.

    The returned rollout keeps the objects of `record` for the task, the metadata, the prompts and
    the calls, unless the session has replaced an object.

    Args:
      said: the rollout in the session's answer.
      given: the copy of `record` that the session received.
      record: the rollout before the session's answer.
    """

    def merge_step(own: Step, before: Step, kept: Step) -> Step:
        if own is before:
            return kept
        prompt = kept.prompt if own.prompt is before.prompt else copy_value(own.prompt)
        calls = (
            kept.tool_calls if own.tool_calls is before.tool_calls else copy_value(own.tool_calls)
        )
        return own._replace(prompt=prompt, tool_calls=calls)

    known = zip(said.steps, given.steps, record.steps, strict=False)
    steps = tuple(merge_step(*three) for three in known) + copy_value(
        said.steps[len(record.steps) :]
    )
    task = record.task if said.task is given.task else copy_value(said.task)
    metadata = record.metadata if said.metadata is given.metadata else copy_value(said.metadata)
    return said._replace(task=task, steps=steps, metadata=metadata)


class Opening(NamedTuple):
    """Hold the start of an episode: the first prompt, the tools with their schemas, and the
    session's state."""

    prompt: list[Message]
    tools: Mapping[str, Tool]
    schemas: list[dict[str, Any]]
    state: Mapping[str, Any]


def read_opening(task: Task, environment: Environment) -> Opening:
    """Read the first prompt, the tools and the state of an episode without playing it. The
    episode's session is opened, read and closed."""

    async def look() -> Opening:
        own = copy_value(task)
        async with open_session(environment, own) as session:
            prompt = await _first_prompt(session, own)
            tools = session.tools
            state = (await with_state(Rollout(own, ()), session)).state
            return Opening(
                list(prompt), tools, [tool_schema(tool) for tool in tools.values()], state
            )

    with guard_state(environment):
        return run(look())


def cut_off(rollout: Rollout, why: str) -> Rollout:
    """Return the rollout marked as truncated by this limit."""
    return rollout._replace(status="truncated", truncation=why)


def mark_failed(rollout: Rollout, why: str) -> Rollout:
    """Return the rollout marked as truncated by a failure of its environment. Such a rollout is not
    scored, because the failure was not the policy's."""
    return cut_off(rollout, "error")._replace(error=why)


async def _first_prompt(session: Session, task: Task) -> Messages:
    """Return the session's first prompt. A plain text becomes a user's message. Raises:
    EnvironmentFailed if the session returns no prompt."""
    with blame_environment("first prompt", task):
        said = await call_user("the environment's first prompt", session.first_prompt)
        return _messages(said)


def _messages(said: Any) -> Messages:
    """Return a copy of a session's messages. A plain text becomes a user's message. Raises:
    TypeError for any other value."""
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if not (isinstance(said, list | tuple) and said and all(map(_is_message, said))):
        raise TypeError(f"it must be messages, each with a role, or a text; it is {said!r:.200}")
    return copy_value(said)  # the session may change its own list later


def _is_message(said: Any) -> bool:
    return (
        isinstance(said, dict)
        and isinstance(said.get("role"), str)
        and isinstance(said.get("content"), str | None)
    )


async def _answer(session: Session, rollout: Rollout) -> tuple[Rollout, Messages | None]:
    """Ask a session for its answer. Raises: TypeError if the answer is not a pair of a rollout and
    messages or None, or if it truncates the rollout and also has messages."""
    answer: Any = await call_user("the environment's answer", session.answer, rollout)
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], Rollout)):
        raise TypeError(
            f"a session's answer must be (rollout, next messages or None); it is {answer!r:.200}"
        )
    rollout, said = answer
    if said is not None and rollout.status == "truncated":
        raise TypeError(
            "a session's answer truncates the rollout but also has next messages; return None as"
            " the messages when you truncate"
        )
    return rollout, None if said is None else _messages(said)
