"""Episodes of programs that send whole conversations: find the recorded part by token ids, and the
start of a new row.

Every recorded reply knows its predecessor, so an episode is a forest and each path from a root to a
leaf is one training row. If a conversation begins with a recorded one, its reply as sent included,
it continues by the recorded ids. Any other conversation (rewritten, compacted, with other tools, of
a sub-agent) is rendered, and begins a tree of its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

from rlkit.episodes.episode import cut_off
from rlkit.episodes.replies import check_generation, read_reply
from rlkit.errors import Hung, TemplateError
from rlkit.extras.programs.contract import Ask, Ended, RequestRefused
from rlkit.extras.programs.record import Call, Schemas, Tree
from rlkit.extras.programs.slots import AtMost
from rlkit.extras.programs.stopping import cut_at, end_at
from rlkit.extras.programs.wire import reply_message
from rlkit.functional import mix
from rlkit.models.chat import check_template, continuation, encode_prompt
from rlkit.system.copies import copy_value
from rlkit.system.deadline import run_in_worker
from rlkit.system.loops import await_value, closing, get_result, is_over, wait_for_tasks, wind_up
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
    agreement,
)

# Bytes of a request that is rendered in a thread. A smaller one takes a few milliseconds.
LARGE = 1 << 16


class Read(NamedTuple):
    """A conversation as the policy reads it."""

    parent: Call | None  # the recorded reply before it
    dropped: bool  # it has none because the client dropped the thinking of a reply
    messages: list[Message]  # behind this reply
    ids: tuple[int, ...]  # of these messages

    @property
    def length(self) -> int:
        """Tokens of the whole context."""
        return len(self.ids) + (self.parent.length if self.parent else 0)


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
        self.calls: list[Call] = []
        self.trees = Tree(thinking=strict_thinking), Tree(thinking=False)
        self.continued: set[int] = set()  # numbers of replies with another one behind them
        self.drawn: Counter[int] = Counter()  # hash of a context → replies to it
        self.numbered = 0  # tool calls, for their ids
        # requests; the limit met by the last one
        self.asked = 0
        self.refused = ""
        self.resting: int | None = None  # the key without a reply in progress
        self.sampling: set[int] = set()
        self.failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def ask(
        self,
        messages: Messages,
        tools: Schemas = (),
        limit: int | None = None,
        *,
        stop: Sequence[str] = (),
        size: int = 0,
    ) -> Step:
        """See `rlkit.extras.programs.Ask`."""
        if self.asked >= self.environment.max_steps:
            self.refused = "steps"
            raise RequestRefused(
                f"the episode has had its {self.environment.max_steps} replies"
                " (environment.max_turns)"
            )
        self.asked += 1
        after = len(self.calls) - 1 if self.calls else None
        read = await self._read_aside(messages, tools, size)
        if read.length >= self.policy.context_length:
            self.asked -= 1
            self.refused = "context"
            raise RequestRefused(
                f"context_length_exceeded: the conversation has {read.length} tokens, and the"
                f" context is {self.policy.context_length}"
            )
        context = hash(read.ids)
        if read.parent is not None:
            context = hash((read.parent.context, read.parent.step.response_ids, read.ids))
        step = await self._sampled(read, context, limit, stop)
        self.refused = ""
        self._record(read, tools, step, stop, after, context)
        return step

    async def count(self, messages: Messages, tools: Schemas = (), *, size: int = 0) -> int:
        """Tokens of the context of a reply. See `rlkit.extras.programs.Ask`."""
        return (await self._read_aside(messages, tools, size)).length

    async def _read_aside(self, messages: Messages, tools: Schemas, size: int) -> Read:
        """`_read`, for a large request in a thread, so that the engine decodes meanwhile."""
        read = partial(self._read, messages, tools)
        try:
            return read() if size < LARGE else await run_in_worker(read, None, "")
        except TemplateError as error:
            raise RequestRefused(str(error)) from error

    def _read(self, messages: Messages, tools: Schemas) -> Read:
        """Find the recorded reply that a conversation continues, and render the messages behind it;
        or render all of it."""
        new = next((i for i, m in enumerate(reversed(messages)) if m["role"] == "assistant"), 0)
        before = messages[: len(messages) - new] if new else []
        strict, bare = self.trees
        found = strict.replies(tools, before) if before else ()
        fresh = (call for call in reversed(found) if call.number not in self.continued)
        parent = next(fresh, found[-1] if found else None)
        behind = messages[len(before) :] if parent else messages
        own = copy_value(list(behind))  # the program may go on with its own
        renderer = self.policy.renderer
        dropped = parent is None and bool(before) and bool(bare.replies(tools, before))
        if parent is None:
            check_template(renderer, tools)
            ids = encode_prompt(renderer, own, tools)
        else:
            own = self._named(own, parent)
            last = parent.step.response_ids[-1]
            cut = last not in self.policy.eos_token_ids
            ids = continuation(renderer, own, last, cut=cut)
        return Read(parent, dropped, own, tuple(ids))

    async def _sampled(
        self, read: Read, context: int, limit: int | None, stop: Sequence[str]
    ) -> Step:
        """Sample the reply to a context. The step's content still holds the stop text."""
        depth = read.parent.depth + 1 if read.parent else 0
        ids = (*read.parent.ids, *read.ids) if read.parent else read.ids
        twin = self.drawn[context]
        self.drawn[context] += 1
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
            reply = await await_value(self.engine.generate(key, ids, seed, params))
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
        reply = end_at(self.policy, ids, reply, stop)
        start = Rollout(self.task, ())
        step = read_reply(self.policy, self.environment, start, read.messages, ids, reply)
        given = sum(len(m.get("tool_calls") or ()) for m in read.messages)
        first = max(self.numbered, given)
        self.numbered = first + len(step.tool_calls)
        calls = (c._replace(id=f"call_{first + i}") for i, c in enumerate(step.tool_calls))
        kept = len(ids) - len(read.ids)
        return step._replace(tool_calls=tuple(calls), prompt_ids=read.ids, kept=kept)

    def _record(
        self,
        read: Read,
        tools: Schemas,
        step: Step,
        stop: Sequence[str],
        after: int | None,
        context: int,
    ) -> None:
        """Record a reply. Its content ends before a stop text, as for the program."""
        content, stopped = cut_at(step.content, stop)
        whole = content + stopped == step.content
        step = step._replace(content=content)
        said = [*read.messages, reply_message(step, content)]
        begun = read.parent.places if read.parent else [tree.begin(tools) for tree in self.trees]
        strict, bare = (
            tree.extend(place, said) for tree, place in zip(self.trees, begun, strict=True)
        )
        depth = 0
        if read.parent is not None:
            depth = read.parent.depth + 1
            self.continued.add(read.parent.number)
        number = len(self.calls)
        places = strict, bare
        call = Call(number, read.parent, after, step, read.dropped, depth, context, places)
        self.calls.append(call)
        # If the last token goes on behind the stop text, the program never saw the rest of it, and
        # no later reply continues the row.
        if whole:
            for tree, place in zip(self.trees, places, strict=True):
                tree.ends[place].append(call)

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
        steps: list[Step] = []
        begun: list[dict[str, Any]] = []
        for i, call in enumerate(ordered):
            step = _add_results(call, children.get(call.number, []))
            if i and call.parent is not ordered[i - 1]:
                kept = agreement(ordered[i - 1].ids, call.prompt_ids)
                step = step._replace(prompt_ids=call.prompt_ids[kept:], kept=kept)
                origin = call.after if call.parent is None else call.parent.number
                why = "thinking" if call.dropped else "new"
                begun.append(
                    {
                        "step": i,
                        "from": None if origin is None else place[origin],
                        "why": "fork" if call.parent else why,
                    }
                )
            steps.append(step)
        metrics = self._metrics(len(begun) + bool(ordered))
        metadata = {"rows": begun} if begun else {}
        return Rollout(self.task, tuple(steps), metadata=metadata, metrics=metrics)

    def _metrics(self, rows: int) -> dict[str, float]:
        """Rows and prompt tokens of the episode, and of the rows begun by dropped thinking."""
        dropped = [len(call.step.prompt_ids) for call in self.calls if call.dropped]
        prompts = sum(len(call.step.prompt_ids) for call in self.calls)
        return {
            "program/rows": float(rows),
            "program/thinking_rows": float(len(dropped)),
            "program/prompt_tokens": float(prompts),
            "program/thinking_tokens": float(sum(dropped)),
        }


def _add_results(call: Call, children: list[Call]) -> Step:
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
    ask = Ask(conversations.ask, conversations.count)
    work = asyncio.ensure_future(program(copy_value(conversations.task), ask))
    assert isinstance(work, asyncio.Task)
    try:
        await wait_for_tasks([work, conversations.failure], until=is_over)
        if conversations.failure.done():
            raise conversations.failure.result()
        ended = get_result(work)
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
