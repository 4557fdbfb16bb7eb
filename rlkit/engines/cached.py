"""The fast engine: continuous batching over a key-value cache that stays where it is, between replies of an episode too.

    waiting contexts ──▶ slot ──▶ its new tokens in one pass ──▶ one token a step, all slots together ──▶ reply
                          ▲                                                                                 │
                          └──────────── the next context of the same episode, its shared beginning kept ◀───┘

A slot that is done takes the next context at once. Where a reply is followed by another turn of its episode (`follow`), only what is new
in the context goes through the model: a long append-only episode costs its new tokens, not its history again. Equal contexts, such as
the samples of one prompt, are read once. The draw is that of the reference engine (rlkit.engines.transformers.draw), from the
rollout's own seed and position: which slot it had, and what stood beside it, changes nothing but the last bits of the arithmetic.

A step asks the host nothing: every slot in use goes through the model, and those that draw nothing are masked. So on CUDA it is captured
as a graph, one for each of a few shapes, and the host looks which replies have ended every few steps; their slots stand still meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.graphs import Graphs, can_capture, fitting
from rlkit.engines.slots import PARTS, Part, Slots, attend, attention_kernels, full_attention, grouped_attention, parts_of
from rlkit.engines.transformers import ThinkingBudget, draw, sampling_mode
from rlkit.engines.transformers import generate as reference
from rlkit.engines.trunk import Trunk, is_known
from rlkit.models.head import trunk_and_head
from rlkit.types import Generation, Policy

Follow = Callable[[int, Generation], "tuple[Sequence[int], int] | None"]
BLOCK = 64  # tokens by which the room of a slot grows
MOST_READ = 1 << 14  # tokens that are read in one pass, padding included


def generate(
    policy: Policy,
    contexts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    /,
    *,
    max_new_tokens: int = 256,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_thinking_tokens: int | None = None,
    max_rows: int = 256,
    max_cached_tokens: int = 1 << 20,
    check_every: int | None = None,
    cuda_graphs: bool = True,
    follow: Follow | None = None,
) -> list[Generation]:
    """Samples one reply per context, and those that follow.

    Args:
      policy, contexts, seeds, max_new_tokens, temperature, top_p, top_k, max_thinking_tokens: as for the reference engine, which decodes in
        place of this one where layers are no full attention.
      max_rows: contexts decoded at once, > 0.
      max_cached_tokens: slots × the longest context that one may reach, > 0: what the cache may hold, on CUDA half of the free memory at
        most. Further contexts wait, and where an episode outgrows its room the youngest wait again; one that is longer than all of it
        has the cache to itself.
      check_every: tokens that every slot draws before the host looks which replies have ended, > 0. None: 1 on a CPU, 8 elsewhere.
        Changes no reply: nothing is drawn behind an end.
      cuda_graphs: the step as CUDA graphs. Without, and where a model cannot be captured, its kernels are started one by one.
      follow: (index of the context, its reply) → (next context, its seed), which is then decoded under the same index; None ends it.
    Returns: the last reply of each, in the order of the contexts.
    Raises: ValueError for arguments out of range.
    """
    if temperature < 0 or min(max_new_tokens, max_rows, max_cached_tokens, check_every or 1) < 1 or check_every == 0:
        raise ValueError(
            f"generation: temperature must be >= 0 (is {temperature}), max_new_tokens, max_rows, max_cached_tokens and check_every >= 1 "
            f"(are {max_new_tokens}, {max_rows}, {max_cached_tokens}, {check_every})"
        )
    if not 0 < top_p <= 1 or top_k < 0:
        raise ValueError(f"generation: top_p must be > 0 and <= 1 (is {top_p}), top_k >= 0 (is {top_k}); 1 and 0 cut nothing")
    causal: Any = policy.model.get_base_model() if hasattr(policy.model, "disable_adapter") else policy.model  # type: ignore[operator]
    numbers: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    if max_thinking_tokens is not None and max_thinking_tokens < 0:
        raise ValueError(f"generation: max_thinking_tokens must be >= 0 or null (is {max_thinking_tokens})")
    numbers["max_thinking_tokens"] = max_thinking_tokens
    if not full_attention(causal.config, policy.context_length):
        return _by_turns(policy, contexts, seeds, follow, **numbers, max_rows=max_rows)
    with sampling_mode(causal), grouped_attention(causal.config), attention_kernels(causal.device):
        decoder = _Decoder(
            causal, policy, contexts, seeds, follow, max_rows=max_rows, max_cached_tokens=max_cached_tokens, check_every=check_every,
            cuda_graphs=cuda_graphs, **numbers,
        )  # fmt: skip
        return decoder.run()


def _by_turns(
    policy: Policy, contexts: Sequence[Sequence[int]], seeds: Sequence[int], follow: Follow | None, **settings: Any
) -> list[Generation]:
    """The reference engine, reply after reply."""
    replies: dict[int, Generation] = {}
    waiting = {i: (context, seed) for i, (context, seed) in enumerate(zip(contexts, seeds, strict=True))}
    while waiting:
        turn = reference(policy, [context for context, _ in waiting.values()], [seed for _, seed in waiting.values()], **settings)
        replies |= zip(waiting, turn, strict=True)
        then = {i: follow(i, replies[i]) if follow is not None else None for i in waiting}
        waiting = {i: following for i, following in then.items() if following is not None}
    return [replies[i] for i in range(len(contexts))]


# ------------------------------------------------------------------------------------------------------- decoding


@dataclass
class _Row:
    """What a slot is busy with. `known` are the ids whose keys and values it holds."""

    index: int
    context: tuple[int, ...]
    seed: int
    known: int = 0  # of the context, from its start, in the cache
    reads: bool = True  # the rest of the context has still to be read


class _Decoder:
    """One call: the queue, the slots, and their state as tensors [S]."""

    def __init__(
        self,
        causal: Any,
        policy: Policy,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        follow: Follow | None,
        *,
        max_rows: int,
        max_cached_tokens: int,
        check_every: int | None,
        cuda_graphs: bool,
        max_new_tokens: int,
        temperature: float,
        max_thinking_tokens: int | None,
        **cut: Any,
    ):
        self.policy, self.follow, self.temperature, self.cut, self.max_new_tokens = policy, follow, temperature, cut, max_new_tokens
        self.causal, (self.trunk, self.head) = causal, trunk_and_head(causal)
        self.device = device = next(causal.parameters()).device
        self.check_every = check_every or (1 if device.type == "cpu" else 8)
        # Shortest last: siblings stay side by side, and what is popped together has nearly one length.
        order = sorted(range(len(contexts)), key=lambda i: (len(contexts[i]), tuple(contexts[i]), -i), reverse=True)
        self.queue = [_Row(i, tuple(contexts[i]), seeds[i]) for i in order]
        self.replies: dict[int, Generation] = {}
        self.max_cached_tokens = min(max_cached_tokens, fitting(causal, device)) if device.type == "cuda" else max_cached_tokens
        room = self.need(max((len(c) for c in contexts), default=1))
        self.slots = slots = max(1, min(max_rows, len(contexts), self.max_cached_tokens // room))  # in use at most
        self.cache = Slots(slots, room, device)
        self.rows: list[_Row] = []  # slot → what it is busy with, without holes
        self.reading: list[int] = []  # slots whose context has still to be read
        self.parts: list[Part] = []  # of the slots in use, before the next step
        self.eos = torch.tensor(policy.eos_token_ids, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        # Of each slot: its last token and where it goes, tokens drawn and their limit, the seed; whether it draws, and whether it has ended
        # since the host looked; the reply, and behind it a column for what slots draw that do not draw.
        self.last, self.position, self.count, self.limit, self.seed = (zeros() for _ in range(5))
        self.draws, self.ended = zeros(dtype=torch.bool), zeros(dtype=torch.bool)
        self.tokens, self.logprobs = zeros(max_new_tokens + 1), zeros(max_new_tokens + 1, dtype=torch.float32)
        self.forced = zeros(max_new_tokens + 1, dtype=torch.bool)
        self.budget = None
        if max_thinking_tokens is not None:
            self.budget = ThinkingBudget(policy.codec.thinking, slots, max_thinking_tokens, device)
        spelled = self.budget is not None and policy.codec.thinking.ids is None  # then each token is looked at on the host
        self.captures = cuda_graphs and can_capture(device) and not spelled
        self.graphs = Graphs(causal, device)
        self.fast = Trunk(self.trunk) if is_known(self.trunk) else None

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All that belongs to a slot beside its keys and values."""
        return (
            self.last, self.position, self.count, self.limit, self.seed, self.draws, self.ended, self.tokens, self.logprobs, self.forced,
        )  # fmt: skip

    def need(self, length: int) -> int:
        """Room for a context of this length and its reply."""
        most = min(length + self.max_new_tokens, self.policy.context_length)
        return -(-max(most, length) // BLOCK) * BLOCK

    def run(self) -> list[Generation]:
        while self.queue or self.rows:
            fresh = range(len(self.rows), min(self.slots, len(self.rows) + len(self.queue)))
            self.rows += [self.queue.pop() for _ in fresh]
            self.wait(fresh)
            if 8 * len(self.reading) >= len(self.rows):  # a pass for fewer costs more than their waiting
                self.read()
            else:
                for _ in range(self.check_every):
                    self.step()
            self.finish()
        return [self.replies[i] for i in sorted(self.replies)]

    def wait(self, slots: Sequence[int]) -> None:
        """The slots draw nothing until they have read; what a step writes there meanwhile is overwritten then."""
        if slots:
            at = self.tensor(slots)
            self.draws[at] = False
            self.position[at] = self.tensor([self.rows[slot].known for slot in slots])
        self.reading = [slot for slot, row in enumerate(self.rows) if row.reads]

    def read(self) -> None:
        """Reads what is new in the contexts of the slots that wait for it, and draws the first token of their replies."""
        room = max(self.need(len(self.rows[slot].context)) for slot in self.reading)
        if room > self.cache.room:
            self.make_room(room)
        slots, self.reading = self.reading, []
        if not slots:  # all of them wait again
            return
        rows = [self.rows[slot] for slot in slots]
        firsts: dict[tuple[int, ...], int] = {}  # fresh context → the slot that reads it
        sources = [slot if row.known else firsts.setdefault(row.context, slot) for slot, row in zip(slots, rows, strict=True)]
        last: dict[int, Tensor] = {}  # slot → hidden state of its last token
        for part in self.portions(sorted(set(sources), key=lambda slot: (self.rows[slot].known > 0, slot))):
            last |= zip(part, self.pass_through(part), strict=True)
        if copies := [(source, slot) for slot, source in zip(slots, sources, strict=True) if slot != source]:
            sources_, targets = torch.tensor(copies, device=self.device).T
            self.cache.copy(sources_, targets, max(len(self.rows[slot].context) for _, slot in copies))
        at = self.tensor(slots)
        lengths = [len(row.context) for row in rows]
        self.position[at] = self.tensor(lengths)
        self.limit[at] = self.tensor([min(self.max_new_tokens, self.policy.context_length - length) for length in lengths])
        self.seed[at] = self.tensor([row.seed for row in rows])
        self.count[at] = 0
        self.draws[at] = True
        if self.budget is not None:
            self.budget.begin(at, [row.context for row in rows])
        for row in rows:
            row.reads = False
        self.draw(at, torch.stack([last[source] for source in sources]))
        self.measure()

    def tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def make_room(self, room: int) -> None:
        """Longer slots. Where as many of them would hold too much, the slots that lose least by it go back to the queue first.

        What they have drawn they draw again, from their own seeds. Room that nobody needs yet is taken along, so that long episodes do not
        move the cache every few turns.
        """
        self.slots = max(1, min(self.slots, self.max_cached_tokens // room))
        surplus = len(self.rows) - self.slots
        if surplus > 0:
            held = self.position[: len(self.rows)].tolist()
            back = sorted(range(len(self.rows)), key=lambda slot: (held[slot], -slot))[:surplus]
            self.queue += [_Row(row.index, row.context, row.seed) for row in (self.rows[slot] for slot in back)]
            self.vacate(back)
        ahead = min(2 * self.cache.room, self.need(self.policy.context_length), self.max_cached_tokens // self.slots // BLOCK * BLOCK)
        self.graphs = Graphs(self.causal, self.device)  # the old ones write where the cache was
        self.cache.resize(self.slots, max(room, ahead))

    def portions(self, slots: list[int]) -> Iterator[list[int]]:
        """Slots that go through the model together: fresh ones or known ones, at most so many tokens with their padding."""
        part: list[int] = []
        width = 0
        for slot in slots:
            row = self.rows[slot]
            mine = len(row.context) - row.known
            if part and (max(width, mine) * (len(part) + 1) > MOST_READ or bool(row.known) != bool(self.rows[part[0]].known)):
                yield part
                part, width = [], 0
            part.append(slot)
            width = max(width, mine)
        yield part

    def pass_through(self, slots: list[int]) -> Tensor:
        """The unread tokens of some slots through the model; the hidden state of each one's last, [R, H]."""
        rows = [self.rows[slot] for slot in slots]
        new = [row.context[row.known :] for row in rows]
        width = max(map(len, new))
        ids = self.tensor([[*tokens, *[self.policy.pad_token_id] * (width - len(tokens))] for tokens in new])
        starts = self.tensor([row.known for row in rows])
        places = starts[:, None] + torch.arange(width, device=self.device)
        # Padding of a row that is nearly full stands in its last place, which no context reaches and a reply overwrites.
        self.cache.rows, self.cache.positions = self.tensor(slots), places.clamp(max=self.cache.room - 1)
        self.cache.length, mask = 0, ids.new_ones(len(rows), 1, 1, 1, dtype=torch.bool)  # fresh: plain causal attention
        if rows[0].known:
            self.cache.length = min(max(row.known for row in rows) + width, self.cache.room)
            mask = (torch.arange(self.cache.length, device=self.device) <= self.cache.positions[..., None])[:, None]
        ends = self.tensor([len(tokens) - 1 for tokens in new])
        return self.forward(ids, mask)[torch.arange(len(rows), device=self.device), ends]

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states [R, m, H]."""
        if self.fast is not None:
            return self.fast(ids, self.cache.positions, partial(self.attention, mask))
        return self.trunk(
            input_ids=ids, attention_mask=mask, position_ids=self.cache.positions, past_key_values=self.cache, use_cache=True
        ).last_hidden_state

    def attention(self, mask: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """To all that these rows may see, [R, m, Hq, D]; the new keys and values are kept."""
        return attend(None, query, *self.cache.update(key, value, layer), mask)[0]

    def measure(self) -> None:
        """How far the slots in use reach. Only a CPU reads them in parts: elsewhere a call costs more, and its shape is captured."""
        reach = self.position[: len(self.rows)] + 1
        if self.rows:
            self.parts = parts_of(reach) if self.device.type == "cpu" and not self.captures else [(0, len(reach), int(reach.max()))]

    def step(self) -> None:
        """One more token in every slot that draws; the others wait for what they read, or to be looked at, and change nothing."""
        slots, length = len(self.rows), max(length for _, _, length in self.parts)
        if self.captures:
            slots, length = coarse(slots, 1, self.slots), coarse(length, BLOCK, self.cache.room)
            self.graphs(slots, length, lambda: self.decode(slots, length))
        else:
            token = PARTS.set(self.parts)
            try:
                self.decode(slots, length)
            finally:
                PARTS.reset(token)
        self.parts = [(start, stop, min(length + 1, self.cache.room)) for start, stop, length in self.parts]

    def decode(self, slots: int, length: int) -> None:
        """A step of the first slots, of which none sees more positions. A function of the state alone, in place, without a host's look."""
        self.cache.rows, self.cache.positions, self.cache.length = None, self.position[:slots, None], length
        seen = torch.arange(length, device=self.device) <= self.cache.positions
        self.draw(self.cache.places[:slots], self.forward(self.last[:slots, None], seen[:, None, None])[:, 0], begun=True)

    def draw(self, at: Tensor, hidden: Tensor, begun: bool = False) -> None:
        """The next token of the slots `at` that draw, from their last hidden states.

        It has not been read yet. Begun: the token before it belongs to the reply, and has been read.
        """
        draws, count = self.draws[at], self.count[at]
        logprobs, choice = draw(self.head(hidden), self.seed[at], count, self.temperature, **self.cut)
        column = count.masked_fill(~draws, self.max_new_tokens)
        forced = None
        if self.budget is not None:
            if begun:
                self.budget.follow(at, self.last[at])
            choice, forced = self.budget.force(at, choice)
            self.forced[at, column] = forced
        token = choice.argmax(1)
        logprob = logprobs.gather(1, token[:, None])[:, 0]
        self.tokens[at, column] = token
        self.logprobs[at, column] = logprob if forced is None else logprob.masked_fill(forced, 0.0)
        count = count + draws
        ended = draws & ((token[:, None] == self.eos).any(1) | (count >= self.limit[at]))
        if begun:
            self.position[at] += draws
        self.last[at], self.count[at] = token, count
        self.draws[at], self.ended[at] = draws & ~ended, self.ended[at] | ended

    def finish(self) -> None:
        """Takes the replies that have ended; their slots go on with the episode, with another context, or are closed."""
        ended = self.ended[: len(self.rows)]
        if not ended.any():
            return
        slots = ended.nonzero()[:, 0]
        self.ended[slots] = False
        counts = self.count[slots].tolist()
        tokens, logprobs = self.tokens[slots, : max(counts)].tolist(), self.logprobs[slots, : max(counts)].tolist()
        forced = [[]] * len(counts) if self.budget is None else self.forced[slots, : max(counts)].tolist()
        goes_on, closed = [], []
        for slot, size, ids, scores, marks in zip(slots.tolist(), counts, tokens, logprobs, forced, strict=True):
            end: Any = "stop" if ids[size - 1] in self.policy.eos_token_ids else "length"
            written = tuple(i for i, mark in enumerate(marks[:size]) if mark)
            reply = Generation(tuple(ids[:size]), tuple(scores[:size]), end, written)
            row = self.rows[slot]
            self.replies[row.index] = reply
            following = self.follow(row.index, reply) if self.follow is not None else None
            if following is None:
                closed.append(slot)
                continue
            context, seed = tuple(following[0]), following[1]
            held = row.context + reply.token_ids[:-1]  # the last token of a reply has been drawn and not read
            self.rows[slot] = _Row(row.index, context, seed, known=min(_common(held, context), len(context) - 1))
            goes_on.append(slot)
        refilled = closed[: len(self.queue)]
        for slot in refilled:
            self.rows[slot] = self.queue.pop()
        self.wait([*goes_on, *refilled])
        self.vacate(closed[len(refilled) :])
        self.measure()

    def vacate(self, slots: list[int]) -> None:
        """Closes slots; the last ones move into the holes, so that those in use are the first."""
        if not slots:
            return
        left, gone = len(self.rows) - len(slots), set(slots)
        movers = [slot for slot in range(left, len(self.rows)) if slot not in gone]
        if movers:
            targets = [slot for slot in slots if slot < left]
            source, target = self.tensor(movers), self.tensor(targets)
            self.cache.copy(source, target, int(self.position[source].max()) + 1)
            for tensor in self.state:
                tensor[target] = tensor[source]
            if self.budget is not None:
                self.budget.move(source, target)
            for mover, hole in zip(movers, targets, strict=True):
                self.rows[hole] = self.rows[mover]
        self.draws[left:] = False  # a step of a coarser number of slots goes through them too
        self.ended[left:] = False
        self.position[left:] = 0
        del self.rows[left:]
        self.reading = [slot for slot, row in enumerate(self.rows) if row.reads]


def coarse(number: int, step: int, most: int) -> int:
    """The next multiple of `step`, which doubles until at most eight make the number: few shapes, and little more than asked for."""
    while number > 8 * step:
        step *= 2
    return min(-(-number // step) * step, most)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How far two lists of ids agree from their start."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
