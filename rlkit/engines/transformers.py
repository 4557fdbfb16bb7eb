"""Define the reference rollout engine. This engine runs Hugging Face `generate`, with random
numbers that depend only on the rollout.

Sampling is Gumbel-max (rlkit.functional.gumbel_choice). The noise is a hash of (the rollout's seed,
the position in the reply, the token). Therefore the samples of a rollout depend only on the model
and the rollout's seed, and not on the batch, the row, the rank or the clock. The log-probs are
computed after temperature, top-k and top-p. The defaults of the model's generation_config are not
used.

If a reply has used up its thinking budget, the engine writes the closing tag, and the policy
continues the reply after the tag. The written tokens are marked as forced and are not trained. This
is so even if the policy itself would have closed the block at this position. Training only on the
forced tags that the policy would have chosen too would bias the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rlkit.engines.service import Batched
from rlkit.functional import cut_distribution, gumbel_choice
from rlkit.system.adapters import base_model
from rlkit.types import THINK_TAGS, Generation, Policy, SamplingParams, Thinking


class Transformers(Batched):
    """Decode with Hugging Face `generate`. This engine is simple, and all other engines are tested
    against this engine.

    Args:
      max_rows: the most prompts decoded at once, > 0. A longer list of prompts is decoded in
        several runs of `generate`. This changes no completion.
      use_cache: False computes keys and values again for every token. This is slower and gives the
        same completions.
    Raises: ValueError for max_rows out of range.
    """

    def __init__(self, *, max_rows: int = 256, use_cache: bool = True):
        if max_rows < 1:
            raise ValueError(f"generation.engine.max_rows must be >= 1 (is {max_rows})")
        super().__init__(partial(complete, max_rows=max_rows, use_cache=use_cache))


def complete(
    policy: Policy,
    prompt_ids: Sequence[Sequence[int]],
    seeds: Sequence[int],
    params: SamplingParams,
    *,
    use_cache: bool = True,
    max_rows: int = 256,
) -> list[Generation]:
    """Sample one completion per prompt.

    Args:
      policy: the model, with its tokenizer's special ids.
      prompt_ids: the prompts as token ids, each non-empty and shorter than the model's context. A
        completion is also truncated when the context is full.
      seeds: one 63-bit integer per prompt.
      params: the sampling parameters. Thinking tokens are counted over all thinking blocks of a
        reply together. A tag that is one token of the vocabulary is not counted. If tags are
        written with several tokens, all tokens of a closing tag except its last one are counted.
      use_cache, max_rows: see `Transformers`.
    Returns: one completion per prompt, in the same order. A completion ends with an end-of-sequence
    id ("stop") or is truncated ("length").
    """
    by_length = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    replies: dict[int, Generation] = {}
    model: Any = policy.model
    causal = base_model(model)
    # Rows decoded together are decoded up to the largest of their limits. Rotary positions have no
    # end, but a table of positions has, so its rows are decoded with rows of the same limit.
    rotary = any("Rotary" in type(module).__name__ for module in causal.modules())
    with use_sampling_mode(causal), torch.inference_mode():
        for start in range(0, len(by_length), max_rows):
            for _, together in groupby(
                by_length[start : start + max_rows],
                lambda i: (
                    rotary or min(params.max_new_tokens, policy.context_length - len(prompt_ids[i]))
                ),
            ):
                rows = list(together)
                decoded = _decode(
                    causal,
                    policy,
                    [prompt_ids[i] for i in rows],
                    [seeds[i] for i in rows],
                    params,
                    use_cache,
                )
                replies |= zip(rows, decoded, strict=True)
    return [replies[i] for i in range(len(prompt_ids))]


@contextmanager
def use_sampling_mode(model: Any) -> Iterator[None]:
    """Return a context manager that puts the model into evaluation mode, turns its cache on, and
    turns off the model's own generation defaults (penalties, top-k, …).

    Everything is restored at the end, even if sampling raises.
    """
    from transformers import GenerationConfig

    was_training = model.training
    config = model.config.get_text_config()
    use_cache = config.use_cache
    defaults = model.generation_config
    model.eval()
    config.use_cache = True
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.train(was_training)
        config.use_cache = use_cache
        model.generation_config = defaults


def _decode(
    model: Any,
    policy: Policy,
    contexts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    params: SamplingParams,
    use_cache: bool,
) -> list[Generation]:
    from transformers import GenerationConfig, LogitsProcessorList

    device = next(model.parameters()).device
    width = max(map(len, contexts))
    limits = [min(params.max_new_tokens, policy.context_length - len(c)) for c in contexts]
    ids = torch.tensor(
        [[policy.pad_token_id] * (width - len(c)) + list(c) for c in contexts], device=device
    )
    lengths = torch.tensor([len(c) for c in contexts], device=device)
    attention_mask = torch.arange(width, device=device) >= (width - lengths)[:, None]
    sampler = GumbelMax(
        torch.tensor(seeds, device=device),
        width,
        params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
    )
    processors: list[Any] = [sampler]
    if params.max_thinking_tokens is not None:
        budget = ThinkingBudget(
            policy.renderer.thinking, len(contexts), params.max_thinking_tokens, device
        )
        processors.append(Budgeted(budget, contexts, width))
    out = model.generate(
        input_ids=ids,
        attention_mask=attention_mask.long(),
        logits_processor=LogitsProcessorList(processors),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=max(limits),
            eos_token_id=list(policy.eos_token_ids),
            pad_token_id=policy.pad_token_id,
            use_cache=use_cache,
        ),
    )
    sampled = out[:, width:].tolist()
    logprobs = torch.stack(sampler.logprobs, dim=1)
    forced: list[list[bool]] = [[]] * len(contexts)
    if params.max_thinking_tokens is not None:
        written = torch.stack(processors[1].forced, dim=1)
        logprobs = logprobs.masked_fill(written, 0.0)
        forced = written.tolist()
    rows = zip(sampled, logprobs.tolist(), forced, limits, strict=True)
    return [
        cut_completion(tokens[:limit], scores[:limit], marks, policy.eos_token_ids)
        for tokens, scores, marks, limit in rows
    ]


def draw(
    logits: Tensor, seeds: Tensor, counter: int | Tensor, temperature: float | Tensor, **cut: Any
) -> tuple[Tensor, Tensor]:
    """Sample one token id for each row of logits.

    Args:
      logits: [B, V].
      seeds: [B].
      counter: the number of tokens sampled so far for the reply: one number for all rows, or [B].
      temperature: 0 is greedy; a tensor must be > 0.
      cut: the keywords `top_p` and `top_k` of `cut_distribution`.
    Returns: the tokens [B], and the distributions [B, V] from which they were sampled.
    """
    scaled = logits.float()
    if isinstance(temperature, Tensor) or temperature not in (0, 1):
        scaled = scaled / temperature
    elif temperature == 0:
        return scaled.argmax(1), torch.softmax(scaled, dim=-1)
    if cut.get("top_k", 0) or cut.get("top_p", 1.0) < 1:
        probabilities = cut_distribution(torch.log_softmax(scaled, dim=-1), **cut).exp()
    else:
        probabilities = torch.softmax(scaled, dim=-1)
    return gumbel_choice(probabilities, seeds, counter), probabilities


class GumbelMax:
    """A logits processor for sampling. The argmax of the processor's output is a sampled token, and
    the processor keeps the log-prob of each sampled token."""

    def __init__(self, seeds: Tensor, prompt_width: int, temperature: float, **cut: Any):
        self.seeds = seeds
        self.prompt_width = prompt_width
        self.temperature = temperature
        self.cut = cut
        self.logprobs: list[Tensor] = []  # one tensor [B] per step

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token, probabilities = draw(
            scores, self.seeds, input_ids.shape[1] - self.prompt_width, self.temperature, **self.cut
        )
        token = token[:, None]
        self.logprobs.append(probabilities.gather(1, token)[:, 0].log_())
        return torch.full_like(probabilities, -torch.inf).scatter_(1, token, 0.0)


class ThinkingBudget:
    """Count the thinking tokens of each of R replies. When a reply has used up its budget, write
    the closing tag in place of the policy's choices.

    If each tag is one token, a step costs a few operations on tensors [R]. If a tag consists of
    several tokens, each step decodes the last token of every reply to text. In every method, `at`
    holds the numbers of the replies to work on. Entry i of each other argument belongs to the reply
    at[i].
    """

    def __init__(self, thinking: Thinking, rows: int, limit: int, device: torch.device):
        self.thinking = thinking
        self.limit = limit
        self.close = torch.tensor(thinking.close, device=device)
        self.inside = torch.zeros(rows, dtype=torch.bool, device=device)  # True in a thinking block
        self.used = torch.zeros(rows, dtype=torch.int64, device=device)  # thinking tokens so far
        self.written = torch.zeros_like(self.used)  # tokens of the closing tag written so far
        self.tails = [""] * rows  # for tags of several tokens: end of the text, it may begin a tag

    def begin(self, at: Tensor, contexts: Sequence[Sequence[int]]) -> None:
        """Begin a reply to each of these contexts."""
        self.inside[at] = torch.tensor(
            [self.thinking.opened(c) for c in contexts], dtype=torch.bool, device=self.inside.device
        )
        self.used[at] = self.written[at] = 0
        for row in at.tolist():
            self.tails[row] = ""

    def force(self, at: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Replace each choice by the next token of the closing tag, if the reply has used up its
        budget or its closing tag is not complete.

        Returns: the tokens [n], and whether each token was forced, [n] bool.
        """
        written = self.written[at]
        force = (written > 0) | (self.inside[at] & (self.used[at] >= self.limit))
        self.written[at] = torch.where(force, (written + 1) % len(self.close), 0)
        return torch.where(force, self.close[written], choice), force

    def follow(self, at: Tensor, last: Tensor) -> None:
        """Update the state of these replies with their last tokens [n]."""
        before = self.inside[at]
        if self.thinking.ids is not None:
            first, second = self.thinking.ids
            after = (before | (last == first)) & (last != second)
            self.inside[at] = after
            self.used[at] += after & (last != first)
            return
        inside = before.tolist()
        for i, (row, token) in enumerate(zip(at.tolist(), last.tolist(), strict=True)):
            text = self.tails[row] + self.thinking.decode([token])
            where = [text.rfind(tag) for tag in THINK_TAGS]
            if max(where) >= 0:
                inside[i] = where[0] > where[1]
                text = text[max(where) + len(THINK_TAGS[not inside[i]]) :]
            self.tails[row] = text[1 - len(THINK_TAGS[1]) :]
        self.inside[at] = torch.tensor(inside, dtype=torch.bool, device=last.device)
        self.used[at] += before & self.inside[at]

    def save(self, at: Tensor) -> list[tuple[bool, int, int, str]]:
        """Return the state of these replies, for `restore`."""
        inside, used, written = (x[at].tolist() for x in (self.inside, self.used, self.written))
        tails = [self.tails[row] for row in at.tolist()]
        return list(zip(inside, used, written, tails, strict=True))

    def restore(self, at: Tensor, saved: Sequence[tuple[bool, int, int, str]]) -> None:
        """Write the saved states of replies to the rows `at`."""
        inside, used, written, tails = zip(*saved, strict=True)
        for tensor, own in ((self.inside, inside), (self.used, used), (self.written, written)):
            tensor[at] = torch.tensor(own, dtype=tensor.dtype, device=at.device)
        for row, tail in zip(at.tolist(), tails, strict=True):
            self.tails[row] = tail

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the state of the rows `source` into the rows `target`."""
        for tensor in (self.inside, self.used, self.written):
            tensor[target] = tensor[source]
        # read all tails before any is written, because rows may swap
        tails = [self.tails[row] for row in source.tolist()]
        for row, tail in zip(target.tolist(), tails, strict=True):
            self.tails[row] = tail


class Budgeted:
    """A logits processor to apply a ThinkingBudget to all rows. This processor must run after
    GumbelMax."""

    def __init__(
        self, budget: ThinkingBudget, contexts: Sequence[Sequence[int]], prompt_width: int
    ):
        self.budget = budget
        self.prompt_width = prompt_width
        self.at = torch.arange(len(contexts), device=budget.inside.device)
        self.forced: list[Tensor] = []  # one bool tensor [B] per step
        budget.begin(self.at, contexts)

    def __call__(self, input_ids: Tensor, choice: Tensor) -> Tensor:
        if input_ids.shape[1] > self.prompt_width:
            self.budget.follow(self.at, input_ids[:, -1])
        token, force = self.budget.force(self.at, choice.argmax(1))
        self.forced.append(force)
        return choice.scatter(1, token[:, None], torch.inf)


def cut_completion(
    tokens: list[int], logprobs: list[float], forced: list[bool], eos_token_ids: Sequence[int]
) -> Generation:
    """Return the reply up to and including its first end-of-sequence id. Tokens after this id are
    the padding of `generate` and are dropped."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos_token_ids), None)
    written = tuple(
        i for i, mark in enumerate(forced[: len(tokens) if end is None else end]) if mark
    )
    return Generation(
        tuple(tokens[:end]), tuple(logprobs[:end]), "length" if end is None else "stop", written
    )
