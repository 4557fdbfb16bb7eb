"""Record the episodes of programs that send whole conversations. For each request, find the
recorded conversation that it continues, or begin a new training row.

Every recorded reply knows its predecessor, so an episode is a forest, and each path from a root to
a leaf is one training row. If a conversation begins with a recorded conversation and its reply, the
recorded token ids are used for this part. Any other conversation (rewritten, compacted, with other
tools, of a sub-agent) is rendered from its messages and begins a new tree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from rlkit.episodes.episode import cut_off
from rlkit.episodes.replies import check_generation, read_reply
from rlkit.errors import Hung, TemplateError
from rlkit.extras.programs.contract import Ask, Ended, RequestRefused
from rlkit.extras.programs.record import Call, Schemas, Tree
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

# A request of at least this many bytes is rendered in a thread. A smaller request takes a few
# milliseconds.
LARGE = 1 << 16
REMEMBERED = 256  # number of replies that an endpoint without an end remembers


class Read(NamedTuple):
    """Hold a conversation as the policy reads it."""

    parent: Call | None  # the recorded reply that it continues; None: it begins a new tree
    dropped: bool  # whether it has no parent because the client dropped the thinking of a reply
    messages: list[Message]  # the messages after the parent's reply
    ids: tuple[int, ...]  # token ids of these messages

    @property
    def length(self) -> int:
        """Return the number of tokens in the whole context."""
        return len(self.ids) + (self.parent.length if self.parent else 0)


class Conversations:
    """Sample and record the replies of one program's episode.

    Args:
      params: sampling parameters of the episode.
      seed: seed of the episode. The seed of a reply is mix(seed, number of replies before it on its
        path), so it does not depend on the order of requests. The k-th further reply to the same
        context has mix(seed, number of replies before it, k).
      keys: iterator over new keys for the engine.
      ready: function to await before the first reply.
      strict_thinking: whether a conversation is a different one if a reply comes back without its
        thinking.
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
        self.continued: set[int] = set()  # numbers of replies that a later reply continues
        self.drawn: Counter[int] = Counter()  # hash of a context → number of replies to it
        self.numbered = 0  # number of tool calls so far, for their ids
        # number of requests; the limit that refused the last request, or ""
        self.asked = 0
        self.refused = ""
        # a key kept for the next request, without a reply in progress
        self.resting: int | None = None
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
        """Return the policy's reply to a conversation (see `rlkit.extras.programs.Ask`)."""
        if self.asked >= self.environment.max_steps:
            self.refused = "steps"
            raise RequestRefused(
                f"the episode has had its {self.environment.max_steps} replies"
                " (environment.max_turns)"
            )
        self.asked += 1
        after = len(self.calls) - 1 if self.calls else None
        try:
            read = await self._read_aside(messages, tools, size)
            if read.length >= self.policy.context_length:
                self.refused = "context"
                raise RequestRefused(
                    f"context_length_exceeded: the conversation has {read.length} tokens, and the"
                    f" context is {self.policy.context_length}"
                )
        except RequestRefused:  # a request without a reply uses up none
            self.asked -= 1
            raise
        context = hash(read.ids)
        if read.parent is not None:
            context = hash((read.parent.context, read.parent.step.response_ids, read.ids))
        step = await self._sampled(read, context, limit, stop)
        self.refused = ""
        self._record(read, tools, step, stop, after, context)
        return step

    async def count(self, messages: Messages, tools: Schemas = (), *, size: int = 0) -> int:
        """Return the number of tokens in the context of a reply (see
        `rlkit.extras.programs.Ask`)."""
        return (await self._read_aside(messages, tools, size)).length

    async def _read_aside(self, messages: Messages, tools: Schemas, size: int) -> Read:
        """Read a conversation as `_read` does. A large request is read in a thread, so the engine
        can decode meanwhile."""
        read = partial(self._read, messages, tools)
        try:
            return read() if size < LARGE else await run_in_worker(read, None, "")
        except TemplateError as error:
            raise RequestRefused(str(error)) from error

    def _read(self, messages: Messages, tools: Schemas) -> Read:
        """Find the recorded reply that a conversation continues, and render the messages after it.
        Without such a reply, render the whole conversation."""
        new = next((i for i, m in enumerate(reversed(messages)) if m["role"] == "assistant"), 0)
        before = messages[: len(messages) - new] if new else []
        strict, bare = self.trees
        found = strict.replies(tools, before) if before else ()
        behind = messages[len(before) :]
        answered = {m["tool_call_id"] for m in behind if m["role"] == "tool"}

        def rank(call: Call) -> tuple[bool, bool, int]:
            """Prefer a reply whose calls are answered, then one that nothing continues yet."""
            own = not answered.isdisjoint(c.id for c in call.step.tool_calls)
            return own, call.number not in self.continued, call.number

        parent = max(found, key=rank, default=None)
        behind = behind if parent else messages
        own = copy_value(list(behind))  # because the program may change its own messages later
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
        """Sample the reply to a context. The content of the step still contains the stop text."""
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
            reply = end_at(self.policy, ids, reply, stop)
            start = Rollout(self.task, ())
            step = read_reply(self.policy, self.environment, start, read.messages, ids, reply)
        except Exception as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise
        finally:
            self.sampling.discard(key)
            # An engine that decodes by rounds waits for the next request with the key that it has
            # answered last. So the episode keeps one key for its next request. While other replies
            # are in progress, and after its last allowed reply, it keeps none.
            over = self.asked >= self.environment.max_steps
            if over or self.sampling or self.resting is not None:
                self.engine.release(key)
            else:
                self.resting = key
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
        """Record a reply. Its recorded content ends before the stop text, as in the reply to the
        program."""
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
        # If the last token has text after the stop text, the program never sees this text. So no
        # later reply can continue the row.
        if whole:
            for tree, place in zip(self.trees, places, strict=True):
                tree.ends[place].append(call)

    def _named(self, messages: Messages, parent: Call) -> list[Message]:
        """Add to each tool result the name of its call, as rlkit's environments do."""
        names = {call.id: call.name for call in parent.step.tool_calls}
        return [
            {**m, "name": names.get(m["tool_call_id"], "")} if m["role"] == "tool" else m
            for m in messages
        ]

    def release(self) -> None:
        """Release all keys of the episode at the engine."""
        for key in [*self.sampling, *(() if self.resting is None else (self.resting,))]:
            self.engine.release(key)
        self.resting = None

    def rollout(self) -> Rollout:
        """Join all replies to one rollout. The paths of the forest follow one after another, so
        most replies directly follow their predecessor.

        The newest reply is the last step. `metadata["rows"]` describes each further training row:
        `step` is its first step, `from` is its origin, and `why` is the reason. With `fork`, the
        row branches off at the reply `from`, and the common context is not trained on twice. With
        `new`, the client sent a new or changed context. With `thinking`, the client left out the
        thinking of a reply. In the last two cases, `from` is the last reply before the request.
        """
        children: dict[int | None, list[Call]] = {}
        last: dict[int, int] = {}  # number of the newest reply of each subtree
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
                row = {
                    "step": i,
                    "from": None if origin is None else place[origin],
                    "why": "fork" if call.parent else why,
                }
                # a context that begins with all tokens before it continues the row in training
                begun += [row] if kept < ordered[i - 1].length else []
            steps.append(step)
        metrics = self._metrics(len(begun) + bool(ordered))
        metadata = {"rows": begun} if begun else {}
        return Rollout(self.task, tuple(steps), metadata=metadata, metrics=metrics)

    def _metrics(self, rows: int) -> dict[str, float]:
        """Count the rows and the prompt tokens of the episode, and those of rows that begin because
        thinking was dropped."""
        dropped = [len(call.step.prompt_ids) for call in self.calls if call.dropped]
        prompts = sum(len(call.step.prompt_ids) for call in self.calls)
        return {
            "program/rows": float(rows),
            "program/thinking_rows": float(len(dropped)),
            "program/prompt_tokens": float(prompts),
            "program/thinking_tokens": float(sum(dropped)),
        }


