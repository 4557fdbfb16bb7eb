"""How full does the cached engine keep its slots? Its own host code runs without a model.

    python experiments/benchmarks/refill.py

Lengths of replies are given, so no model is needed. Each load has 512 completions, 256 slots, and a
cache of 256 mean contexts. The host reads the slots' state every 8 steps, and a pass over prompts
takes no time. refill.csv has, for each load:

    steps_to_ideal   decoding steps ÷ the steps of 256 slots that are refilled at once, in the same
                     order, with a cache without bounds
    rows_drawing     mean share of the 256 slots that sample, over the steps with a waiting row
    drawn_to_needed  tokens sampled ÷ tokens of the completions
    read_to_prompts  tokens read ÷ tokens of the prompts, each counted once for its 8 samples
    cut              rows that lost their pages to another row and must be read again
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import bench
import torch

from rlkit.engines import Cached
from rlkit.engines.cached.passes import Passes
from rlkit.engines.cached.sampler import Sampler
from rlkit.models import load_policy
from rlkit.types import SamplingParams

SLOTS, GROUP = 256, 8
# Quantiles (1/64, 3/64, …) of the lengths of GSM8K's solutions, in words and signs, divided by
# their mean.
SOLUTIONS = (
    *(
        0.42,
        0.48,
        0.51,
        0.55,
        0.57,
        0.60,
        0.63,
        0.67,
        0.69,
        0.72,
        0.74,
        0.78,
        0.80,
        0.83,
        0.87,
        0.90,
    ),
    *(
        0.93,
        0.96,
        1.00,
        1.04,
        1.09,
        1.13,
        1.16,
        1.21,
        1.25,
        1.30,
        1.39,
        1.45,
        1.53,
        1.66,
        1.86,
        2.18,
    ),
)


class Load(NamedTuple):
    """Prompts and replies of one kind, in tokens.

    spread: distribution of the reply lengths around their mean: "solutions" as GSM8K's, "wide"
    lognormal with σ = 0.7, "forced" all equal.
    """

    prompt: int
    reply: int
    limit: int
    spread: str
    completions: int = 512


LOADS = {
    "GSM8K with tools": Load(350, 230, 1024, "solutions"),
    "thinking, 4k": Load(200, 2000, 4096, "wide"),
    "prompts of 2,000": Load(2000, 200, 512, "solutions"),
    "forced lengths": Load(512, 512, 512, "forced"),
}


def lengths(load: Load, seed: int = 0) -> list[int]:
    """Return the length of each reply, in tokens."""
    rng = random.Random(seed)
    drawn = {
        "solutions": lambda: load.reply * rng.choice(SOLUTIONS),
        "wide": lambda: load.reply * rng.lognormvariate(-0.245, 0.7),
        "forced": lambda: float(load.reply),
    }[load.spread]
    return [max(1, min(load.limit, round(drawn()))) for _ in range(load.completions)]


@contextmanager
def without_a_model() -> Iterator[None]:
    """Within the block, compute nothing: a completion's seed is its length in tokens."""
    begin_of_sampler = Sampler.begin

    def begin(self: Any, at: Any, contexts: Any, seeds: Sequence[int]) -> None:
        begin_of_sampler(self, at, contexts, seeds)
        self.limit[at] = torch.tensor(seeds)

    def draw(self: Any, at: Any, logits: Any, begun: bool = False) -> None:
        draws = self.draws[at]
        if begun:
            self.position[at] += draws
        self.count[at] += draws
        ended = draws & (self.count[at] >= self.limit[at])
        self.draws[at] = draws & ~ended
        self.ended[at] |= ended

    with (
        mock.patch.object(Sampler, "begin", begin),
        mock.patch.object(Sampler, "draw", draw),
        mock.patch.object(Passes, "read", lambda self, rows: torch.zeros(len(rows), 1)),
        mock.patch.object(Passes, "step", lambda self, *given: None),
    ):
        yield


def ideal_steps(order: Sequence[int], slots: int) -> int:
    """Return the decoding steps if each of these replies begins as soon as a slot is free.

    The first token of a reply comes from the pass over its prompt.
    """
    free = [0] * slots
    for length in order:
        heapq.heapreplace(free, free[0] + length - 1)
    return max(free)


def measure(load: Load, policy: Any, slots: int = SLOTS) -> dict[str, float]:
    """Sample a load and return its row of figures."""
    asked = lengths(load)
    mean = sum(asked) / len(asked)
    engine = Cached(
        max_rows=slots,
        max_cached_tokens=round(slots * (load.prompt + mean)),
        check_every=8,
        kernel="eager",
    )
    policy = policy._replace(context_length=load.prompt + load.limit)
    drawing: list[float] = []
    drawn = read = cut = steps = 0
    with without_a_model():
        decoder: Any = engine.make_decoder(policy)
        decoder.passes.logits = lambda states: None
        step, read_rows, extend = decoder.step, decoder.passes.read, decoder.slots.extend

        def watched_step(longest: int) -> None:
            nonlocal drawn, steps
            draws = int(decoder.sampler.draws.sum())
            if decoder.slots.queue:
                drawing.append(draws / slots)
            drawn += draws
            steps += draws > 0
            step(longest)

        def watched_read(rows: Any) -> Any:
            nonlocal read
            read += sum(len(row.context) - row.known for row in rows)
            return read_rows(rows)

        def watched_extend(number: int) -> Any:
            nonlocal cut
            found = extend(number)
            cut += len(found)
            return found

        decoder.step = watched_step
        decoder.passes.read = watched_read
        decoder.slots.extend = watched_extend
        params = SamplingParams(max_new_tokens=load.limit)
        for key, length in enumerate(asked):
            prompt = (key // GROUP + 1,) * load.prompt
            decoder.submit(key, prompt, length, params)
        found: dict[int, int] = {}
        while not decoder.idle:
            for key, reply in decoder.advance():
                found[key] = len(reply.token_ids)
                decoder.release(key)
    assert [found[key] for key in range(len(asked))] == asked
    return {
        "steps_to_ideal": round(steps / ideal_steps(asked, slots), 4),
        "rows_drawing": round(sum(drawing) / len(drawing), 4),
        "drawn_to_needed": round(drawn / sum(length - 1 for length in asked), 4),
        "read_to_prompts": round(read / (load.prompt * len(asked) / GROUP), 3),
        "cut": cut,
    }


if __name__ == "__main__":
    given = bench.parser(__doc__, rounds=1, threads=1, device=False).parse_args()
    tiny = load_policy(path="tiny")
    rows = []
    for name, own in LOADS.items():
        rows.append({"load": name, **measure(own, tiny), **bench.provenance(given.threads)})
    bench.write(given.out, "refill", rows)
