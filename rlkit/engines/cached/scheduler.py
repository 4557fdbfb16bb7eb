"""The decoder of the cached engine: which episode has which slot, which slots read, and which draw.

    queue ──▶ slot ──▶ its new tokens in one pass ──▶ one token a step, all slots together ──▶
    completion
               ▲                                                                               │
               └────── the next prompt of the same episode, the beginning that it shares kept ◀┘

A slot keeps the keys and values of its episode until the episode is released, so a turn costs its
new tokens only. Equal prompts, such as the samples of a task, are read once. A step asks the host
nothing: every slot in use goes through the model, and those that draw nothing are masked. So on
CUDA it is captured as a graph, one for each of a few numbers of rooms (cache.py), and the host
looks which completions have ended every few steps. Cache and graphs stay where they are from call
to call, as long as the weights do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.cached.attention import PARTS, Part, attend, parts_of
from rlkit.engines.cached.cache import BLOCK, LONGEST, SHARE, Rooms, Slots, fitting
from rlkit.engines.cached.forward import autocast_type, casts_weights, forward_of, logits_of
from rlkit.engines.cached.graphs import Graphs, Shape, can_capture
from rlkit.engines.cached.kernel import kernel_of
from rlkit.engines.cached.sampler import Sampler
from rlkit.models.head import trunk_and_head
from rlkit.system.adapters import lora_layers
from rlkit.types import Generation, Policy, SamplingParams, agreement

FILL = 0.55  # of the mean completion, for which a room keeps positions when an episode enters it
MOST_READ = 1 << 14  # tokens that are read in one pass, padding included


@dataclass
class Row:
    """What a slot is busy with."""

    key: int
    prompt: tuple[int, ...]
    seed: int
    known: int = 0  # tokens of the prompt, from its start, in the cache
    reads: bool = True  # the rest of the prompt has still to be read
    held: tuple[int, ...] | None = (
        None  # the completion has ended: the ids that the cache holds, until the episode goes on
    )
    released: bool = False
    length: int = 0  # tokens that the cache may hold of it by the next look

    @property
    def active(self) -> bool:
        """Whether it reads or draws."""
        return self.held is None and not self.released


def nobody() -> Row:
    """In a slot that waits for an episode, between slots in use."""
    return Row(-1, (), 0, reads=False, released=True)


class Scheduler:
    """The decoder: its queue, its slots, and what the model computes for them.

    Args:
      max_rows, max_cached_tokens, check_every, cuda_graphs, kernel: see `Cached`.
    """

    sampler: Sampler  # of the numbers that are sampled with now

    def __init__(
        self,
        policy: Policy,
        causal: Any,
        *,
        max_rows: int,
        max_cached_tokens: int,
        check_every: int | None,
        cuda_graphs: bool,
        kernel: str = "auto",
    ):
        self.policy, self.causal, (self.trunk, self.head) = policy, causal, trunk_and_head(causal)
        self.device = device = next(causal.parameters()).device
        self.max_rows = max_rows
        self.max_cached_tokens = (
            min(max_cached_tokens, fitting(causal, device))
            if device.type == "cuda"
            else max_cached_tokens
        )
        self.check_every = check_every or (1 if device.type == "cpu" else 8)
        self.half = autocast_type(device)
        self.forward = forward_of(self.trunk, self.half)
        self.logits = logits_of(self.head, self.forward)
        # graphs may read casts of weights that autocast keeps, and end with it
        self.graphs_end = self.half is not None and casts_weights(self.head, self.forward)
        self.weights = weights_place(causal)
        self.shares, self.cuda_graphs = can_capture(device), cuda_graphs and can_capture(device)
        self.asked = kernel
        if self.shares and kernel == "auto":
            self.kernel = None
            self.why_eager = "it needs float32 weights on a CPU"
        else:
            self.kernel, self.why_eager = kernel_of(kernel, self.forward, self.head)
        self.graphs = Graphs(causal, device)
        self.cache: Slots | None = None
        self.samplers: dict[Any, Sampler] = {}
        self.params: SamplingParams | None = None  # of the completions that are sampled now
        self.rounds = 0
        self.drawn = [0, 0]  # completions that have ended, and their tokens
        self.used = [0, 0]  # positions in use and positions there are, added up over the looks
        self.queue: list[Row] = []  # shortest last
        self.changed = False  # whether slots may have to be filled, closed or resumed
        self.rows: list[Row] = []  # slot → what it is busy with
        self.resumed: list[Row] = []  # rows whose episode goes on
        self.reading: list[int] = []  # slots whose prompt has still to be read
        self.parts: list[Part] = []  # of the slots in use, before the next step
        self.capacity = 0  # positions that the longest episode may need

    def serves(self, policy: Policy, causal: Any) -> bool:
        """Whether these weights lie where those of before did, so that what was captured reads
        them; what was made of them is renewed."""
        rest = (a is b or a == b for a, b in zip(policy, self.policy, strict=True))
        if causal is not self.causal or not all(rest) or weights_place(causal) != self.weights:
            return False
        if autocast_type(self.device) != self.half:
            return False
        if self.forward is not None:
            self.forward.refresh()
        return True

    # --------------------------------------------------------------------------------- the contract

    @property
    def idle(self) -> bool:
        return not self.queue and not any(row.active for row in self.rows)

    def accepts(self, params: SamplingParams) -> bool:
        """Completions with other numbers are sampled when those of now have ended."""
        return self.params is None or params == self.params or self.idle

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        self.changed, prompt = True, tuple(prompt_ids)
        if params != self.params:  # nothing is sampled now
            self.rest()
            self.params = params
        for row in self.rows:
            if row.key == key and row.held is not None and not row.released:
                row.known = min(agreement(row.held, prompt), len(prompt) - 1)
                row.held = None
                row.prompt = prompt
                row.seed = seed
                row.reads = True
                self.resumed.append(row)
                return
        self.queue.append(Row(key, prompt, seed))

    def release(self, key: int) -> None:
        self.changed = True
        self.queue = [row for row in self.queue if row.key != key]
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
            self.make_room(self.check_every)
            for _ in range(self.check_every):
                self.step()
            self.rounds += self.check_every
        out = []
        for slot, completion in self.sampler.taken(len(self.rows)):
            row = self.rows[slot]
            row.held = (
                row.prompt + completion.token_ids[:-1]
            )  # the last token of a completion has been drawn and not read
            self.drawn = [self.drawn[0] + 1, self.drawn[1] + len(completion.token_ids)]
            out.append((row.key, completion))
        self.changed = self.changed or bool(
            self.queue
        )  # what the pass has put back, or what may take a slot that waits now
        return out

    @torch.inference_mode()
    def rest(self) -> None:
        """Forgets every episode; the memory stays, for the next ones."""
        if self.cache is not None and self.rows:
            self.cache.free(range(self.cache.slots))
            self.sampler.stop(0)
        self.rows = []
        self.reading = []
        self.resumed = []
        self.parts = []

    def clear(self) -> None:
        """Forgets every episode, and frees the memory."""
        self.rows = []
        self.reading = []
        self.resumed = []
        self.parts = []
        self.cache = None
        self.samplers = {}
        self.params = None
        self.graphs.forget()

    # ---------------------------------------------------------------------------------------- slots

    @property
    def slots(self) -> int:
        """Slots that there are."""
        return 0 if self.cache is None else self.cache.slots

    @property
    def most_slots(self) -> int:
        """Slots in use at most."""
        if self.shares:
            rooms = min(
                -(-self.max_rows // SHARE), self.max_cached_tokens // (LONGEST * self.capacity)
            )
            return min(self.max_rows, rooms * SHARE) if rooms else 1
        return max(1, min(self.max_rows, self.max_cached_tokens // self.capacity))

    def fill(self) -> None:
        """Slots whose episodes are over go to those that wait, or are closed; the others go on with
        their new prompts."""
        self.changed = False
        # Siblings stay side by side, and what is popped together has nearly one length.
        self.queue.sort(key=lambda row: (len(row.prompt), row.prompt, -row.key), reverse=True)
        closed = [slot for slot, row in enumerate(self.rows) if row.released]
        self.reserve(len(self.rows) - len(closed) + len(self.queue))
        assert self.cache is not None
        self.cache.free(closed)
        taken = self.admit(closed)
        if self.queue and not taken and not any(row.active for row in self.rows):
            # All slots wait for something outside: some give theirs up, and read again.
            closed = [
                *closed,
                *(slot for slot in self.cheapest(len(self.queue)) if not self.rows[slot].released),
            ]
            self.cache.free(closed)
            taken = self.admit(closed)
        resumed = {id(row) for row in self.resumed}
        self.resumed = []
        waits = [*(slot for slot, row in enumerate(self.rows) if id(row) in resumed), *taken]
        if waits:
            # They draw nothing until they have read; what a step writes there meanwhile is
            # overwritten then.
            at = self.tensor(waits)
            self.sampler.draws[at] = False
            self.sampler.position[at] = self.tensor([self.rows[slot].known for slot in waits])
        self.evict([slot for slot in closed if slot not in set(taken)])
        self.cache.flush()
        self.reading = [slot for slot, row in enumerate(self.rows) if row.reads]
        if waits or closed:
            self.measure()

    def admit(self, closed: Sequence[int]) -> list[int]:
        """Rows of the queue take free slots, in which they will probably have room; gives these."""
        assert self.cache is not None
        taken = []
        for slot in [*closed, *range(len(self.rows), self.most_slots)]:
            if not self.queue:
                break
            row = self.queue[-1]
            mean = self.mean
            # While it draws, it is about half of its completion long: rooms are filled for that,
            # and what overflows moves.
            length = min(
                self.need(len(row.prompt)),
                len(row.prompt) + max(int(FILL * mean), self.check_every),
            )
            if self.cache.admits(slot, length):
                self.cache.grant(slot, len(row.prompt), length)
                self.rows += [nobody() for _ in range(slot + 1 - len(self.rows))]
                self.rows[slot] = self.queue.pop()
                taken.append(slot)
        return taken

    @property
    def mean(self) -> int:
        """Tokens of a completion, as far as is known; before the first has ended, what rooms are
        made for."""
        assert self.params is not None
        return (
            -(-self.drawn[1] // self.drawn[0]) if self.drawn[0] else self.params.max_new_tokens // 4
        )

    def reserve(self, wanted: int) -> None:
        """Slots for so many episodes, as far as they may be in use at once."""
        assert self.params is not None
        if not self.rows:
            longest = max(len(row.prompt) for row in self.queue)
            self.capacity = self.need(longest)
            if self.shares:
                slots = -(-self.most_slots // SHARE) * SHARE
                capacity = LONGEST * self.capacity
            else:
                slots = min(self.most_slots, wanted)
                capacity = min(self.capacity, blocks(longest + 64))
            kept = self.cache
            if kept is not None and self.may_hold(
                larger := max(slots, kept.slots), longer := max(capacity, kept.capacity)
            ):
                # so that calls of two kinds in turn do not make a new one each
                slots = larger
                capacity = longer
                self.capacity = max(self.capacity, kept.capacity // (LONGEST if self.shares else 1))
            if kept is None or (kept.slots, kept.capacity) != (slots, capacity):
                self.cache = kept = None  # before the new one, so that both are never there
                self.cache = (Rooms if self.shares else Slots)(slots, capacity, self.device)
                self.graphs.forget()
            self.sampler = self.sampler_of(self.params)
        elif (
            not self.shares
            and self.cache is not None
            and (more := min(self.most_slots, wanted)) > self.slots
        ):
            self.cache.resize(min(self.most_slots, max(more, 2 * self.slots)), self.cache.capacity)
            self.sampler.resize(self.slots)

    def may_hold(self, slots: int, capacity: int) -> bool:
        """Whether a cache of this size is within bounds."""
        return slots == 1 or slots * capacity <= self.max_cached_tokens * (
            SHARE if self.shares else 1
        )

    def sampler_of(self, params: SamplingParams) -> Sampler:
        """The state of all slots for these numbers: that of the last call with them, whose graphs
        know it."""
        key = captured_settings(params)
        if key not in self.samplers and len(self.samplers) > 7:
            self.samplers.clear()
            self.graphs.forget()
        sampler = self.samplers.get(key)
        if sampler is None:
            sampler = self.samplers[key] = Sampler(
                self.slots, self.policy, params, self.device, self.cuda_graphs
            )
        if len(sampler.last) < self.slots:
            sampler.resize(self.slots)
            self.graphs.forget()
        sampler.begin_call(params)
        return sampler

    def need(self, length: int) -> int:
        """The capacity that a prompt of this length and its completion need."""
        assert self.params is not None
        return blocks(
            max(min(length + self.params.max_new_tokens, self.policy.context_length), length)
        )

    def make_room(self, steps: int) -> None:
        """Positions for what is read now, and for so many tokens more in every slot that draws."""
        assert self.cache is not None
        if not self.shares:
            reads = [len(row.prompt) + 1 for row in self.rows if row.active and row.reads]
            self.stretch(
                max([*reads, *(length + steps for _, _, length in self.parts if steps)], default=0)
            )
            return
        for row in self.rows:
            if row.active:
                row.length = (
                    len(row.prompt)
                    if row.reads
                    else min(max(row.length, len(row.prompt)) + steps, self.need(len(row.prompt)))
                )
        while short := [
            slot
            for slot, row in enumerate(self.rows)
            if row.active and not self.cache.grant(slot, row.length)
        ]:
            self.squeeze(short[0])
        self.cache.flush()
        self.used[0] += sum(row.length if row.active else len(row.held or ()) for row in self.rows)
        self.used[1] += self.cache.slots // SHARE * self.cache.capacity

    def squeeze(self, slot: int) -> None:
        """The room of a slot is full: it moves to another, or the episode beside it that loses
        least gives its place up.

        One that draws goes back to the queue and draws again, from its own seed.
        """
        assert self.cache is not None
        for hole in (other for other, row in enumerate(self.rows) if row.released):
            if self.cache.takes(slot, hole):
                self.move([slot], [hole])
                self.rows[slot] = nobody()
                self.sampler.draws[slot] = False
                return
        first = slot // SHARE * SHARE
        mates = [
            other
            for other in range(first, min(first + SHARE, len(self.rows)))
            if not self.rows[other].released
        ]
        self.put_back(
            [
                min(
                    mates,
                    key=lambda other: (
                        (row := self.rows[other]).active
                        * (1 + max(0, row.length - len(row.prompt)))
                    ),
                )
            ]
        )

    def put_back(self, slots: Sequence[int]) -> None:
        """These slots are given up. What reads or draws waits again; what waits for its episode is
        read again with its next prompt."""
        self.queue += [
            Row(row.key, row.prompt, row.seed)
            for row in (self.rows[slot] for slot in slots)
            if row.active
        ]
        self.changed = True
        self.evict(slots)

    def stretch(self, length: int) -> None:
        """A cache in which each slot has so many positions, and some more, so that it moves
        rarely."""
        assert self.cache is not None
        before = self.cache.capacity
        if length > before:
            capacity = max(blocks(length), min(self.capacity, blocks(before + before // 4)))
            self.cache.resize(max(len(self.rows), min(self.slots, self.most_slots)), capacity)
            self.sampler.resize(self.slots)

    def grow(self, capacity: int) -> None:
        """Longer episodes. Where as many of them would hold too much, the cheapest lose what they
        hold."""
        if self.shares:  # all of them read again, in other rooms
            self.put_back(range(len(self.rows)))
            self.fill()
            return
        self.capacity = capacity
        surplus = len(self.rows) - self.most_slots
        if surplus > 0:
            self.put_back(self.cheapest(surplus))

    def cheapest(self, number: int) -> list[int]:
        """The slots that lose least: first those that wait for their episode, then those that hold
        least."""
        held = self.sampler.position[: len(self.rows)].tolist()
        return sorted(
            range(len(self.rows)),
            key=lambda slot: (self.rows[slot].held is None, held[slot], -slot),
        )[:number]

    def evict(self, slots: Sequence[int]) -> None:
        """Closes slots; the last ones move into the holes as far as they find room, so that those
        in use are the first."""
        if not slots:
            return
        assert self.cache is not None
        self.cache.free(slots)
        gone = set(slots)
        last = len(self.rows) - 1
        pairs = []
        for hole in sorted(slots):
            while last in gone:
                last -= 1
            if hole > last:
                break
            if self.cache.takes(last, hole):
                pairs.append((last, hole))
                gone ^= {last, hole}
        if pairs:
            movers, holes = zip(*pairs, strict=True)
            self.move(movers, holes)
        left = max((slot for slot in range(len(self.rows)) if slot not in gone), default=-1) + 1
        empty = [slot for slot in gone if slot < left]
        if empty:
            at = self.tensor(empty)
            self.sampler.draws[at], self.sampler.ended[at], self.sampler.position[at] = (
                False,
                False,
                0,
            )
        for slot in empty:
            self.rows[slot] = nobody()
        self.sampler.stop(left)
        del self.rows[left:]
        self.reading = [slot for slot, row in enumerate(self.rows) if row.reads]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Episodes move into other slots, which have room for them."""
        assert self.cache is not None
        self.cache.flush()
        source = self.tensor(sources)
        target = self.tensor(targets)
        self.cache.copy(
            source, target, min(int(self.sampler.position[source].max()) + 1, self.cache.capacity)
        )
        self.sampler.move(source, target)
        for mover, hole in zip(sources, targets, strict=True):
            self.rows[hole] = self.rows[mover]
        self.cache.free(sources)

    def tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    # -------------------------------------------------------------------------------------- reading

    def read(self) -> None:
        """Reads what is new in the prompts of the slots that wait for it, and draws the first token
        of their completions."""
        capacity = max(self.need(len(self.rows[slot].prompt)) for slot in self.reading)
        if capacity > self.capacity:
            self.grow(capacity)
        self.make_room(0)
        assert self.cache is not None
        slots = self.reading
        self.reading = []
        if not slots:  # all of them wait again
            return
        rows = [self.rows[slot] for slot in slots]
        firsts: dict[tuple[int, ...], int] = {}  # fresh prompt → the slot that reads it
        sources = [
            slot if row.known else firsts.setdefault(row.prompt, slot)
            for slot, row in zip(slots, rows, strict=True)
        ]
        last: dict[int, Tensor] = {}  # slot → hidden state of its last token
        for part in self.micro_batches(
            sorted(set(sources), key=lambda slot: (self.rows[slot].known > 0, slot))
        ):
            last |= zip(part, self.pass_through(part), strict=True)
        copies = [
            (source, slot) for slot, source in zip(slots, sources, strict=True) if slot != source
        ]
        if copies:
            sources_, targets = torch.tensor(copies, device=self.device).T
            self.cache.copy(
                sources_, targets, max(len(self.rows[slot].prompt) for _, slot in copies)
            )
        at = self.tensor(slots)
        self.sampler.begin(at, [row.prompt for row in rows], [row.seed for row in rows])
        for row in rows:
            row.reads = False
        self.sampler.draw(at, self.logits(torch.stack([last[source] for source in sources])))
        self.measure()

    def micro_batches(self, slots: list[int]) -> Iterator[list[int]]:
        """Slots that go through the model together: fresh ones or known ones, at most so many
        tokens with their padding."""
        part: list[int] = []
        width = 0
        for slot in slots:
            row = self.rows[slot]
            mine = len(row.prompt) - row.known
            if part and (
                max(width, mine) * (len(part) + 1) > MOST_READ
                or bool(row.known) != bool(self.rows[part[0]].known)
            ):
                yield part
                part = []
                width = 0
            part.append(slot)
            width = max(width, mine)
        yield part

    def pass_through(self, slots: list[int]) -> Tensor:
        """The unread tokens of some slots through the model; the hidden state of each one's last,
        [R, H]."""
        rows = [self.rows[slot] for slot in slots]
        new = [row.prompt[row.known :] for row in rows]
        width = max(map(len, new))
        ids = self.tensor(
            [[*tokens, *[self.policy.pad_token_id] * (width - len(tokens))] for tokens in new]
        )
        starts = self.tensor([row.known for row in rows])
        positions = starts[:, None] + torch.arange(width, device=self.device)
        # Padding of a row that is nearly full stands in its last place, which no prompt reaches and
        # a completion overwrites.
        assert self.cache is not None
        positions = positions.clamp(max=self.cache.capacity - 1)
        known = rows[0].known > 0
        length = min(max(row.known for row in rows) + width, self.cache.capacity) if known else 0
        self.cache.point(self.tensor(slots), positions, length)
        mask = ids.new_ones(len(rows), 1, 1, 1, dtype=torch.bool)  # fresh: plain causal attention
        if known:
            mask = (torch.arange(length, device=self.device) <= positions[..., None])[:, None]
        ends = self.tensor([len(tokens) - 1 for tokens in new])
        return self.hidden(ids, mask)[torch.arange(len(rows), device=self.device), ends]

    def hidden(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states [R, m, H] of tokens [R, m] at the cache's positions."""
        assert self.cache is not None
        if self.forward is not None:
            return self.forward(ids, self.cache.positions, partial(self.attention, mask))
        return self.trunk(
            input_ids=ids,
            attention_mask=mask,
            position_ids=self.cache.positions,
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def attention(
        self, mask: Tensor, query: Tensor, key: Tensor, value: Tensor, layer: int
    ) -> Tensor:
        """To all that these rows may see, [R, m, Hq, D]; the new keys and values are kept."""
        assert self.cache is not None
        keys, values = self.cache.update(key, value, layer)
        return attend(None, query, keys, values, mask)[0]

    # ------------------------------------------------------------------------------------- decoding

    def measure(self) -> None:
        """How far the slots in use reach. Where they do not share rooms, they are read in parts."""
        if self.rows and not self.shares:
            self.parts = parts_of(self.sampler.position[: len(self.rows)] + 1)

    def step(self) -> None:
        """Draw one more token in every slot that draws. Inactive slots are masked: their state does
        not change."""
        assert self.params is not None and self.cache is not None
        if not self.shares:
            token = PARTS.set(self.parts)
            try:
                self.decode(len(self.rows), max(length for _, _, length in self.parts))
            finally:
                PARTS.reset(token)
            self.parts = [
                (start, stop, min(length + 1, self.capacity)) for start, stop, length in self.parts
            ]
            return
        slots = min(bucket(-(-len(self.rows) // SHARE)) * SHARE, self.slots)
        if self.cuda_graphs and not self.sampler.asks_the_host:
            shape = Shape(captured_settings(self.params), slots, 0)
            self.graphs(shape, lambda: self.decode(slots, 1))
        else:
            self.decode(slots, 1)

    def decode(self, slots: int, length: int) -> None:
        """Run one decode step for the first `slots` slots, none of which sees more than `length`
        positions where each has its own room.

        Reads and writes only the state tensors, in place, and never synchronises with the host, so
        it can be captured as a CUDA graph.
        """
        sampler = self.sampler
        cache = self.cache
        assert cache is not None
        if self.kernel is not None and self.kernel.serves(sampler):
            self.kernel(cache, sampler, slots)
            return
        cache.point(None, sampler.position[:slots, None], length)
        seen = cache.visible(slots)
        sampler.draw(
            cache.indices[:slots],
            self.logits(self.hidden(sampler.last[:slots, None], seen)[:, 0]),
            begun=True,
        )


def bucket(rooms: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: few shapes, and at most half more than asked
    for."""
    octave = 1 << (rooms - 1).bit_length()  # the next power of two
    return octave * 3 // 4 if octave > 2 and rooms <= octave * 3 // 4 else octave


def blocks(length: int) -> int:
    """The next multiple of BLOCK."""
    return -(-length // BLOCK) * BLOCK


def captured_settings(params: SamplingParams) -> Any:
    """What of these numbers a captured step depends on: of the temperature only whether it
    divides."""
    return params._replace(
        temperature=params.temperature if params.temperature in (0, 1) else -1.0,
        admission="free",
        admission_rounds=1,
    )


def weights_place(causal: Any) -> tuple[Any, ...]:
    """Where a model's weights lie, and what its modules are: graphs read the former and were made
    of the latter."""
    weights = [(p.data_ptr(), p.dtype, p.shape) for p in (*causal.parameters(), *causal.buffers())]
    adapters = [
        (m.merged, m.disable_adapters, tuple(m.active_adapters), tuple(m.scaling.items()))
        for m in lora_layers(causal)
    ]
    return (
        *weights,
        *adapters,
        *((type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in causal.modules()),
    )
