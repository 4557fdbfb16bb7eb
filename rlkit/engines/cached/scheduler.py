"""The decoder of the cached engine: when contexts are read, when slots draw, and when the host
checks for ended completions.

    queue ──▶ slot ──▶ new tokens in one pass ──▶ one token a step in all slots ──▶ completion
               ▲                                                                        │
               └── the next prompt of the same episode; its shared beginning is kept ───┘

An episode keeps its pages until it is released, so a turn costs only its new tokens. Equal prompts,
such as those of a task's samples, are read once. The host reads nothing in a decoding step: every
slot in use goes through the model, and slots that do not draw are masked. So on CUDA the step is
captured as a graph, for a few numbers of slots and pages, and the host looks for ended completions
every few steps. Pages and graphs stay in place from call to call, as long as the weights do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.cached.attention import Part, cut_slots
from rlkit.engines.cached.cache import FLASH_PAGE, PAGE, Pages
from rlkit.engines.cached.graphs import Graphs, Shape, can_capture
from rlkit.engines.cached.kernel import choose_kernel
from rlkit.engines.cached.passes import Passes
from rlkit.engines.cached.sampler import Sampler
from rlkit.engines.cached.slots import Row, Slots
from rlkit.types import Generation, Policy, SamplingParams

MOST_READ = 1 << 14  # tokens read in one pass, padding included
# Reading a few contexts costs more than letting them wait. Waiting rows are read once they are at
# least 1 / READ_AT of the rows in slots, or once their waits add up to (rows in slots) / WAIT
# steps.
READ_AT = 32
WAIT = 4
QUARTERS = 4  # a captured step is cut into this many parts
SLOTS = 8  # the numbers of slots of captured steps are multiples of this
SAMPLERS = 8  # at most this many states of all slots are kept, one for each kind of sampling


class Scheduler:
    """The decoder: its slots, and the order of the model's work for them.

    Args:
      max_rows, check_every, cuda_graphs, kernel: see `Cached`. tokens: size of the cache.
        in_place: whether steps read pages in place.
    """

    sampler: Sampler  # for the present parameters

    def __init__(
        self,
        policy: Policy,
        causal: Any,
        *,
        max_rows: int,
        tokens: int,
        check_every: int | None,
        cuda_graphs: bool,
        kernel: str = "auto",
        in_place: bool = False,
    ):
        self.policy = policy
        self.causal = causal
        self.tokens = tokens
        self.device = device = next(causal.parameters()).device
        self.check_every = check_every or (1 if device.type == "cpu" else 8)
        self.on_cpu = not can_capture(device)
        self.cuda_graphs = cuda_graphs and not self.on_cpu
        self.in_parts = not self.on_cpu and not in_place
        # one position more than there are tokens: an ended row points there
        context = policy.context_length + 1
        self.pages = Pages(
            max(tokens, context), max_rows, context, device, FLASH_PAGE if in_place else PAGE
        )
        self.slots = Slots(self.pages)
        self.passes = Passes(policy, causal, self.pages, in_place=in_place)
        self.asked = kernel
        if not self.on_cpu and kernel == "auto":
            self.kernel = None
            self.why_eager = "it needs float32 weights on a CPU"
        else:
            self.kernel, self.why_eager = choose_kernel(
                kernel, self.passes.forward, self.passes.head
            )
        self.graphs = Graphs(causal, device)
        self.samplers: dict[Any, Sampler] = {}
        self.params: SamplingParams | None = None  # of the completions under way
        self.rounds = 0
        self.changed = False  # whether there may be slots to fill or holes to close
        self.waited = 0  # steps of waiting to be read, summed over the rows
        self.parts: list[Part] = []  # of the slots in use, before the next step

    # --------------------------------------------------------------------------------- the contract

    @property
    def idle(self) -> bool:
        return self.slots.idle

    @property
    def fused(self) -> bool:
        """Whether steps are calls of the kernel."""
        return self.kernel is not None and self.kernel.serves(self.sampler)

    def accepts(self, params: SamplingParams) -> bool:
        """Completions with other parameters wait until the present ones have ended."""
        return self.params is None or params == self.params or self.idle

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        if params != self.params:  # the service asked `accepts`: nothing is being sampled
            self.forget_episodes()
            self.params = params
            self.sampler = self.get_sampler(params)
        prompt = tuple(prompt_ids)
        most = min(len(prompt) + params.max_new_tokens, self.policy.context_length)
        self.slots.submit(key, prompt, seed, max(most, len(prompt)))
        self.changed = True

    def release(self, key: int) -> None:
        self.slots.release(key)
        self.changed = True

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Generation]]:
        """A pass over unread contexts, or a few steps of decoding."""
        if self.changed:
            self.fill()
        reading = self.slots.reading
        rows = len(self.slots.rows)
        if reading and (READ_AT * len(reading) >= rows or WAIT * self.waited >= rows):
            self.read(reading)
            self.rounds += 1
            self.waited = 0
        else:
            self.draw()
            self.rounds += self.check_every
            self.waited += len(reading) * self.check_every
        out = []
        for slot, completion in self.sampler.take(len(self.slots.rows)):
            row = self.slots.rows[slot]
            if row is not None:
                self.slots.finish(row, completion.token_ids)
                out.append((row.key, completion))
                self.changed = True
        return out

    @torch.inference_mode()
    def forget_episodes(self) -> None:
        """Forget every episode; the memory stays, for the next ones."""
        if self.params is not None and self.slots.rows:
            self.sampler.stop(self.pages.indices)
        self.slots.clear()
        self.pages.flush()
        self.parts = []
        self.waited = 0
        self.changed = False

    def clear(self) -> None:
        """Forget every episode, and free the memory."""
        self.slots.clear()
        self.pages.clear()
        self.samplers = {}
        self.params = None
        self.graphs.forget()

    # ---------------------------------------------------------------------------------------- slots

    def fill(self) -> None:
        """Give free slots to waiting rows, and close holes."""
        self.changed = False
        stopped = self.slots.stopped
        self.slots.stopped = []
        if stopped:
            self.sampler.stop(self.tensor(stopped))
        moves = self.slots.fill()
        if moves:
            source, target = self.tensor(moves).T
            self.sampler.move(source, target)
            self.sampler.stop(source)
        if self.in_parts:
            order = self.slots.sort()
            if order:
                self.sampler.move(*self.tensor(order).T)
        enter = self.slots.reading
        if enter:
            # These rows draw nothing until their contexts are read. Until then every step writes
            # keys and values at their positions, and the reading pass overwrites these.
            at = self.tensor([row.slot for row in enter])
            self.sampler.stop(at)
            self.sampler.position[at] = self.tensor([row.known for row in enter])
        self.pages.flush()
        self.parts = []

    def get_sampler(self, params: SamplingParams) -> Sampler:
        """The state of all slots for these parameters. Equal parameters get the same state again,
        because captured graphs hold its addresses."""
        key = select_captured_settings(params)
        if key not in self.samplers and len(self.samplers) == SAMPLERS:
            self.samplers.clear()
            self.graphs.forget()
        if key not in self.samplers:
            self.samplers[key] = Sampler(
                self.pages.slots, self.policy, params, self.device, self.cuda_graphs
            )
        self.samplers[key].begin_call(params)
        return self.samplers[key]

    def make_room(self, steps: int) -> None:
        """Give every drawing slot pages for `steps` more tokens. Rows cut to make room keep their
        draws."""
        cut = self.slots.extend(steps)
        drew = [(row, slot) for row, slot in cut if not row.reads]
        if drew:
            saved = self.sampler.save([slot for _, slot in drew])
            for (row, _), own in zip(drew, saved, strict=True):
                row.saved = own
                row.reads = True
        if cut:
            self.fill()
        self.pages.flush()

    def tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    # -------------------------------------------------------------------------------------- reading

    def read(self, rows: Sequence[Row]) -> None:
        """Read the new part of these rows' contexts, and draw the next token of each."""
        page = self.pages.page
        firsts: dict[Any, Row] = {}  # a prompt and its shared pages → the row that reads them
        sources = []
        for row in rows:
            alone = row.known or row.saved is not None
            shared = (row.prompt, tuple(row.pages[: len(row.prompt) // page]))
            sources.append(row if alone else firsts.setdefault(shared, row))
        last: dict[int, Tensor] = {}  # slot → hidden state of its last token
        unique = {row.slot: row for row in sources}
        for part in micro_batches(sorted(unique.values(), key=lambda r: (r.known > 0, r.slot))):
            states = self.passes.read(part)
            last |= zip((row.slot for row in part), states, strict=True)
        pairs = [
            (source.pages[len(row.prompt) // page], row.pages[len(row.prompt) // page])
            for row, source in zip(rows, sources, strict=True)
            if row is not source and len(row.prompt) % page
        ]
        if pairs:
            self.pages.copy(*zip(*pairs, strict=True))
        at = self.tensor([row.slot for row in rows])
        self.sampler.begin(at, [row.prompt for row in rows], [row.seed for row in rows])
        went_on = [(row.slot, row.saved) for row in rows if row.saved is not None]
        if went_on:
            slots, saved = zip(*went_on, strict=True)
            self.sampler.go_on(self.tensor(slots), saved)
        for row in rows:
            self.slots.begin(row)
        states = torch.stack([last[source.slot] for source in sources])
        self.sampler.draw(at, self.passes.logits(states))
        self.parts = []

    # ------------------------------------------------------------------------------------- decoding

    def draw(self) -> None:
        """Draw tokens in every drawing slot until the host looks again."""
        self.make_room(self.check_every)
        longest = self.slots.longest
        for _ in range(self.check_every):
            self.step(longest)

    def step(self, longest: int) -> None:
        """Draw one more token in every drawing slot; none of them sees more than `longest`
        positions. The state of the others does not change."""
        assert self.params is not None
        rows = len(self.slots.rows)
        if self.on_cpu:
            parts = () if self.fused else self.measured(rows)
            self.decode(rows, self.pages.span(longest), parts)
            return
        slots = min(round_to_bucket(-(-rows // SLOTS)) * SLOTS, self.pages.slots)
        parts = self.cut_equally(slots)
        columns = [self.pages.span(length) for _, _, length in parts]
        if self.cuda_graphs and not self.sampler.asks_the_host:
            shape = Shape(select_captured_settings(self.params), slots, tuple(columns))
            self.graphs(shape, lambda: self.decode(slots, max(columns), parts))
        else:
            self.decode(slots, max(columns), parts)

    def cut_equally(self, slots: int) -> Sequence[Part]:
        """Cut the slots into equal parts. Each reads as many pages as its longest row has, rounded
        up by `round_to_bucket`. Slots are sorted by length, so few pages are read for nothing."""
        number = QUARTERS if self.in_parts else 1
        edges = sorted({slots * k // number for k in range(number + 1)})
        parts = []
        for start, stop in pairwise(edges):
            longest = int(self.slots.reach[start:stop].max(initial=1))
            columns = min(round_to_bucket(self.pages.span(longest)), self.pages.columns)
            parts.append((start, stop, columns * self.pages.page))
        return parts

    def decode(self, slots: int, columns: int, parts: Sequence[Part] = ()) -> None:
        """One decoding step for the first `slots` slots, over the first `columns` columns of the
        table; each of `parts` may read fewer.

        It reads and writes only the state tensors, in place, and never asks the host, so it can be
        captured as a CUDA graph.
        """
        sampler = self.sampler
        if self.kernel is not None and self.fused:
            self.kernel(self.pages, sampler, slots, columns * self.pages.page)
            return
        logits = self.passes.step(sampler.last[:slots], sampler.position[:slots], columns, parts)
        sampler.draw(self.pages.indices[:slots], logits, begun=True)

    def measured(self, slots: int) -> Sequence[Part]:
        """On a CPU, cut the slots in use into parts of similar length."""
        if not self.parts:
            reach = self.slots.reach[:slots]
            self.parts = cut_slots([max(1, n) for n in reach.tolist()])
            return self.parts
        most = self.policy.context_length
        self.parts = [(start, stop, min(n + 1, most)) for start, stop, n in self.parts]
        return self.parts


def micro_batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield the rows of one pass: either none has cached tokens, or all have some. A pass has at
    most MOST_READ tokens with padding."""
    part: list[Row] = []
    width = 0
    for row in rows:
        mine = len(row.context) - row.known
        if part and (
            max(width, mine) * (len(part) + 1) > MOST_READ or bool(row.known) != bool(part[0].known)
        ):
            yield part
            part = []
            width = 0
        part.append(row)
        width = max(width, mine)
    if part:
        yield part


def round_to_bucket(number: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: this gives few shapes, each at
    most 1.5 times as large as needed."""
    octave = 1 << (number - 1).bit_length()  # the next power of two
    return octave * 3 // 4 if octave > 2 and number <= octave * 3 // 4 else octave


def select_captured_settings(params: SamplingParams) -> Any:
    """The parameters that a captured step depends on. Of the temperature only its kind matters: 0
    (greedy), 1 (no division), or any other value."""
    return params._replace(
        temperature=params.temperature if params.temperature in (0, 1) else -1.0,
        admission="free",
        admission_rounds=1,
    )