def _add_results(call: Call, children: list[Call]) -> Step:
    """Add the results of the step's tool calls, read from the next request. A result that begins
    with `Error` counts as a failure."""
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
    """Read the calls of a reply. If one call is broken, the client gets the whole content and no
    calls, as with vLLM's parsers. The broken calls are recorded."""
    text, calls = parse(content)
    broken = [call for call in calls if call.error]
    return (content, broken) if broken else (text, calls)


Program = Callable[[Task, Ask], Awaitable[Ended]]


def asking(
    program: Program, *, strict_thinking: bool = True
) -> Callable[[Playing], Awaitable[Rollout]]:
    """Make the function `Environment.play` from an async function (task, ask) → Ended, which asks
    for the policy's replies itself.

    Args:
      program: the async function. It sends whole conversations, and may send several at the same
        time.
      strict_thinking: whether a conversation is a different one if a reply comes back without its
        thinking.
    """
    return partial(_play, program, strict_thinking)


async def _play(program: Program, strict_thinking: bool, at: Playing) -> Rollout:
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

    Returns: the unscored rollout. `truncation` is the one of `Ended` (deadline, error), if it is
      set. Otherwise it is "steps" or "context" if this limit refused the last request, and "length"
      if the last reply was truncated. If the program crashes after an unreadable call, the policy
      is to blame, and the crash does not count as a truncation.
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
    except Hung as error:  # an async function has swallowed its cancellation
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
