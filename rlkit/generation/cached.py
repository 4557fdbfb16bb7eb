"""The fast engine: continuous batching over a key-value cache that stays where it is, between replies of an episode too.

    waiting contexts ──▶ slot ──▶ its new tokens in one pass ──▶ one token a step, all slots together ──▶ reply
                          ▲                                                                                 │
                          └──────────── the next context of the same episode, its shared beginning kept ◀───┘

A slot that is done takes the next context at once. Where a reply is followed by another turn of its episode (`follow`), only what is new
in the context goes through the model: a long append-only episode costs its new tokens, not its history again. Equal contexts, such as
the samples of one prompt, are read once. The draw is that of the reference engine (rlkit.generation.transformers.draw), from the
rollout's own seed and position: which slot it had, and what stood beside it, changes nothing but the last bits of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn_functional

from rlkit.generation.transformers import ThinkingBudget, draw, sampling_mode
from rlkit.generation.transformers import generate as reference
from rlkit.types import Generation, Policy

Follow = Callable[[int, Generation], "tuple[Sequence[int], int] | None"]
ATTENTION = "rlkit_cached"
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
    follow: Follow | None = None,
) -> list[Generation]:
    """Samples one reply per context, and those that follow.

    Args:
      policy, contexts, seeds, max_new_tokens, temperature, top_p, top_k, max_thinking_tokens: as for the reference engine, which decodes in
        place of this one where layers are no full attention.
      max_rows: contexts decoded at once, > 0.
      max_cached_tokens: slots × the longest context that one may reach, > 0: what the cache may hold. Further contexts wait; one that
        is longer than all of it has the cache to itself.
      follow: (index of the context, its reply) → (next context, its seed), which is then decoded under the same index; None ends it.
    Returns: the last reply of each, in the order of the contexts.
    Raises: ValueError for arguments out of range.
    """
    if temperature < 0 or max_new_tokens < 1 or max_rows < 1 or max_cached_tokens < 1:
        raise ValueError(
            f"generation: temperature must be >= 0 (is {temperature}), max_new_tokens, max_rows and max_cached_tokens >= 1 (are "
            f"{max_new_tokens}, {max_rows}, {max_cached_tokens})"
        )
    if not 0 < top_p <= 1 or top_k < 0:
        raise ValueError(f"generation: top_p must be > 0 and <= 1 (is {top_p}), top_k >= 0 (is {top_k}); 1 and 0 cut nothing")
    causal: Any = policy.model.get_base_model() if hasattr(policy.model, "disable_adapter") else policy.model  # type: ignore[operator]
    numbers: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    if max_thinking_tokens is not None and max_thinking_tokens < 0:
        raise ValueError(f"generation: max_thinking_tokens must be >= 0 or null (is {max_thinking_tokens})")
    numbers["max_thinking_tokens"] = max_thinking_tokens
    if not full_attention(causal.config):
        return _by_turns(policy, contexts, seeds, follow, **numbers, max_rows=max_rows)
    with sampling_mode(causal), grouped_attention(causal.config):
        return _Decoder(causal, policy, contexts, seeds, follow, max_rows, max_cached_tokens, **numbers).run()


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


# ------------------------------------------------------------------------------------------------------ attention


def full_attention(config: Any) -> bool:
    """Whether every layer sees the whole context: then keys and values of a position are all that has to be kept."""
    return set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"} and not getattr(
        config, "is_encoder_decoder", 0
    )


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """The model attends by `attend` inside."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention in which the heads of a group stand side by side as queries of their one key head, so that no key is copied.

    Args:
      query: [R, Hq, m, D]. key, value: [R, Hk, L, D], Hk divides Hq. attention_mask: [R, 1, m, L], True is seen; of any other shape, it
        is causal, and m = L.
    """
    rows, heads, width, size = query.shape
    groups = heads // key.shape[1]
    if attention_mask is None or attention_mask.shape[-2:] != (width, key.shape[2]):
        out = nn_functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
        return out.transpose(1, 2).contiguous(), None
    grouped = query.reshape(rows, heads // groups, groups * width, size)
    mask = attention_mask if width == 1 or groups == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = nn_functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return out.view(rows, heads, width, size).transpose(1, 2).contiguous(), None


class Slots:
    """Keys and values of all slots, [S, H, C, D] for each layer; what a model takes for its cache.

    `rows` and `positions` say, before each pass, where the new ones go: rows None are the first slots in their order.
    """

    def __init__(self, slots: int, room: int):
        self.slots, self.room = slots, room
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows: Tensor | None = None
        self.positions = torch.empty(0)  # [R, m]
        self.length = 0  # positions that are seen; 0: the new ones alone

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Puts new keys and values [R, H, m, D] in their place and gives all that these rows may see."""
        if layer == len(self.keys):
            for store, like in ((self.keys, key), (self.values, value)):
                store.append(like.new_zeros(self.slots, like.shape[1], self.room, like.shape[3]))
        rows = torch.arange(len(key), device=key.device) if self.rows is None else self.rows
        out = []
        for kept, new in ((self.keys[layer], key), (self.values[layer], value)):
            kept[rows[:, None], :, self.positions] = new.transpose(1, 2)
            if self.length == 0:
                out.append(new)
            else:
                seen = kept[:, :, : self.length]
                out.append(seen[: len(new)] if self.rows is None else seen[self.rows])
        return out[0], out[1]

    def get_seq_length(self, layer: int = 0) -> int:
        """For models that ask; positions are always given."""
        return self.length

    def copy(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first `length` positions of some slots into others."""
        for store in (*self.keys, *self.values):
            store[targets, :, :length] = store[sources, :, :length]

    def resize(self, slots: int, room: int) -> None:
        """Other numbers of slots and of positions, at least as many; what the first slots hold stays."""
        for stores in (self.keys, self.values):
            stores[:] = [nn_functional.pad(store[:slots], (0, 0, 0, room - self.room)) for store in stores]
        self.slots, self.room = slots, room


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
        max_rows: int,
        max_cached_tokens: int,
        *,
        max_new_tokens: int,
        temperature: float,
        max_thinking_tokens: int | None,
        **cut: Any,
    ):
        self.policy, self.follow, self.temperature, self.cut, self.max_new_tokens = policy, follow, temperature, cut, max_new_tokens
        self.trunk, self.head = causal.base_model, causal.get_output_embeddings()
        self.device = next(causal.parameters()).device
        # Shortest last: siblings stay side by side, and what is popped together has nearly one length.
        order = sorted(range(len(contexts)), key=lambda i: (len(contexts[i]), tuple(contexts[i]), -i), reverse=True)
        self.queue = [_Row(i, tuple(contexts[i]), seeds[i]) for i in order]
        self.replies: dict[int, Generation] = {}
        self.max_cached_tokens = max_cached_tokens
        room = self.need(max((len(c) for c in contexts), default=1))
        self.slots = slots = max(1, min(max_rows, len(contexts), max_cached_tokens // room))  # in use at most
        self.cache = Slots(slots, room)
        self.rows: list[_Row] = []  # slot → what it is busy with, without holes
        self.eos = torch.tensor(policy.eos_token_ids, device=self.device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=self.device)

        # Of each slot: its last token and where it goes, tokens drawn and their limit, the seed, whether it draws; the reply.
        self.last, self.position, self.count, self.limit, self.seed = (zeros() for _ in range(5))
        self.draws = zeros(dtype=torch.bool)
        self.forced = zeros(max_new_tokens, dtype=torch.bool)
        self.budget = None
        if max_thinking_tokens is not None:
            self.budget = ThinkingBudget(policy.codec.thinking, slots, max_thinking_tokens, self.device)
        self.tokens, self.logprobs = zeros(max_new_tokens), zeros(max_new_tokens, dtype=torch.float32)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All that belongs to a slot beside its keys and values."""
        return self.last, self.position, self.count, self.limit, self.seed, self.draws, self.tokens, self.logprobs, self.forced

    def need(self, length: int) -> int:
        """Room for a context of this length and its reply."""
        most = min(length + self.max_new_tokens, self.policy.context_length)
        return -(-max(most, length) // BLOCK) * BLOCK

    def run(self) -> list[Generation]:
        while self.queue or self.rows:
            while self.queue and len(self.rows) < self.slots:
                self.rows.append(self.queue.pop())
                self.wait(len(self.rows) - 1)
            reading = [slot for slot, row in enumerate(self.rows) if row.reads]
            if 8 * len(reading) >= len(self.rows):  # a pass for fewer costs more than their waiting
                self.read(reading)
            else:
                self.step()
            self.finish()
        return [self.replies[i] for i in sorted(self.replies)]

    def wait(self, slot: int) -> None:
        """The slot draws nothing until it has read; what a step writes there meanwhile is overwritten then."""
        self.draws[slot] = False
        self.position[slot] = self.rows[slot].known

    def read(self, slots: list[int]) -> None:
        """Reads what is new in the contexts of some slots, and draws the first token of their replies."""
        room = max(self.need(len(self.rows[slot].context)) for slot in slots)
        if room > self.cache.room:
            self.make_room(room)
            slots = [slot for slot, row in enumerate(self.rows) if row.reads]
        rows = [self.rows[slot] for slot in slots]
        firsts: dict[tuple[int, ...], int] = {}  # fresh context → the slot that reads it
        sources = [slot if row.known else firsts.setdefault(row.context, slot) for slot, row in zip(slots, rows, strict=True)]
        last: dict[int, Tensor] = {}  # slot → hidden state of its last token
        for part in self.portions(sorted(set(sources), key=lambda slot: (self.rows[slot].known > 0, slots.index(slot)))):
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
        self.forced[at] = False
        if self.budget is not None:
            self.budget.begin(at, [row.context for row in rows])
        for row in rows:
            row.reads = False
        self.draw(at, torch.stack([last[source] for source in sources]))

    def tensor(self, numbers: Sequence[Any]) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def make_room(self, room: int) -> None:
        """Longer slots, and fewer where all of them together would hold too much: some that still have to read go back to the queue."""
        self.slots = max(1, min(self.slots, self.max_cached_tokens // room))
        reading = [slot for slot, row in enumerate(self.rows) if row.reads]
        back = reading[: max(0, min(len(self.rows) - self.slots, len(reading) - 1))]
        returned = [self.rows[slot] for slot in back]
        self.vacate(back)
        self.queue += [_Row(row.index, row.context, row.seed) for row in returned]
        self.cache.resize(max(self.slots, len(self.rows)), room)

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
        return self.trunk(
            input_ids=ids, attention_mask=mask, position_ids=self.cache.positions, past_key_values=self.cache, use_cache=True
        ).last_hidden_state

    def step(self) -> None:
        """One more token in every slot that draws; the others wait for what they read, and change nothing."""
        n = len(self.rows)
        self.cache.rows, self.cache.positions = None, self.position[:n, None]
        self.cache.length = int(self.position[:n].max()) + 1
        seen = torch.arange(self.cache.length, device=self.device) <= self.position[:n, None]
        self.draw(torch.arange(n, device=self.device), self.forward(self.last[:n, None], seen[:, None, None])[:, 0])

    def draw(self, at: Tensor, hidden: Tensor) -> None:
        """Draws the next token of the slots `at` from their last hidden states; what is drawn has not been read yet."""
        drawn = self.draws[at]
        at, hidden = at[drawn], hidden[drawn]
        count = self.count[at]
        logprobs, choice = draw(self.head(hidden), self.seed[at], count, self.temperature, **self.cut)
        if self.budget is not None:
            begun = count > 0
            self.budget.follow(at[begun], self.last[at[begun]])
            choice, self.forced[at, count] = self.budget.force(at, choice)
        token = choice.argmax(1)
        self.tokens[at, count] = token
        self.logprobs[at, count] = logprobs.gather(1, token[:, None])[:, 0].masked_fill(self.forced[at, count], 0.0)
        self.position[at] += count > 0
        self.last[at] = token
        self.count[at] += 1

    def finish(self) -> None:
        """Takes the replies that have ended; their slots go on with the episode, with another context, or are closed."""
        n = len(self.rows)
        ended = self.draws[:n] & (torch.isin(self.last[:n], self.eos) | (self.count[:n] >= self.limit[:n]))
        if not ended.any():
            return
        slots = ended.nonzero()[:, 0]
        counts = self.count[slots].tolist()
        tokens, logprobs = self.tokens[slots].tolist(), self.logprobs[slots].tolist()
        forced = [[]] * len(counts) if self.budget is None else [marks.nonzero()[:, 0].tolist() for marks in self.forced[slots]]
        closed = []
        for slot, size, ids, scores, marks in zip(slots.tolist(), counts, tokens, logprobs, forced, strict=True):
            end: Any = "stop" if ids[size - 1] in self.policy.eos_token_ids else "length"
            reply = Generation(tuple(ids[:size]), tuple(scores[:size]), end, tuple(marks))
            row = self.rows[slot]
            self.replies[row.index] = reply
            following = self.follow(row.index, reply) if self.follow is not None else None
            if following is None:
                closed.append(slot)
                continue
            context, seed = tuple(following[0]), following[1]
            held = row.context + reply.token_ids[:-1]  # the last token of a reply has been drawn and not read
            self.rows[slot] = _Row(row.index, context, seed, known=min(_common(held, context), len(context) - 1))
            self.wait(slot)
        for slot in closed[: len(self.queue)]:
            self.rows[slot] = self.queue.pop()
            self.wait(slot)
        self.vacate([slot for slot in closed if not self.rows[slot].reads])

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
        del self.rows[left:]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How far two lists of ids agree from their start."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
