"""Episodes of programs that send whole conversations: find the recorded part by token ids, and the
start of a new row.

Every recorded reply knows its predecessor, so an episode is a forest and each path from a root to a
leaf is one training row. If a conversation begins with a recorded one, its reply as sent included,
it continues by the recorded ids. Any other conversation (rewritten, compacted, with other tools, of
a sub-agent) is rendered, and begins a tree of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

from rlkit.episodes.episode import cut_off
from rlkit.episodes.replies import check_generation, read_reply
from rlkit.errors import Hung, TemplateError
from rlkit.extras.programs.contract import Ask, Ended, RequestRefused
from rlkit.extras.programs.slots import AtMost
from rlkit.extras.programs.wire import reply_message
from rlkit.functional import mix
from rlkit.models.chat import check_template, continuation, encode_prompt
from rlkit.system.copies import copied
from rlkit.system.loops import awaited, closing, is_over, result_of, settled, wind_up
from rlkit.types import (
    Engine,
    Environment,
    Message,
    Messages,
    Playing,
    Policy,
    Rollout,
    SamplingParams,
    Step,
    Task,
    ToolCall,
    ToolParser,
    ToolResult,
)

Schemas = Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """A recorded reply."""

    number: int  # in the order of recording
    parent: Call | None  # the reply before it in its row
    after: int | None  # number of the last reply before its request
    step: Step  # with its whole context as prompt_ids
    dropped: bool  # its row begins because the client dropped the thinking of a reply

    @property
    def path(self) -> list[Call]:
        """The replies from the root to this one."""
        return [*(self.parent.path if self.parent else ()), self]


class Conversations:
    """The replies of one program's episode.

    Args:
      params, seed: of the episode. A reply's own seed is mix(seed, replies before it on its path),
        so it does not depend on the order of requests. The k-th reply to one context, for k > 0,
        has mix(seed, replies before it, k).
      keys: gives a new key for the engine.
      ready: awaited before the first reply.
      strict_thinking: a reply that comes back without its thinking makes another conversation.
    """

    def __init__(
        self,
        policy: Policy,
        environment: Environment,
        engine: Engine,
        params: SamplingParams,
        task: Task,
        *,
        seed: int,
        keys: Iterator[int],
        ready: Callable[[], Awaitable[None]],
        strict_thinking: bool = True,
    ):
        self.policy = policy
        parse = environment.parse_calls
        self.environment = environment._replace(parse_calls=parse and partial(read_whole, parse))
        self.engine = engine
        self.params = params
        self.task = task
        self.seed = seed
        self.keys = keys
        self.ready = ready
        self.strict_thinking = strict_thinking
        self.calls: list[Call] = []
        # digest of a conversation with its reply → the replies that end it
        self.known: dict[bytes, list[Call]] = {}
        self.bare: set[bytes] = set()  # digests of the same without thinking
        self.drawn: Counter[tuple[int, ...]] = Counter()  # context → replies to it
        # requests; the limit met by the last one
        self.asked = 0
        self.refused = ""
        self.resting: int | None = None  # the key without a reply in progress
        self.sampling: set[int] = set()
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def ask(self, messages: Messages, tools: Schemas = (), limit: int | None = None) -> Step:
        """See `rlkit.extras.programs.Ask`."""
        if self.asked >= self.environment.max_steps:
            self.refused = "steps"
            raise RequestRefused(
                f"the episode has had its {self.environment.max_steps} replies"
                " (environment.max_turns)"
            )
        self.asked += 1
        messages = copied(messages)  # the program may go on with its own
        digests = self._digests(messages, tools)
        bare = self._digests(messages, tools, thinking=False)
        parent = self._continued(messages, digests)
        known = len(messages) - self._new(messages)
        dropped = parent is None and known < len(messages) and bare[known] in self.bare
        new = self._named(messages[known:], parent) if parent else list(messages)
        try:
            ids = self._context(parent, new, tools)
        except TemplateError as error:
            raise RequestRefused(str(error)) from error
        if len(ids) >= self.policy.context_length:
            self.asked -= 1
            self.refused = "context"
            raise RequestRefused(
                f"context_length_exceeded: the conversation has {len(ids)} tokens, and the context"
                f" is {self.policy.context_length}"
            )
        after = len(self.calls) - 1 if self.calls else None
        step = await self._sampled(parent, new, ids, limit)
        self.refused = ""
        call = Call(len(self.calls), parent, after, step, dropped)
        self.calls.append(call)
        reply = reply_message(step, step.content)
        self.known.setdefault(self._digest(digests[-1], reply), []).append(call)
        self.bare.add(self._digest(bare[-1], reply, thinking=False))
        return step

    async def _sampled(
        self, parent: Call | None, new: list[Message], ids: tuple[int, ...], limit: int | None
    ) -> Step:
        """Sample the reply to a context, as a step."""
        depth = len(parent.path) if parent else 0
        twin = self.drawn[ids]
        self.drawn[ids] += 1
        params = (
            self.params
            if limit is None
            else self.params._replace(max_new_tokens=min(limit, self.params.max_new_tokens))
        )
        seed = mix(self.seed, depth, twin) if twin else mix(self.seed, depth)
        key = next(self.keys) if self.resting is None else self.resting
        self.resting = None
        self.sampling.add(key)
        try:
            await self.ready()
            reply = await awaited(self.engine.generate(key, ids, seed, params))
            check_generation(self.engine, reply)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise
        finally:
            self.sampling.discard(key)
            # An engine that decodes by rounds waits for the last answered key. So the episode keeps
            # one for its next request, and none while others are still in progress.
            if self.sampling or self.resting is not None:
                self.engine.release(key)
            else:
                self.resting = key
        before = Rollout(self.task, tuple(c.step for c in parent.path) if parent else ())
        return read_reply(self.policy, self.environment, before, new, ids, reply)

    def _context(self, parent: Call | None, new: list[Message], tools: Schemas) -> tuple[int, ...]:
        """The ids of a conversation: the row's ids and the new messages, or all of it rendered."""
        renderer = self.policy.renderer
        if parent is None:
            check_template(renderer, tools)
            return tuple(encode_prompt(renderer, new, tools))
        said = parent.step.response_ids
        cut = parent.step.finish_reason == "length"
        return parent.step.prompt_ids + said + tuple(continuation(renderer, new, said[-1], cut=cut))

    def _new(self, messages: Messages) -> int:
        """Count the messages after the last reply."""
        return next(
            (i for i, m in enumerate(reversed(messages)) if m["role"] == "assistant"), len(messages)
        )

    def _continued(self, messages: Messages, digests: list[bytes]) -> Call | None:
        """The recorded reply at the end of this conversation, without the messages after the last
        reply."""
        new = self._new(messages)
        if not 0 < new < len(messages):
            return None
        found = self.known.get(digests[len(messages) - new], [])
        continued = {call.parent.number for call in self.calls if call.parent}
        return next(
            (call for call in reversed(found) if call.number not in continued),
            found[-1] if found else None,
        )

    def _named(self, messages: Messages, parent: Call) -> list[Message]:
        """Add the names of their calls to results of tools, as rlkit's environments do."""
        names = {call.id: call.name for call in parent.step.tool_calls}
        return [
            (
                {
                    "role": "tool",
                    "tool_call_id": m["tool_call_id"],
                    "name": names.get(m["tool_call_id"], ""),
                    "content": m["content"],
                }
                if m["role"] == "tool"
                else m
            )
            for m in messages
        ]

    def _digests(self, messages: Messages, tools: Schemas, *, thinking: bool = True) -> list[bytes]:
        """Make one digest for each number of first messages."""
        out = [hashlib.sha256(json.dumps(list(tools), sort_keys=True).encode()).digest()]
        for message in messages:
            out.append(self._digest(out[-1], message, thinking=thinking))
        return out

    def _digest(self, before: bytes, message: Message, *, thinking: bool = True) -> bytes:
        """Digest a conversation with one more message. White space in a call's arguments and the
        order of its keys make no difference."""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        thought = message.get("reasoning_content", "")
        said = [
            message["role"],
            message.get("content", ""),
            thought if thinking and self.strict_thinking else "",
            calls,
            message.get("tool_call_id", ""),
        ]
        return hashlib.sha256(before + json.dumps(said, sort_keys=True).encode()).digest()

    def release(self) -> None:
        """Make the engine forget the episode."""
        for key in [*self.sampling, *(() if self.resting is None else (self.resting,))]:
            self.engine.release(key)
        self.resting = None

    def rollout(self) -> Rollout:
        """Join the replies to one rollout, path after path, so that a reply follows its predecessor
        wherever possible.

        The newest reply stands last. `metadata["rows"]` describes the start of each row: its step,
        its origin, and the reason. It forks off (`fork`: the common context is not trained twice),
        or it begins with a context of its own. The client changed this context (`new`), or left out
        the thinking of a reply (`thinking`); then `from` is the reply before it in time.
        """
        children: dict[int | None, list[Call]] = {}
        last: dict[int, int] = {}  # the newest reply of a subtree
        for call in reversed(self.calls):
            last[call.number] = max(last.get(call.number, 0), call.number)
            if call.parent is not None:
                last[call.parent.number] = max(last.get(call.parent.number, 0), last[call.number])
            children.setdefault(None if call.parent is None else call.parent.number, []).append(
                call
            )
        ordered: list[Call] = []
        pending = sorted(children.get(None, []), key=lambda c: -last[c.number])
        while pending:
            ordered.append(pending.pop())
            pending += sorted(children.get(ordered[-1].number, []), key=lambda c: -last[c.number])
        place = {call.number: i for i, call in enumerate(ordered)}
        rollout = Rollout(self.task, ())
        begun: list[dict[str, Any]] = []
        for i, call in enumerate(ordered):
            rollout = rollout.add(_answered(call, children.get(call.number, [])))
            if i and (call.parent is None or place[call.parent.number] != i - 1):
                origin = call.after if call.parent is None else call.parent.number
                why = "thinking" if call.dropped else "new"
                begun.append(
                    {
                        "step": i,
                        "from": None if origin is None else place[origin],
                        "why": "fork" if call.parent else why,
                    }
                )
        metrics = self._metrics(len(begun) + bool(ordered))
        return rollout._replace(metadata={"rows": begun} if begun else {}, metrics=metrics)

    def _metrics(self, rows: int) -> dict[str, float]:
        """Rows and prompt tokens of the episode, and of the rows begun by dropped thinking."""
        dropped = [len(call.step.prompt_ids) for call in self.calls if call.dropped]
        prompts = 0
        for call in self.calls:
            before = call.parent.step if call.parent else None
            kept = len(before.prompt_ids) + len(before.response_ids) if before else 0
            prompts += len(call.step.prompt_ids) - kept
        return {
            "program/rows": float(rows),
            "program/thinking_rows": float(len(dropped)),
            "program/prompt_tokens": float(prompts),
            "program/thinking_tokens": float(sum(dropped)),
        }


