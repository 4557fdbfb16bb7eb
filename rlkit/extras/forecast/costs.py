"""Seconds and bytes of a step and of a run, from a few timed passes: arithmetic alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rlkit.types import Rollout

SHARE = 0.5  # of its limit, for a reply of unknown length; assumed


class Counts(NamedTuple):
    """Numbers of rollouts and of tokens. The samples of a group share their first prompt."""

    groups: float
    size: float  # rollouts of a group
    prompt: float  # tokens of the first prompt
    later: float  # tokens a rollout that the policy reads after its own replies
    drawn: float  # sampled tokens a rollout

    @property
    def rollouts(self) -> float:
        return self.groups * self.size

    @property
    def first(self) -> float:
        """Tokens of the first prompts."""
        return self.groups * self.prompt

    @property
    def read(self) -> float:
        """Tokens read by sampling."""
        return self.first + self.rollouts * self.later

    @property
    def sampled(self) -> float:
        return self.rollouts * self.drawn

    @property
    def decoded(self) -> float:
        """Sampled tokens without the first of each rollout, which needs no decoding step."""
        return max(0.0, self.sampled - self.rollouts)

    @property
    def packed(self) -> float:
        """Tokens read by an update."""
        return self.read + self.sampled

    @property
    def row(self) -> float:
        """Tokens of one rollout."""
        return self.prompt + self.later + self.drawn


class Timed(NamedTuple):
    """A pass over some rollouts, and its seconds."""

    of: Counts
    seconds: float


class Passes(NamedTuple):
    """The timed passes of a check. The second of a pair has at least as many tokens."""

    sampling: tuple[Timed, Timed]  # the same prompts: with one token a reply, and with more
    scoring: tuple[Timed, Timed]  # the part of the two updates without gradient
    update: tuple[Timed, Timed]  # whole updates, scoring included
    evaluation: Timed | None


class Costs(NamedTuple):
    """Seconds of the parts of a step, and of all evaluations of the run together."""

    prefill: float
    decode: float
    scoring: float
    update: float
    evaluation: float
    steps: int

    @property
    def sampling(self) -> float:
        return self.prefill + self.decode

    @property
    def step(self) -> float:
        return self.sampling + self.scoring + self.update

    @property
    def run(self) -> float:
        return self.steps * self.step + self.evaluation


class Room(NamedTuple):
    """Everything in memory at once: tokens of a micro-batch, entries of a chunk of logits, and
    tokens with keys and values. In `forecast_peak` also bytes of one of each."""

    tokens: float
    logits: float
    cached: float


def count(rollouts: Sequence[Rollout]) -> Counts:
    """The sizes of some rollouts, tokens as means. Raises: ValueError if no rollout has a step."""
    prompts: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for rollout in rollouts:
        prompts[rollout.group].update(step.prompt_ids for step in rollout.steps[:1])
    read = sum(len(ids) for group in prompts.values() for ids in group)
    if not read:
        raise ValueError("count: no rollout has a step")
    later = sum(len(step.prompt_ids) for r in rollouts for step in r.steps[1:])
    n = len(rollouts)
    drawn = sum(r.response_length for r in rollouts)
    return Counts(len(prompts), n / len(prompts), read / len(prompts), later / n, drawn / n)


def expect_drawn(rollouts: Sequence[Rollout], limit: int, share: float | None = None) -> float:
    """Expect the mean number of sampled tokens of a rollout of the run.

    Args:
      rollouts: of the check, perhaps cut at fewer tokens than a run's.
      limit: tokens of a reply in the run.
      share: part of the limit filled by each reply. None: a reply that ended by itself has its own
        length; a shorter reply that was cut has SHARE of the limit.
    """
    total = 0.0
    for rollout in rollouts:
        if share is not None:
            total += max(1.0, share * limit) * len(rollout.steps)
            continue
        total += rollout.response_length
        if rollout.truncation == "length":
            total += max(0.0, SHARE * limit - len(rollout.steps[-1].response_ids))
    return total / len(rollouts)


def count_evaluations(steps: int, every: int) -> tuple[int, int]:
    """Evaluations of a run on validation and on test problems, if it has such problems."""
    return (1 + -(-steps // every) if every else 0), 2


def scale_passes(timed: Passes, step: Counts, evaluated: Counts, steps: int) -> Costs:
    """Scale timed passes to a run: `step` is one step, `evaluated` all evaluations together.

    Sampling costs p a prompt token and d a decoded token. p is the time of one-token replies
    divided by the tokens read, so it holds the host's work for an episode too. d comes from the
    extra time of longer replies, so it holds later turns. Turns reached only by longer replies are
    read at p. All start from the larger pass, so a step timed whole costs exactly its time. Updates
    are a straight line through their two passes, or one through zero.
    """
    short, long = timed.sampling
    p = short.seconds / short.of.first
    added = max(0.0, long.seconds - p * long.of.first)
    d = added / long.of.decoded if long.of.decoded else 0.0
    later = step.rollouts * max(0.0, step.later - long.of.later)
    sampling = long.seconds + p * (step.first + later - long.of.first)
    sampling += d * (step.decoded - long.of.decoded)
    prefill = min(sampling, p * (step.first + later))
    scoring = extend_line(*timed.scoring, step.packed)
    evaluation = 0.0
    if timed.evaluation is not None and evaluated.groups:
        of, seconds = timed.evaluation
        one = seconds / of.rollouts + d * (evaluated.drawn - of.drawn)
        evaluation = evaluated.rollouts * max(0.0, one)
    update = extend_line(*timed.update, step.packed) - scoring
    return Costs(prefill, sampling - prefill, scoring, update, evaluation, steps)


def extend_line(small: Timed, large: Timed, tokens: float) -> float:
    """Seconds at a number of packed tokens, by the line through two passes.

    Its slope is at least 0 and at most the slope of a line through zero: no work costs less than
    nothing. Two passes of one size give the line through zero.
    """
    slope = large.seconds / large.of.packed
    gap = large.of.packed - small.of.packed
    if gap > 0:
        slope = min(slope, max(0.0, large.seconds - small.seconds) / gap)
    return large.seconds + slope * (tokens - large.of.packed)


def size_room(
    of: Counts, *, minibatches: int = 1, micro: int, vocabulary: int, chunk: int, rows: int
) -> Room:
    """The room of a step.

    Args:
      micro: most tokens of a micro-batch; a prompt counts for each of its samples there.
      chunk: most entries of logits at once. rows: most rollouts that decode at once.
    """
    rollouts = max(1.0, of.rollouts / minibatches)
    share = min(1.0, max(micro, of.row) / (rollouts * of.row)) * rollouts / of.rollouts
    entries = min(chunk, share * of.sampled * vocabulary)
    return Room(share * of.packed, entries, of.packed * min(1.0, rows / of.rollouts))


def forecast_peak(measured: float, taken: Room, needed: Room, size: Room) -> float:
    """Forecast the bytes at the peak of a run, from the peak measured with the room `taken`; `size`
    has the bytes of one of each."""
    more = (s * max(0.0, n - t) for t, n, s in zip(taken, needed, size, strict=True))
    return measured + sum(more)
