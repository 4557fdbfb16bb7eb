"""Keep the state of every slot's completion in the cached engine, and sample its next token. The
state is a set of tensors with one entry per slot, [S]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.engines.transformers import ThinkingBudget, cut_completion, draw
from rlkit.types import Generation, Policy, SamplingParams

STATE = (
    "last",
    "position",
    "count",
    "limit",
    "seed",
    "draws",
    "ended",
    "tokens",
    "logprobs",
    "forced",
)


class Saved(NamedTuple):
    """Keep an unfinished completion whose row has lost its slot and pages: the tokens sampled so
    far, and the state of the thinking budget."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    forced: tuple[bool, ...]
    budget: tuple[bool, int, int, str] | None  # as `ThinkingBudget.save` returns it


class Sampler:
    """Hold the state of all slots except their keys and values. The host reads this state only in
    three cases: in `take`, in `save`, and in `draw` if a thinking tag consists of several tokens.

    last, position      the last token of the slot, and the position of this token
    count, limit, seed  the number of tokens sampled so far, the most tokens to sample, and the seed
                        of the completion
    draws, ended        whether tokens are sampled in the slot, and whether its completion has ended
                        since the last call of `take`
    tokens, logprobs, forced
                        the completion: its token ids, their log-probs, and whether the engine
                        wrote a token in place of the policy's choice. Slots with no token to sample
                        write to the last column, and nothing reads this column.
    """

    def __init__(
        self,
        slots: int,
        policy: Policy,
        params: SamplingParams,
        device: torch.device,
        captured: bool = False,
    ):
        self.policy = policy
        self.params = params
        self.device = device
        self.eos = torch.tensor(policy.eos_token_ids, device=device)
        self.cut = {"top_p": params.top_p, "top_k": params.top_k}

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        width = params.max_new_tokens + 1
        self.last, self.position, self.count, self.limit, self.seed = (zeros() for _ in range(5))
        self.draws, self.ended = zeros(dtype=torch.bool), zeros(dtype=torch.bool)
        self.tokens, self.logprobs, self.forced = (
            zeros(width),
            zeros(width, dtype=torch.float32),
            zeros(width, dtype=torch.bool),
        )
        self.temperature: float | Tensor = params.temperature
        if captured and params.temperature not in (0, 1):
            # A tensor: a captured graph reads it from memory, so the next call can change it.
            self.temperature = torch.tensor(params.temperature, device=device)
        self.budget = None
        if params.max_thinking_tokens is not None:
            self.budget = ThinkingBudget(
                policy.renderer.thinking, slots, params.max_thinking_tokens, device
            )

    @property
    def asks_the_host(self) -> bool:
        """Return whether the host must read each sampled token, because a thinking tag consists of
        several tokens. Sampling of this kind cannot be captured in a CUDA graph."""
        return self.budget is not None and self.policy.renderer.thinking.ids is None

    def begin_call(self, params: SamplingParams) -> None:
        """Sample the next completions with these parameters. Only the temperature may differ from
        the previous parameters."""
        self.params = params
        if isinstance(self.temperature, Tensor):
            self.temperature.fill_(params.temperature)
        else:
            self.temperature = params.temperature

    def begin(self, at: Tensor, contexts: Sequence[Sequence[int]], seeds: Sequence[int]) -> None:
        """Begin completions in the slots `at`. The model has already read their contexts."""
        lengths = [len(context) for context in contexts]
        limits = [
            min(self.params.max_new_tokens, self.policy.context_length - length)
            for length in lengths
        ]
        self.position[at], self.limit[at], self.seed[at] = (
            torch.tensor(n, device=self.device) for n in (lengths, limits, seeds)
        )
        self.count[at] = 0
        self.draws[at] = True
        if self.budget is not None:
            self.budget.begin(at, contexts)

    def save(self, slots: Sequence[int]) -> list[Saved]:
        """Return the tokens sampled so far in these slots, with the rest of the completions' state,
        so that another slot can continue the completions."""
        at = torch.tensor(slots, device=self.device)
        counts = self.count[at].tolist()
        tokens = self.tokens[at].tolist()
        logprobs = self.logprobs[at].tolist()
        forced = self.forced[at].tolist()
        budgets: Sequence[tuple[bool, int, int, str] | None] = [None] * len(slots)
        if self.budget is not None:
            budgets = self.budget.save(at)
        return [
            Saved(tuple(ids[:n]), tuple(scores[:n]), tuple(marks[:n]), budget)
            for n, ids, scores, marks, budget in zip(
                counts, tokens, logprobs, forced, budgets, strict=True
            )
        ]

    def go_on(self, at: Tensor, saved: Sequence[Saved]) -> None:
        """Continue saved completions in the slots `at`. Call this right after `begin`, when the
        model has already read the context and all saved tokens."""
        width = self.tokens.shape[1]

        def fill(parts: Sequence[Sequence[float]], like: Tensor) -> Tensor:
            rows = [[*part, *[0] * (width - len(part))] for part in parts]
            return torch.tensor(rows, dtype=like.dtype, device=self.device)

        counts = [len(own.token_ids) for own in saved]
        self.count[at] = torch.tensor(counts, device=self.device)
        self.position[at] += self.count[at]
        self.tokens[at] = fill([own.token_ids for own in saved], self.tokens)
        self.logprobs[at] = fill([own.logprobs for own in saved], self.logprobs)
        self.forced[at] = fill([own.forced for own in saved], self.forced)
        if self.budget is not None:
            self.budget.restore(at, [own.budget for own in saved if own.budget is not None])
            last = [own.token_ids[-1] for own in saved]
            self.budget.follow(at, torch.tensor(last, device=self.device))

    def draw(self, at: Tensor, logits: Tensor, begun: bool = False) -> None:
        """Sample the next token of the n slots `at`, from the logits [n, V] of their last tokens.

        The model has not read the new token yet.

        Args:
          begun: True if the slot's last token belongs to the completion and the model has read this
            token. False for the first token sampled after a context was read.
        """
        draws = self.draws[at]
        count = self.count[at]
        token, probabilities = draw(logits, self.seed[at], count, self.temperature, **self.cut)
        column = count.masked_fill(~draws, self.params.max_new_tokens)
        forced = None
        if self.budget is not None:
            if begun:
                self.budget.follow(at, self.last[at])
            token, forced = self.budget.force(at, token)
            self.forced[at, column] = forced
        logprob = probabilities.gather(1, token[:, None])[:, 0].log_()
        self.tokens[at, column] = token
        self.logprobs[at, column] = logprob if forced is None else logprob.masked_fill(forced, 0.0)
        count = count + draws
        ended = draws & ((token[:, None] == self.eos).any(1) | (count >= self.limit[at]))
        if begun:
            self.position[at] += draws
        self.last[at], self.count[at] = token, count
        self.draws[at], self.ended[at] = draws & ~ended, self.ended[at] | ended

    def take(self, slots: int) -> list[tuple[int, Generation]]:
        """Return the completions in the first `slots` slots that have ended since the last call,
        each with its slot."""
        if not self.ended.any():
            return []
        at = self.ended[:slots].nonzero()[:, 0]
        self.ended[at] = False
        counts = self.count[at].tolist()
        tokens = self.tokens[at, : max(counts)].tolist()
        logprobs = self.logprobs[at, : max(counts)].tolist()
        forced = (
            [[]] * len(counts) if self.budget is None else self.forced[at, : max(counts)].tolist()
        )
        replies = zip(at.tolist(), counts, tokens, logprobs, forced, strict=True)
        return [
            (slot, cut_completion(ids[:n], scores[:n], marks, self.policy.eos_token_ids))
            for slot, n, ids, scores, marks in replies
        ]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the state of the slots `source` into the slots `target`."""
        for name in STATE:
            getattr(self, name)[target] = getattr(self, name)[source]
        if self.budget is not None:
            self.budget.move(source, target)

    def stop(self, at: Tensor) -> None:
        """Stop sampling in these slots. Decoding steps still compute these slots, without
        effect."""
        self.draws[at] = False
        self.ended[at] = False
        self.position[at] = 0
