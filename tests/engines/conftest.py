"""A model that the tests of engines share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def small(tiny):
    """A random model beside the tiny tokenizer, with a context of 160."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=768,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=160,
        initializer_range=0.3,
    )
    return tiny._replace(model=Qwen3ForCausalLM(config).eval(), context_length=160)
