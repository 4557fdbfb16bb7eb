"""Decode with models that have a window in some layers. Short contexts are decoded with the cache,
and longer contexts by the reference engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlkit.engines.cached.attention import use_attention
from rlkit.engines.cached.scheduler import Scheduler
from rlkit.engines.transformers import Transformers
from rlkit.types import Generation, Policy, SamplingParams


class Windowed(Scheduler):
    """Decode with the cache if the prompt and the longest possible completion fit into the window.
    The reference engine decodes all other completions, even if the same episode has used the cache
    before.

    Both engines sample the same tokens. The reference engine decodes all of its completions
    together, after every completion in the cache has ended.

    Args:
      policy: the policy with its whole context.
      window: number of tokens seen by every layer, smaller than the context.
      settings: settings of `Scheduler`.
    """

    def __init__(self, policy: Policy, causal: Any, *, window: int, max_rows: int, **settings: Any):
        within = policy._replace(context_length=window)
        super().__init__(within, causal, max_rows=max_rows, **settings)
        self.longer = Transformers(max_rows=max_rows).make_decoder(policy)
        self.attention = causal.config._attn_implementation  # the model's own implementation

    @property
    def idle(self) -> bool:
        return super().idle and self.longer.idle

    def accepts(self, params: SamplingParams) -> bool:
        return super().accepts(params) and self.longer.accepts(params)

    def submit(
        self, key: int, prompt_ids: Sequence[int], seed: int, params: SamplingParams
    ) -> None:
        if len(prompt_ids) + params.max_new_tokens <= self.policy.context_length:
            super().submit(key, prompt_ids, seed, params)
            return
        super().release(key)  # free the pages of the episode
        self.longer.submit(key, prompt_ids, seed, params)

    def release(self, key: int) -> None:
        super().release(key)
        self.longer.release(key)

    @torch.inference_mode()
    def advance(self) -> list[tuple[int, Generation]]:
        if not super().idle:
            return super().advance()
        before = self.longer.rounds
        with use_attention(self.causal.config, self.attention):
            completions = self.longer.advance()
        self.rounds += self.longer.rounds - before
        return completions
