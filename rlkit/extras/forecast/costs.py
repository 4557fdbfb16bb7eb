"""Compute the seconds and bytes of a step and of a run from a few timed passes. This file is
arithmetic alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rlkit.training.update.split import SHARED
from rlkit.types import Rollout

SHARE = 0.5  # assumed length of a reply of unknown length, as a share of its limit


class Counts(NamedTuple):
    """Numbers of groups, rollouts and tokens. The samples of a group share their first prompt."""

    groups: float
    size: float  # rollouts per group
    prompt: float  # tokens of the first prompt
    later: float  # tokens per rollout read between its replies, such as tool results
    drawn: float  # sampled tokens per rollout

    @property
    def rollouts(self) -> float:
        return self.groups * self.size

    @property
    def first(self) -> float:
        """Return the tokens of the first prompts, each counted once per group."""
        return self.groups * self.prompt

    @property
    def read(self) -> float:
        """Return the tokens read by sampling."""
        return self.first + self.rollouts * self.later

    @property
    def sampled(self) -> float:
        return self.rollouts * self.drawn

    @property
    def decoded(self) -> float:
        """Return the number of decoded tokens: all sampled tokens except the first of each rollout,
        which needs no decoding step."""
        return max(0.0, self.sampled - self.rollouts)

    @property
    def packed(self) -> float:
        """Return the tokens read by an update."""
        return self.read + self.sampled

    @property
    def row(self) -> float:
        """Return the tokens of one rollout."""
        return self.prompt + self.later + self.drawn


class Timed(NamedTuple):
    """The sizes of some rollouts, and the seconds of a pass over them."""

    of: Counts
    seconds: float


class Passes(NamedTuple):
    """The timed passes of a check. In each pair, the second pass has at least as many tokens as the
    first."""

    sampling: tuple[Timed, Timed]  # the same prompts, with one token per reply and with more tokens
    scoring: tuple[Timed, Timed]  # the passes without gradient in the two updates
    update: tuple[Timed, Timed]  # two whole updates, scoring included
    evaluation: Timed | None


class Costs(NamedTuple):
    """The seconds of the parts of a step, and the seconds of all evaluations of the run
    together."""

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
    """Three sizes in memory at the same time: tokens of a micro-batch, entries of a chunk of
    logits, and tokens with keys and values. `forecast_peak` also uses this class for the bytes of
    one token or entry."""

    tokens: float
    logits: float
    cached: float


def count(rollouts: Sequence[Rollout]) -> Counts:
    """Count the sizes of some rollouts. Numbers of tokens are means.

    Raises: ValueError if no rollout has a step.
    """
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
    """Estimate the mean number of sampled tokens per rollout in the run.

    Args:
      rollouts: the rollouts of the check. Their replies may have a lower limit of tokens than in
        the run.
      limit: the most tokens of a reply in the run.
      share: length of each reply as a share of the limit. None: a reply that ended by itself keeps
        its own length. A reply truncated at a lower limit counts as SHARE of the run's limit.
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
    """Return the number of evaluations in a run on the validation problems and on the test
    problems."""
    return (1 + -(-steps // every) if every else 0), 2


def scale_passes(timed: Passes, step: Counts, evaluated: Counts, steps: int) -> Costs:
    """Scale timed passes to a run.

    Args:
      timed: the timed passes.
      step: the sizes of one step of the run.
      evaluated: the sizes of all evaluations of the run together.
      steps: the number of steps of the run.
    Sampling costs p seconds per prompt token and d seconds per decoded token. p is the time of
    one-token replies divided by the tokens read, so p includes the host's work for an episode. d
    comes from the additional time of longer replies, so d includes their later turns. Tokens of
    turns reached only by even longer replies cost p. All costs are extrapolated from the larger
    pass, so a step that was timed as a whole costs exactly its time. The seconds of updates are a
    straight line through the two timed updates, or a line through zero.
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
    """Return the seconds at a number of packed tokens, by the line through two passes.

    The slope is at least 0, and at most the slope of the line through zero and the larger pass: no
    work must not have a negative cost. If both passes have the same size, the line through zero is
    used.
    """
    slope = large.seconds / large.of.packed
    gap = large.of.packed - small.of.packed
    if gap > 0:
        slope = min(slope, max(0.0, large.seconds - small.seconds) / gap)
    return large.seconds + slope * (tokens - large.of.packed)


def size_room(
    of: Counts, *, minibatches: int = 1, micro: int, vocabulary: int, chunk: int, rows: int
) -> Room:
    """Compute the room that a step needs in memory.

    Args:
      of: the sizes of the step.
      minibatches: number of minibatches of the step.
      micro: the most tokens of a micro-batch, counted as `split_into_micro_batches` does.
      vocabulary: entries of the logits of one token.
      chunk: the most entries of logits held at once.
      rows: the most rollouts decoded at once.
    """
    rollouts = max(1.0, of.rollouts / minibatches)
    own = of.packed * rollouts / of.rollouts
    counted = own + (rollouts * of.row - own) / SHARED
    share = min(1.0, max(micro, of.row) / counted) * rollouts / of.rollouts
    entries = min(chunk, share * of.sampled * vocabulary)
    return Room(share * of.packed, entries, of.packed * min(1.0, rows / of.rollouts))


def forecast_peak(measured: float, taken: Room, needed: Room, size: Room) -> float:
    """Forecast the peak of a run in bytes.

    Args:
      measured: the measured peak in bytes.
      taken: the room used when the peak was measured.
      needed: the room that the run needs.
      size: the bytes of one token or entry of each kind.
    """
    more = (s * max(0.0, n - t) for t, n, s in zip(taken, needed, size, strict=True))
    return measured + sum(more)