def _answered(call: Call, children: list[Call]) -> Step:
    """Add the results of the step's calls, from the request after it. A result that begins with
    `Error` is a failure."""
    ids = {c.id: c.name for c in call.step.tool_calls}
    said = [
        m
        for m in (children[-1].step.prompt if children else ())
        if m["role"] == "tool" and m["tool_call_id"] in ids
    ]
    results = [
        ToolResult(
            m["tool_call_id"],
            ids[m["tool_call_id"]],
            m["content"],
            not m["content"].startswith("Error"),
        )
        for m in said
    ]
    return call.step._replace(tool_results=tuple(results))


def read_whole(parse: ToolParser, content: str) -> tuple[str, list[ToolCall]]:
    """Read the calls of a reply. If one is broken, the content stays whole and is no call for the
    client, as with vLLM's parsers; the broken calls are recorded."""
    text, calls = parse(content)
    broken = [call for call in calls if call.error]
    return (content, broken) if broken else (text, calls)


Program = Callable[[Task, Ask], Awaitable[Ended]]


def asking(
    program: Program, *, strict_thinking: bool = True, slots: AtMost | None = None
) -> Callable[[Playing], Awaitable[Rollout]]:
    """Make `Environment.play` of an async function (task, ask) → Ended. It asks for its replies
    itself.

    Args:
      program: asks with whole conversations, several at a time if it likes.
      strict_thinking: a reply that comes back without its thinking makes another conversation.
      slots: each episode holds one while it is played; None: all play at the same time.
    """
    return partial(_play, program, strict_thinking, slots)


