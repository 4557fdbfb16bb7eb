"""The decoder of the cached engine: which episode has which slot, which slots read, and which draw.

    queue ──▶ slot ──▶ its new tokens in one pass ──▶ one token a step, all slots together ──▶ completion
               ▲                                                                               │
               └────── the next prompt of the same episode, the beginning that it shares kept ◀┘

A slot keeps the keys and values of its episode until the episode is released, so a turn costs its new tokens only. Equal prompts, such
as the samples of a task, are read once. A step asks the host nothing: every slot in use goes through the model, and those that draw
nothing are masked. So on CUDA it is captured as a graph, one for each of a few shapes, and the host looks which completions have ended
every few steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.cached.attention import PARTS, Part, attend, parts_of
from rlkit.engines.cached.cache import BLOCK, Slots, fitting
from rlkit.engines.cached.forward import forward_of
from rlkit.engines.cached.graphs import Graphs, can_capture
from rlkit.engines.cached.sampler import Sampler
from rlkit.models.head import trunk_and_head
from rlkit.types import Generation, Policy, SamplingParams

MOST_READ = 1 << 14  # tokens that are read in one pass, padding included


@dataclass
class Row:
    """What a slot is busy with."""

    key: int
    prompt: tuple[int, ...]
    seed: int
    known: int = 0  # tokens of the prompt, from its start, in the cache
    reads: bool = True  # the rest of the prompt has still to be read
    held: tuple[int, ...] | None = None  # the completion has ended: the ids that the cache holds, until the episode goes on
    released: bool = False


class Scheduler:
    """The decoder: its queue, its slots, and what the model computes for them.

    Args:
      max_rows, max_cached_tokens, check_every, cuda_graphs: see `Cached`.
    """

    cache: Slots  # these four are made by `reserve` and last until `clear`
    sampler: Sampler
    graphs: Graphs
    captures: bool

    def __init__(self, policy: Policy, causal: Any, *, max_rows: int, max_cached_tokens: int, check_every: int | None, cuda_graphs: bool):
        self.policy, self.causal, (self.trunk, self.head) = policy, causal, trunk_and_head(causal)
        self.device = device = next(causal.parameters()).device
        self.max_rows, self.cuda_graphs = max_rows, cuda_graphs
        self.max_cached_tokens = min(max_cached_tokens, fitting(causal, device)) if device.type == "cuda" else max_cached_tokens
        self.check_every = check_every or (1 if device.type == "cpu" else 8)
        self.forward = forward_of(self.trunk)
        self.params: SamplingParams | None = None  # of the completions that are sampled now
        self.rounds = 0
        self.queue: list[Row] = []  # shortest last
        self.changed = False  # whether slots may have to be filled, closed or resumed
        self.rows: list[Row] = []  # slot → what it is busy with, without holes
        self.resumed: list[Row] = []  # rows whose episode goes on
        self.reading: list[int] = []  # slots whose prompt has still to be read
        self.parts: list[Part] = []  # of the slots in use, before the next step
        self.slots, self.capacity = 0, 0  # slots that there are, and positions of each

    # ------------------------------------------------------------------------------------------------ the contract

    @property
    def idle(self) -> bool:
        return not self.queue and not any(row.held is None and not row.released for row in self.rows)

    def accepts(self, params: SamplingParams) -> bool:
        """Completions with other numbers are sampled when those of now have ended."""
        return self.params is None or params == self.params or self.idle

    def submit(self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams) -> None:
        self.changed, prompt = True, tuple(prompt_ids)
        if params != self.params:  # nothing is sampled now
            self.clear()
            self.params = params
        for row in self.rows:
            if row.key == key and row.held is not None and not row.released:
                row.known, row.held = min(_common(row.held, prompt), len(prompt) - 1), None
                row.prompt, row.seed, row.reads = prompt, seed, True
                self.resumed.append(row)
                return
        self.queue.append(Row(key, prompt, seed))

    def release(self, key: int) -> None:
        self.changed, self.queue = True, [row for row in self.queue if row.key != key]
        for row in self.rows:
            row.released = row.released or row.key == key

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Generation]]:
        """A pass over what has still to be read, or a few steps of decoding."""
        if self.changed:
            self.fill()
        # A pass for few costs more than their waiting.
        if self.reading and 8 * len(self.reading) >= sum(row.held is None for row in self.rows):
            self.read()
            self.rounds += 1
        else:
            for _ in range(self.check_every):
                self.step()
            self.rounds += self.check_every
        out = []
        for slot, completion in self.sampler.taken(len(self.rows)):
            row = self.rows[slot]
            row.held = row.prompt + completion.token_ids[:-1]  # the last token of a completion has been drawn and not read
            out.append((row.key, completion))
        self.changed = bool(self.queue)  # what the pass has put back, or what may take a slot that waits now
        return out

    def clear(self) -> None:
        """Forgets every slot and frees their memory."""
        self.rows, self.reading, self.resumed, self.parts = [], [], [], []
        if self.slots:
            del self.cache, self.sampler, self.graphs
        self.slots = self.capacity = 0

    # ------------------------------------------------------------------------------------------------------- slots

    @property
    def most_slots(self) -> int:
        """Slots in use at most."""
        return max(1, min(self.max_rows, self.max_cached_tokens // self.capacity))

    def fill(self) -> None:
        """Slots whose episodes are over go to those that wait, or are closed; the others go on with their new prompts."""
        # Siblings stay side by side, and what is popped together has nearly one length.
        self.queue.sort(key=lambda row: (len(row.prompt), row.prompt, -row.key), reverse=True)
        closed = [slot for slot, row in enumerate(self.rows) if row.released]
        self.reserve(len(self.rows) - len(closed) + len(self.queue))
        if not closed and len(self.rows) >= self.most_slots and all(row.held is not None for row in self.rows):
            closed = self.cheapest(len(self.queue))  # all slots wait for something outside: some give theirs up, and read again
        refilled = closed[: len(self.queue)]
        for slot in refilled:
            self.rows[slot] = self.queue.pop()
        fresh = range(len(self.rows), min(self.most_slots, len(self.rows) + len(self.queue)))
        self.rows += [self.queue.pop() for _ in fresh]
        resumed, self.resumed = {id(row) for row in self.resumed}, []
        if waits := [*(slot for slot, row in enumerate(self.rows) if id(row) in resumed), *refilled, *fresh]:
            # They draw nothing until they have read; what a step writes there meanwhile is overwritten then.
            at = self.tensor(waits)
            self.sampler.draws[at] = False
            self.sampler.position[at] = self.tensor([self.rows[slot].known for slot in waits])
        self.evict(closed[len(refilled) :])
        self.reading = [slot for slot, row in enumerate(self.rows) if row.reads]
        if waits or closed:
            self.measure()

    def reserve(self, wanted: int) -> None:
        """Slots for so many episodes, as far as they may be in use at once."""
        if not self.slots:
            assert self.params is not None
            self.capacity = self.need(max(len(row.prompt) for row in self.queue))
            self.slots = min(self.most_slots, wanted)
            self.cache = Slots(self.slots, self.capacity, self.device)
            self.sampler = Sampler(self.slots, self.policy, self.params, self.device)
            self.graphs = Graphs(self.causal, self.device)
            self.captures = self.cuda_graphs and can_capture(self.device) and not self.sampler.asks_the_host
        elif (more := min(self.most_slots, wanted)) > self.slots:
            self.slots = min(self.most_slots, max(more, 2 * self.slots))
            self.cache.resize(self.slots, self.cache.capacity)
            self.sampler.resize(self.slots)
            self.graphs = Graphs(self.causal, self.device)

    def need(self, length: int) -> int:
        """The capacity that a prompt of this length and its completion need."""
        assert self.params is not None
        most = min(length + self.params.max_new_tokens, self.policy.context_length)
        return -(-max(most, length) // BLOCK) * BLOCK

    def grow(self, capacity: int) -> None:
        """Longer slots. Where as many of them would hold too much, the cheapest lose what they hold; those that draw go back to the queue
        and draw again, from their own seeds.

        They take more than they need now, so that long episodes do not move the cache every few turns.
        """
        before, self.capacity = self.capacity, capacity
        surplus = len(self.rows) - self.most_slots
        if surplus > 0:
            back = self.cheapest(surplus)
            self.queue += [Row(row.key, row.prompt, row.seed) for row in (self.rows[slot] for slot in back) if row.held is None]
            self.evict(back)
        used = min(self.most_slots, max(len(self.rows), self.slots))
        ahead = min(2 * before, self.need(self.policy.context_length), self.max_cached_tokens // used // BLOCK * BLOCK)
        self.capacity = max(capacity, ahead)
        self.graphs = Graphs(self.causal, self.device)  # the old ones write where the cache was
        self.slots = min(self.slots, self.most_slots)
        self.cache.resize(self.slots, self.capacity)
        self.sampler.resize(self.slots)

    def cheapest(self, number: int) -> list[int]:
        """The slots that lose least: first those that wait for their episode, then those that hold least."""
        held = self.sampler.position[: len(self.rows)].tolist()
        return sorted(range(len(self.rows)), key=lambda slot: (self.rows[slot].held is None, held[slot], -slot))[:number]

    def evict(self, slots: list[int]) -> None:
        """Closes slots; the last ones move into the holes, so that those in use are the first."""
        if not slots:
            return
        left, gone = len(self.rows) - len(slots), set(slots)
        movers = [slot for slot in range(left, len(self.rows)) if slot not in gone]
        if movers:
            targets = [slot for slot in slots if slot < left]
            source, target = self.tensor(movers), self.tensor(targets)
            self.cache.copy(source, target, int(self.sampler.position[source].max()) + 1)
            self.sampler.move(source, target)
            for mover, hole in zip(movers, targets, strict=True):
                self.rows[hole] = self.rows[mover]
        self.sampler.stop(left)
        del self.rows[left:]
        self.reading = [slot for slot, row in enumerate(self.rows) if row.reads]

    def tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    # ----------------------------------------------------------------------------------------------------- reading

    def read(self) -> None:
        """Reads what is new in the prompts of the slots that wait for it, and draws the first token of their completions."""
        capacity = max(self.need(len(self.rows[slot].prompt)) for slot in self.reading)
        if capacity > self.capacity:
            self.grow(capacity)
        slots, self.reading = self.reading, []
        if not slots:  # all of them wait again
            return
        rows = [self.rows[slot] for slot in slots]
        firsts: dict[tuple[int, ...], int] = {}  # fresh prompt → the slot that reads it
        sources = [slot if row.known else firsts.setdefault(row.prompt, slot) for slot, row in zip(slots, rows, strict=True)]
        last: dict[int, Tensor] = {}  # slot → hidden state of its last token
        for part in self.micro_batches(sorted(set(sources), key=lambda slot: (self.rows[slot].known > 0, slot))):
            last |= zip(part, self.pass_through(part), strict=True)
        if copies := [(source, slot) for slot, source in zip(slots, sources, strict=True) if slot != source]:
            sources_, targets = torch.tensor(copies, device=self.device).T
            self.cache.copy(sources_, targets, max(len(self.rows[slot].prompt) for _, slot in copies))
        at = self.tensor(slots)
        self.sampler.begin(at, [row.prompt for row in rows], [row.seed for row in rows])
        for row in rows:
            row.reads = False
        self.sampler.draw(at, self.head(torch.stack([last[source] for source in sources])))
        self.measure()

    def micro_batches(self, slots: list[int]) -> Iterator[list[int]]:
        """Slots that go through the model together: fresh ones or known ones, at most so many tokens with their padding."""
        part: list[int] = []
        width = 0
        for slot in slots:
            row = self.rows[slot]
            mine = len(row.prompt) - row.known
            if part and (max(width, mine) * (len(part) + 1) > MOST_READ or bool(row.known) != bool(self.rows[part[0]].known)):
                yield part
                part, width = [], 0
            part.append(slot)
            width = max(width, mine)
        yield part

    def pass_through(self, slots: list[int]) -> Tensor:
        """The unread tokens of some slots through the model; the hidden state of each one's last, [R, H]."""
        rows = [self.rows[slot] for slot in slots]
        new = [row.prompt[row.known :] for row in rows]
        width = max(map(len, new))
        ids = self.tensor([[*tokens, *[self.policy.pad_token_id] * (width - len(tokens))] for tokens in new])
        starts = self.tensor([row.known for row in rows])
        positions = starts[:, None] + torch.arange(width, device=self.device)
        # Padding of a row that is nearly full stands in its last place, which no prompt reaches and a completion overwrites.
        self.cache.rows, self.cache.positions = self.tensor(slots), positions.clamp(max=self.capacity - 1)
        self.cache.length, mask = 0, ids.new_ones(len(rows), 1, 1, 1, dtype=torch.bool)  # fresh: plain causal attention
        if rows[0].known:
            self.cache.length = min(max(row.known for row in rows) + width, self.capacity)
            mask = (torch.arange(self.cache.length, device=self.device) <= self.cache.positions[..., None])[:, None]
        ends = self.tensor([len(tokens) - 1 for tokens in new])
        return self.hidden(ids, mask)[torch.arange(len(rows), device=self.device), ends]

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states [R, m, H] of tokens [R, m] at the cache's positions."""
        if self.forward is not None:
            return self.forward(ids, self.cache.positions, partial(self.attention, mask))
        return self.trunk(
            input_ids=ids, attention_mask=mask, position_ids=self.cache.positions, past_key_values=self.cache, use_cache=True
        ).last_hidden_state

    def attention(self, mask: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
        """To all that these rows may see, [R, m, Hq, D]; the new keys and values are kept."""
        keys, values = self.cache.update(key, value, layer)
        return attend(None, query, keys, values, mask)[0]

    # ---------------------------------------------------------------------------------------------------- decoding

    def measure(self) -> None:
        """How far the slots in use reach. Only a CPU reads them in parts: elsewhere a call costs more, and its shape is captured."""
        reach = self.sampler.position[: len(self.rows)] + 1
        if self.rows:
            self.parts = parts_of(reach) if self.device.type == "cpu" and not self.captures else [(0, len(reach), int(reach.max()))]

    def step(self) -> None:
        """Draw one more token in every slot that draws. Inactive slots are masked: their state does not change."""
        slots, length = len(self.rows), max(length for _, _, length in self.parts)
        if self.captures:
            slots, length = bucket(slots, 1, self.slots), bucket(length, BLOCK, self.capacity)
            self.graphs(slots, length, lambda: self.decode(slots, length))
        else:
            token = PARTS.set(self.parts)
            try:
                self.decode(slots, length)
            finally:
                PARTS.reset(token)
        self.parts = [(start, stop, min(length + 1, self.capacity)) for start, stop, length in self.parts]

    def decode(self, slots: int, length: int) -> None:
        """Run one decode step for the first `slots` slots, none of which sees more than `length` positions.

        Reads and writes only the state tensors, in place, and never synchronises with the host, so it can be captured as a CUDA graph.
        """
        sampler, cache = self.sampler, self.cache
        cache.rows, cache.positions, cache.length = None, sampler.position[:slots, None], length
        seen = torch.arange(length, device=self.device) <= cache.positions
        sampler.draw(cache.indices[:slots], self.head(self.hidden(sampler.last[:slots, None], seen[:, None, None])[:, 0]), begun=True)


def bucket(number: int, step: int, most: int) -> int:
    """The next multiple of `step`, which doubles until at most eight make the number: few shapes, and little more than asked for."""
    while number > 8 * step:
        step *= 2
    return min(-(-number // step) * step, most)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How far two lists of ids agree from their start."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
