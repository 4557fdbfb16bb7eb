"""Measure the insides of `rlkit.engines.cached`; no other file here uses its internal names."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from rlkit.engines.cached import graphs
from rlkit.engines.cached.sampler import Sampler


class Look(NamedTuple):
    """One look: a call of the decoder that samples some tokens for each row.

    After the call the host reads which rows have ended.
    """

    begun: float  # seconds of the host's clock
    launched: float  # start of the first graph replay in the call; equals `begun` without a replay
    ended: float
    rounds: int  # tokens sampled by each row, unless it ended earlier


@dataclass
class Watch:
    """Counts and times of an engine within `watched`."""

    captures: int = 0
    replays: int = 0
    launched: float = 0.0
    looks: list[Look] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)

    @property
    def refused(self) -> int:
        """The number of warnings about a model that cannot be captured."""
        return sum("cannot be captured" in text for text in self.warned)

    def host_ms(self, first: int = 0) -> float:
        """Return the mean milliseconds from the end of a look to the first launch of the next look.

        Meanwhile the card is idle. `first` is the index of the first look that counts. The
        result is nan with fewer than two looks.
        """
        gaps = [b.launched - a.ended for a, b in itertools.pairwise(self.looks[first:])]
        return 1e3 * sum(gaps) / len(gaps) if gaps else math.nan


@contextmanager
def watched(engine: Any) -> Iterator[Watch]:
    """Within the block, count captures, replays and refusals of CUDA graphs, and time each look."""
    watch = Watch()
    make_decoder = engine.make_decoder

    def made(policy: Any) -> Any:
        decoder = make_decoder(policy)
        vars(decoder).pop("advance", None)  # left by an earlier watch
        decoder.advance = partial(look, decoder, decoder.advance)
        return decoder

    def look(decoder: Any, advance: Callable[[], Any]) -> Any:
        rounds = decoder.rounds
        watch.launched = 0.0
        begun = time.perf_counter()
        replies = advance()
        ended = time.perf_counter()
        launched = watch.launched or begun
        watch.looks.append(Look(begun, launched, ended, decoder.rounds - rounds))
        return replies

    with counted_graphs(watch), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.make_decoder = made
        try:
            yield watch
        finally:
            del engine.make_decoder
            vars(engine.decoder or watch).pop("advance", None)
            watch.warned = [str(warning.message) for warning in caught]


@contextmanager
def counted_graphs(watch: Watch) -> Iterator[None]:
    """Count captured graphs and their replays. `capture` of cached/graphs.py returns the replay."""
    capture = graphs.capture

    def counted(*given: Any, **named: Any) -> Any:
        replay = capture(*given, **named)
        watch.captures += 1

        def again() -> None:
            watch.replays += 1
            watch.launched = watch.launched or time.perf_counter()
            replay()

        return again

    with mock.patch.object(graphs, "capture", counted):
        yield


@contextmanager
def limited_by_seed(limit_of: Callable[[int], int]) -> Iterator[None]:
    """Within the block, limit each completion to a length computed from its seed.

    SamplingParams cannot hold these limits: the decoder samples completions with different
    parameters one group after another, not together.
    """
    begin = Sampler.begin

    def begun(self: Any, at: Any, contexts: Any, seeds: Any, *more: Any, **named: Any) -> Any:
        out = begin(self, at, contexts, seeds, *more, **named)
        own = torch.tensor([limit_of(int(seed)) for seed in seeds], device=self.limit.device)
        self.limit[at] = torch.minimum(self.limit[at], own)
        return out

    with mock.patch.object(Sampler, "begin", begun):
        yield