async def _play(
    program: Program, strict_thinking: bool, slots: AtMost | None, at: Playing
) -> Rollout:
    async with nullcontext() if slots is None else slots.held(at.give_way):
        conversations = Conversations(
            at.policy,
            at.environment,
            at.engine,
            at.params,
            at.task,
            seed=at.seed,
            keys=at.keys,
            ready=at.ready,
            strict_thinking=strict_thinking,
        )
        return await play_program(program, conversations)


async def play_program(program: Program, conversations: Conversations) -> Rollout:
    """Run the program of an episode to its end.

    Returns: the unscored rollout. `truncation` is the program's (deadline, error). Otherwise it is
      "length" if its last reply was cut, and "steps" or "context" if its last request was refused
      for this. A crash after an unreadable call is the policy's fault and truncates nothing.
    Raises: every error of the engine.
    """
    work = asyncio.ensure_future(program(copied(conversations.task), conversations.ask))
    assert isinstance(work, asyncio.Task)
    try:
        await settled([work, conversations.failure], until=is_over)
        if conversations.failure.done():
            raise conversations.failure.result()
        ended = result_of(work)
    except Hung as error:  # an async function that swallows its cancellation
        ended = Ended("error", error=str(error))
    finally:
        work.cancel()
        with closing(), suppress(asyncio.CancelledError, Exception):
            await wind_up([work])
        conversations.release()
    rollout = conversations.rollout()
    rollout = rollout._replace(metadata={**rollout.metadata, **ended.metadata}, error=ended.error)
    if ended.reward is not None and rollout.steps:
        rollout = rollout._replace(
            steps=(*rollout.steps[:-1], rollout.steps[-1]._replace(reward=ended.reward))
        )
    cut = "length" if rollout.steps and rollout.steps[-1].finish_reason == "length" else ""
    broken = bool(rollout.steps) and any(call.error for call in rollout.steps[-1].tool_calls)
    failure = "" if ended.crashed and broken else ended.truncation
    why = failure or conversations.refused or cut
    return cut_off(rollout, why) if why else rollout
