"""Decide which completions hold the slots and pages of the cache. This file computes with plain
numbers on the host, and with no tensors.

    submit ──▶ queue ──▶ a slot, and pages for the context ──▶ finish ──▶ held, until the next
                 ▲                     │                                  prompt of the episode
                 └── no page left ─────┘

A row is a completion that is sampled or waits for its turn. If no page is free, the episodes that
wait for their environment lose their pages first. Next, the row with the fewest sampled tokens
loses its slot and its pages, and goes back to the queue. The choice of this row depends on contexts
and seeds alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from rlkit.engines.cached.cache import Pages
from rlkit.engines.cached.sampler import Saved
from rlkit.types import agreement

# While more than PLENTY pages are free for each slot in use, a row gets AHEAD pages at once. This
# costs the host less time than giving one page at a time.
AHEAD = 4
PLENTY = 2 * AHEAD
FOREVER = 1 << 60  # a number of steps that no run reaches
# An additional pass over one prompt takes as long as reading this many tokens in a larger pass. The
# number is an assumption.
PASS = 256


@dataclass(eq=False)
class Row:
    """Hold a running completion, or an episode between two of its completions.

    Attributes:
      key: the key of the episode.
      prompt: the tokens before the completion.
      seed: the seed of the completion.
      need: the most tokens that prompt and completion can have together.
      known: the number of leading tokens with keys and values in the pages.
      pages: the numbers of the row's pages, in the order of the tokens.
      saved: the tokens sampled before the row lost its slot and pages. None if the row has not lost
        its slot.
      tokens: the tokens with keys and values in the pages. The field is used only between two
        completions of the episode.
      slot: the number of the row's slot; -1 if the row has no slot.
      reads: True if the model must still read a part of the context.
    """

    key: int
    prompt: tuple[int, ...]
    seed: int
    need: int
    known: int = 0
    pages: list[int] = field(default_factory=list)
    saved: Saved | None = None
    tokens: tuple[int, ...] = ()
    slot: int = -1
    reads: bool = True

    @property
    def context(self) -> tuple[int, ...]:
        """Return the tokens that the model must read before the next token can be sampled."""
        return self.prompt if self.saved is None else self.prompt + self.saved.token_ids

    @property
    def order(self) -> tuple[bool, bool, int, tuple[int, ...], int]:
        """Return the sort key of the queue. Rows that lost their slot come first. Next come rows
        with a part of their context in pages, and then the rows with the shortest prompts. Samples
        of one prompt are neighbours."""
        return self.saved is None, not self.known, len(self.prompt), self.prompt, self.key


class Slots:
    """Hold the queue, the rows in slots, and the episodes waiting for their environment.

    The slots in use have the lowest numbers. A None in `rows` is a free slot among the slots in use
    (a hole). `fill` closes holes.

    Attributes:
      clock: the number of decoding steps for which pages were given out.
      start: for each slot, `clock - n` at the time when sampling began in the slot, for the n
        tokens in the slot at that time. Therefore the slot now has at most `clock - start` tokens.
      most: for each slot, the most tokens of its context and completion together; 0 if no token is
        sampled in the slot.
      room: for each slot, the number of tokens that fit into its pages; 0 if no token is sampled in
        the slot.
      safe: no slot needs another page while the clock is at most this number.
    """

    def __init__(self, pages: Pages):
        self.pages = pages
        # if `ordered`, sorted by `Row.order` in reverse: the last row enters a slot first
        self.queue: list[Row] = []
        self.ordered = True
        self.rows: list[Row | None] = []
        self.held: dict[int, Row] = {}  # key → an episode waiting for its environment
        # prompt → a row in a slot; the model has read this prompt
        self.read: dict[tuple[int, ...], Row] = {}
        self.prompts: list[tuple[int, ...]] = []  # the keys of `read` in lexicographic order
        self.stopped: list[int] = []  # slots left by a row before its completion had ended
        self.start, self.most, self.room = (np.zeros(pages.slots, dtype=np.int64) for _ in range(3))
        self.clock = 0
        self.safe = -1
        self.oldest = 0  # lowest value of `start` at the last call of `extend`
        self.furthest = 1  # highest value of `most` at the last call of `extend`

    @property
    def reach(self) -> np.ndarray:
        """Return, for each slot, an upper bound on the number of tokens in the slot. The bound is
        valid until the host next reads the slots' state. The tokens of the context and of the
        completion are counted. The bound is 0 if no token is sampled in the slot."""
        return np.minimum(self.clock - self.start, self.most)

    @property
    def longest(self) -> int:
        """Return a number that is at least as high as every entry of `reach`, and at least 1. The
        number is computed without array arithmetic."""
        return max(1, min(self.clock - self.oldest, self.furthest))

    @property
    def idle(self) -> bool:
        """Return whether no completion is left: no row is in a slot, and no row waits for a
        slot."""
        return not self.queue and not any(self.rows)

    @property
    def active(self) -> list[Row]:
        """Return the rows in slots."""
        return [row for row in self.rows if row is not None]

    @property
    def reading(self) -> list[Row]:
        """Return the rows in slots with a part of their context still to be read."""
        return [row for row in self.rows if row is not None and row.reads]

    def submit(self, key: int, prompt: tuple[int, ...], seed: int, need: int) -> None:
        """Queue a completion. If its episode still has pages, the completion keeps the pages of the
        tokens that the new prompt shares with the episode so far."""
        row = self.held.pop(key, None)
        if row is None:
            row = Row(key, prompt, seed, need)
        else:
            known = min(agreement(row.tokens, prompt), len(prompt) - 1)
            row.prompt, row.seed, row.need, row.reads = prompt, seed, need, True
            self._keep(row, known)
        self.queue.append(row)
        self.ordered = False

    def _keep(self, row: Row, known: int) -> None:
        """Give back the row's pages after the first `known` tokens.

        A row must not write to a page that it shares with other rows. If the last page to keep
        would be partly filled and is shared, this page is given back too. The model then reads the
        tokens of this page again.
        """
        full = known // self.pages.page
        if known % self.pages.page and self.pages.holders[row.pages[full]] == 1:
            full += 1
        else:
            known = full * self.pages.page
        self.pages.give_back(row.pages[full:])
        row.pages = row.pages[:full]
        row.known = known

    def release(self, key: int) -> None:
        """Forget an episode and its running completion."""
        for row in [row for row in self.queue if row.key == key]:
            self.pages.give_back(row.pages)
            self.queue.remove(row)
        if key in self.held:
            self.pages.give_back(self.held.pop(key).pages)
        for row in self.active:
            if row.key == key:
                self.stopped.append(row.slot)
                self._leave(row)
                self.pages.give_back(row.pages)

    def finish(self, row: Row, token_ids: Sequence[int]) -> None:
        """End the completion of a row. The model has not read the completion's last token. The
        pages of all other tokens stay with the episode."""
        row.tokens = (*row.prompt, *token_ids[:-1])
        self._leave(row)
        kept = self.pages.span(len(row.tokens))
        self.pages.give_back(row.pages[kept:])
        row.pages = row.pages[:kept]
        row.saved = None
        self.held[row.key] = row

    def _leave(self, row: Row) -> None:
        """Free the row's slot. The pages stay with the row."""
        slot = row.slot
        if self.read.get(row.prompt) is row:
            del self.read[row.prompt]
            del self.prompts[bisect_left(self.prompts, row.prompt)]
        self.rows[slot] = None
        self.pages.write(slot, ())
        self.most[slot] = self.room[slot] = 0
        row.slot = -1

    def clear(self) -> None:
        """Forget every episode."""
        for row in [*self.queue, *self.active, *self.held.values()]:
            self.pages.give_back(row.pages)
        for slot in range(len(self.rows)):
            self.pages.write(slot, ())
        self.queue, self.rows, self.stopped = [], [], []
        self.held, self.read, self.prompts = {}, {}, []
        self.most[:] = self.room[:] = 0

    # -------------------------------------------------------------------------------------- filling

    def fill(self) -> list[tuple[int, int]]:
        """Give free slots to rows of the queue. Then move the rows with the highest slots into the
        remaining holes. Return the moves as pairs (source slot, target slot)."""
        if not self.ordered:
            self.queue.sort(key=attrgetter("order"), reverse=True)
            self.ordered = True
        holes = [slot for slot, row in enumerate(self.rows) if row is None]
        free = [*holes, *range(len(self.rows), self.pages.slots)]
        active = len(self.rows) - len(holes)
        # prompt → the first row with this prompt among the rows that enter in this call
        firsts: dict[tuple[int, ...], Row] = {}
        one_first = not active and self._share_beginning()
        for slot in free:
            if not self.queue or (one_first and firsts and self.queue[-1].prompt not in firsts):
                break
            # Each row that is being sampled needs a new page now and then. Without a margin of free
            # pages, a row could enter a slot and lose this slot again after a few steps.
            if not self._admit(slot, firsts, active):
                break
            active += 1
        return self._close([slot for slot in holes if self.rows[slot] is None])

    def _share_beginning(self) -> bool:
        """Return whether all prompts in the queue share so long a beginning, for example a system
        prompt with tools, that one prompt should be read before the others enter a slot."""
        prompts = {row.prompt for row in self.queue}
        pages = agreement(min(prompts), max(prompts)) // self.pages.page if prompts else 0
        return (len(prompts) - 1) * pages * self.pages.page > PASS

    def _find_beginning(self, prompt: tuple[int, ...]) -> list[int]:
        """Return the pages of the longest beginning of a prompt that the model has read for a row
        in a slot. The last token is never part of it, because its hidden state gives the first new
        token."""
        at = bisect_left(self.prompts, prompt)
        best: list[int] = []
        for other in self.prompts[max(0, at - 1) : at + 1]:
            shared = min(agreement(prompt, other), len(prompt) - 1) // self.pages.page
            if shared > len(best):
                best = self.read[other].pages[:shared]
        return best

    def _admit(self, slot: int, firsts: dict[tuple[int, ...], Row], margin: int) -> bool:
        """Give a slot and pages to the next row of the queue, if at least `margin` pages stay free.
        Return whether the row has entered."""
        row = self.queue[-1]
        context = row.context
        fresh = not row.known and row.saved is None
        shared: list[int] = []
        known = row.known
        if fresh and row.prompt in firsts:
            shared = firsts[row.prompt].pages[: len(context) // self.pages.page]
            known = firsts[row.prompt].known
        elif fresh:
            shared = self._find_beginning(row.prompt)
            known = len(shared) * self.pages.page
        wanted = self.pages.span(len(context) + 1) - len(row.pages) - len(shared)
        if not self._find(wanted + margin, row):
            return False
        self.queue.pop()
        row.known = known
        self.pages.share(shared)
        row.pages += [*shared, *(self.pages.take() for _ in range(wanted))]
        self.rows += [None] * (slot + 1 - len(self.rows))
        self.rows[slot] = row
        row.slot = slot
        self.room[slot] = len(row.pages) * self.pages.page
        self.pages.write(slot, row.pages)
        if fresh:
            firsts.setdefault(row.prompt, row)
        return True

    def _find(self, wanted: int, row: Row) -> bool:
        """Return whether `wanted` pages are free for a row. If too few are free, first take pages
        away from others. Episodes that wait for their environment lose their pages first, beginning
        with the episode with the fewest tokens. Next, other rows in the queue lose their pages."""
        left = self.pages.left
        while len(left) < wanted and self.held:
            held = min(self.held.values(), key=lambda own: (len(own.tokens), own.tokens, own.seed))
            self.pages.give_back(self.held.pop(held.key).pages)
        if len(left) < wanted:
            for other in self.queue:  # the first row of the queue enters a slot last
                if other is not row and other.pages and len(left) < wanted:
                    self._strip(other)
        return len(left) >= wanted

    def _strip(self, row: Row) -> None:
        """Take all pages away from a row. The model must then read the row's whole context
        again."""
        self.pages.give_back(row.pages)
        row.pages = []
        row.known = 0
        self.ordered = False

    def _close(self, holes: Iterable[int]) -> list[tuple[int, int]]:
        """Move the rows with the highest slots into the holes, so that no hole is left. Return the
        moves as pairs (source slot, target slot)."""
        moves = []
        for hole in holes:
            while self.rows and self.rows[-1] is None:
                self.rows.pop()
            if hole >= len(self.rows):
                break
            row = self.rows.pop()
            assert row is not None
            source = row.slot
            self.rows[hole] = row
            row.slot = hole
            for numbers in (self.start, self.most, self.room):
                numbers[hole] = numbers[source]
                numbers[source] = 0
            self.pages.write(hole, row.pages)
            self.pages.write(source, ())
            moves.append((source, hole))
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        return moves

    def sort(self) -> list[tuple[int, int]]:
        """Put the rows with the longest contexts into the first slots, so that neighbours have
        similar lengths.

        Returns: the moves as pairs (source slot, target slot). The caller must apply all moves at
        the same time.
        """
        reach = self.reach.tolist()
        rows = sorted(  # `fill` has closed the holes, so all rows are active
            self.active, key=lambda row: max(reach[row.slot], len(row.context)), reverse=True
        )
        moves = [(row.slot, slot) for slot, row in enumerate(rows) if row.slot != slot]
        if moves:
            order = [row.slot for row in rows]
            for numbers in (self.start, self.most, self.room):
                numbers[: len(order)] = numbers[order]
            self.rows = [*rows]
            for slot, row in enumerate(rows):
                if row.slot != slot:
                    row.slot = slot
                    self.pages.write(slot, row.pages)
        return moves

    # -------------------------------------------------------------------------------------- drawing

    def begin(self, row: Row) -> None:
        """Sample tokens for a row from now on. The model has read the row's context."""
        row.known = len(row.context)
        row.reads = False
        if row.prompt not in self.read:
            self.read[row.prompt] = row
            insort(self.prompts, row.prompt)
        self.start[row.slot] = self.clock - row.known
        self.most[row.slot] = row.need
        self.safe = -1

    def extend(self, steps: int) -> list[tuple[Row, int]]:
        """Give pages for `steps` more tokens to every row that is being sampled.

        Returns: the rows that lost their slot and pages to make room, each with its former slot.
        These rows wait in the queue again.
        """
        self.clock += steps
        if self.clock <= self.safe:
            return []
        n = len(self.rows)
        reach = self.reach[:n]
        cut: list[tuple[Row, int]] = []
        short = np.nonzero(reach > self.room[:n])[0]
        for slot in short.tolist():
            row = self.rows[slot]
            if row is None:  # this row gave up its pages for an earlier row in this loop
                continue
            wanted = self.pages.span(int(reach[slot])) - len(row.pages)
            if len(self.pages.left) > PLENTY * n:
                further = self.pages.span(int(self.most[slot])) - len(row.pages)
                wanted = max(wanted, min(AHEAD, further))
            while row.slot >= 0 and not self._find(wanted, row):
                weakest = self._find_weakest()
                cut.append((weakest, weakest.slot))
                self._cut(weakest)
            if row.slot >= 0:
                start = len(row.pages)
                row.pages += [self.pages.take() for _ in range(wanted)]
                self.pages.write(slot, row.pages[start:], start)
                self.room[slot] = len(row.pages) * self.pages.page
        most = self.most[:n]
        room = self.room[:n]
        left = (room - reach).min(where=room < most, initial=FOREVER)
        self.safe = self.clock + int(left)
        self.oldest = int(self.start[:n].min(where=most > 0, initial=self.clock))
        self.furthest = int(most.max(initial=1))
        return cut

    def _find_weakest(self) -> Row:
        """Return the row with the fewest sampled tokens. Among rows with equally many, return the
        row with the shortest prompt."""
        reach = self.reach.tolist()
        return min(
            self.active,
            key=lambda row: (
                max(len(row.context), reach[row.slot]) - len(row.prompt),
                len(row.prompt),
                row.prompt,
                row.seed,
            ),
        )

    def _cut(self, row: Row) -> None:
        """Take away a row's slot and pages, and put the row back into the queue. Once the row has a
        slot again, the model reads its whole context again."""
        self.stopped.append(row.slot)
        self._leave(row)
        self._strip(row)
        self.queue.append(row)
