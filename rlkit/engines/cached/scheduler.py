"""Schedule the decoding of the cached engine. This file decides when contexts are read, when the
next tokens are sampled, and when the host checks for ended completions.

    queue ──▶ slot ──▶ new tokens in one pass ──▶ one token a step in all slots ──▶ completion
               ▲                                                                        │
               └── the next prompt of the same episode; its shared beginning is kept ───┘

An episode keeps its pages until it is released, so a turn costs only its new tokens. Prompts share
the pages of their common beginning: the samples of a group share their whole prompt, and prompts
with one system prompt, the same tools or the same worked examples share these. If the prompts of a
call share much, the first one is read alone before the others.

The host reads no tensor in a decoding step. Every slot in use goes through the model, and slots
with no token to sample are masked. Therefore a step on CUDA can be captured as a graph, for a few
numbers of slots and pages. The host checks for ended completions only every few steps. Pages and
graphs stay in place from call to call, as long as the weights stay in place.
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
from rlkit.engines.cached.kernel import choose_kernel, explain_call
from rlkit.engines.cached.passes import Passes
from rlkit.engines.cached.sampler import Sampler
from rlkit.engines.cached.slots import Row, Slots
from rlkit.errors import EngineError
from rlkit.types import Generation, Policy, SamplingParams

MOST_READ = 1 << 14  # the most tokens read in one pass, padding included
MOST_SEEN = (
    1 << 16
)  # the most tokens whose keys and values a pass copies out of the pages of its rows
# Reading a few contexts costs more than letting them wait. The contexts of waiting rows are read in
# two cases. In the first case, these rows are at least 1 / READ_AT of the rows in slots. In the
# second case, the numbers of steps that they have waited add up to at least (rows in slots) / WAIT.
READ_AT = 32
WAIT = 4
QUARTERS = 4  # a captured step divides its slots into this many ranges
SLOTS = 8  # the number of slots in a captured step is a multiple of this, or all slots
SAMPLERS = 8  # the most samplers kept, one for each kind of sampling parameters


class Scheduler:
    """Schedule the model's work. This class holds the slots, and it decides in each round whether
    the model reads contexts or decodes.

    Args:
      max_rows, check_every, cuda_graphs, kernel: see `Cached`.
      tokens: size of the cache in tokens.
      in_place: True if decoding steps read pages in place.
    """

    sampler: Sampler  # the sampler of the present parameters

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
        # one position more than the context has, because a row that has ended may point to this
        # position
        context = policy.context_length + 1
        self.pages = Pages(
            max(tokens, context), max_rows, context, device, FLASH_PAGE if in_place else PAGE
        )
        self.slots = Slots(self.pages)
        self.passes = Passes(policy, causal, self.pages, in_place=in_place)
        if in_place and self.passes.forward is None:
            raise EngineError(
                "generation.cache=varlen: the model has a forward pass of its own; use gather"
            )
        self.asked = kernel
        if not self.on_cpu and kernel == "auto":
            self.kernel = None
            self.why_eager = "it needs float32 or bfloat16 weights on a CPU"
        else:
            self.kernel, self.why_eager = choose_kernel(
                kernel, self.passes.forward, self.passes.head
            )
        self.graphs = Graphs(causal, device)
        self.samplers: dict[Any, Sampler] = {}
        self.params: SamplingParams | None = None  # the parameters of the running completions
        self.rounds = 0
        self.changed = False  # True if `fill` may have free slots to give or holes to close
        self.waited = 0  # steps that rows have waited to be read, summed over these rows
        self.parts: list[Part] = []  # ranges of the slots in use, for the next step on a CPU

    # --------------------------------------------------------------------------------- the contract

    @property
    def idle(self) -> bool:
        return self.slots.idle

    @property
    def fused(self) -> bool:
        """Return whether decoding steps are calls of the compiled kernel."""
        return self.kernel is not None and not self.why_eager

    def accepts(self, params: SamplingParams) -> bool:
        """Return whether completions with these parameters can start now. Completions with other
        parameters wait until the running ones have ended."""
        return self.params is None or params == self.params or self.idle

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        if params != self.params:  # the service has asked `accepts`, so no completion is running
            self.forget_episodes()
            self.params = params
            self.sampler = self.get_sampler(params)
        if self.kernel is not None:
            self.why_eager = explain_call(params)
        prompt = tuple(prompt_ids)
        most = min(len(prompt) + params.max_new_tokens, self.policy.context_length)
        self.slots.submit(key, prompt, seed, max(most, len(prompt)))
        self.changed = True

    def release(self, key: int) -> None:
        self.slots.release(key)
        self.changed = True

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Generation]]:
        """Read the contexts of waiting rows in one or more passes, or decode for `check_every`
        steps. Return the completions that have ended, each with the key of its episode."""
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
        """Forget every episode. The memory stays allocated for the next episodes."""
        if self.params is not None and self.slots.rows:
            self.sampler.stop(self.pages.indices)
        self.slots.clear()
        self.pages.flush()
        self.parts = []
        self.waited = 0
        self.changed = False

    def clear(self) -> None:
        """Forget every episode, and free the memory of the cache."""
        self.slots.clear()
        self.pages.clear()
        self.samplers = {}
        self.params = None
        self.graphs.forget()

    # ---------------------------------------------------------------------------------------- slots

    def fill(self) -> None:
        """Give free slots to rows in the queue. Then move rows so that the slots in use have the
        lowest numbers."""
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
            # No token is sampled for these rows until their contexts are read. Until then every
            # step writes keys and values at the rows' positions, and the reading pass overwrites
            # these keys and values.
            at = self.tensor([row.slot for row in enter])
            self.sampler.stop(at)
            self.sampler.position[at] = self.tensor([row.known for row in enter])
        self.pages.flush()
        self.parts = []

    def get_sampler(self, params: SamplingParams) -> Sampler:
        """Return the sampler for these parameters. Equal parameters get the same sampler again,
        because captured graphs hold the addresses of its tensors."""
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
        """Give pages for `steps` more tokens to every slot in which tokens are sampled. If pages
        run out, some rows lose their slot and pages. The tokens already sampled for these rows are
        saved."""
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
        """Let the model read the unread part of these rows' contexts, and sample the next token of
        each row."""
        page = self.pages.page
        firsts: dict[Any, Row] = {}  # (a prompt, its shared pages) → the row that reads the prompt
        sources = []
        for row in rows:
            alone = row.tokens or row.saved is not None  # a part of the context is the row's own
            shared = (row.prompt, tuple(row.pages[: len(row.prompt) // page]))
            sources.append(row if alone else firsts.setdefault(shared, row))
        last: dict[int, Tensor] = {}  # slot → hidden state of the context's last token
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
        self.changed |= bool(self.slots.queue)  # a row in the queue may share pages now
        states = torch.stack([last[source.slot] for source in sources])
        self.sampler.draw(at, self.passes.logits(states))
        self.parts = []

    # ------------------------------------------------------------------------------------- decoding

    def draw(self) -> None:
        """Sample `check_every` tokens in every slot whose completion has not ended. Afterwards, the
        host checks again for ended completions."""
        self.make_room(self.check_every)
        longest = self.slots.longest
        for _ in range(self.check_every):
            self.step(longest)

    def step(self, longest: int) -> None:
        """Sample one more token in every slot whose completion has not ended. The state of the
        other slots does not change.

        Args:
          longest: the most positions that the new token of any slot attends to.
        """
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
        """Divide the slots into ranges of equal size. For every slot of a range, the model reads as
        many pages as the range's longest row has, rounded up by `round_to_bucket`. The slots are
        sorted by length, so few pages are read in vain."""
        number = QUARTERS if self.in_parts else 1
        edges = sorted({slots * k // number for k in range(number + 1)})
        parts = []
        for start, stop in pairwise(edges):
            longest = int(self.slots.reach[start:stop].max(initial=1))
            columns = min(round_to_bucket(self.pages.span(longest)), self.pages.columns)
            parts.append((start, stop, columns * self.pages.page))
        return parts

    def decode(self, slots: int, columns: int, parts: Sequence[Part] = ()) -> None:
        """Run one decoding step for the first `slots` slots. The step reads the first `columns`
        columns of the table of pages; each range of slots in `parts` may read fewer columns.

        The step reads and writes only the state tensors, in place, and the host reads none of these
        tensors. Therefore the step can be captured as a CUDA graph.
        """
        sampler = self.sampler
        if self.kernel is not None and self.fused:
            self.kernel(self.pages, sampler, slots, columns * self.pages.page)
            return
        logits = self.passes.step(sampler.last[:slots], sampler.position[:slots], columns, parts)
        sampler.draw(self.pages.indices[:slots], logits, begun=True)

    def measured(self, slots: int) -> Sequence[Part]:
        """Divide the slots in use into ranges with rows of similar length. This is used only on a
        CPU."""
        if not self.parts:
            reach = self.slots.reach[:slots]
            self.parts = cut_slots([max(1, n) for n in reach.tolist()])
            return self.parts
        most = self.policy.context_length
        self.parts = [(start, stop, min(n + 1, most)) for start, stop, n in self.parts]
        return self.parts


def micro_batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield groups of rows, each to be read in one pass. In a group, either no row has cached
    tokens, or every row has cached tokens. Unless it has only one row, a pass reads at most
    MOST_READ tokens with padding, and its contexts have at most MOST_SEEN tokens with padding."""
    part: list[Row] = []
    width = 0
    longest = 0
    for row in rows:
        width = max(width, len(row.context) - row.known)
        longest = max(longest, len(row.context))
        many = len(part) + 1
        if part and (
            width * many > MOST_READ
            or longest * many > MOST_SEEN
            or bool(row.known) != bool(part[0].known)
        ):
            yield part
            part = []
            width = len(row.context) - row.known
            longest = len(row.context)
        part.append(row)
    if part:
        yield part


def round_to_bucket(number: int) -> int:
    """Round a number up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, … Because of the rounding, captured
    steps have only a few different shapes. The result is at most 1.5 times as large as the
    number."""
    octave = 1 << (number - 1).bit_length()  # the next power of two
    return octave * 3 // 4 if octave > 2 and number <= octave * 3 // 4 else octave


def select_captured_settings(params: SamplingParams) -> Any:
    """Return the sampling parameters that select a captured step. Of the temperature, only its kind
    matters: 0 (greedy), 1 (no division), or any other value."""
    return params._replace(
        temperature=params.temperature if params.temperature in (0, 1) else -1.0,
        admission="free",
        admission_rounds=1,
    )
