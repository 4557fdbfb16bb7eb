"""Packed rows: every distinct prefix once, and no log-prob, value or gradient differs from that of whole padded rows."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen3Config
from transformers.utils import logging

from rlkit.models import forward_logprobs, make_critic, pack, packing
from rlkit.models.packing import ATTENTION, allow_packing


def make_rows(seed: int, *, vocabulary: int = 50):
    """Groups of one prompt; equal replies, replies that begin alike, a row without a sampled token, gaps between sampled tokens."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (12, 20), generator=g)
    mask = torch.zeros(12, 20, dtype=torch.bool)
    for row in range(12):
        first = 6 + row // 4
        ids[row, :first] = ids[row // 4 * 4, :first]
        mask[row, first : first + int(torch.randint(1, 20 - first, (1,), generator=g))] = True
    ids[1], mask[1] = ids[0], mask[0]
    ids[3, :14] = ids[2, :14]
    mask[5] = False
    mask[6, 10:12] = False
    return ids, mask


def needed(mask):
    return [int(row.nonzero().max()) if row.any() else 0 for row in mask]


@pytest.mark.parametrize("seed", range(5))
def test_every_distinct_prefix_is_one_token_and_every_row_a_path(seed):
    ids, mask = make_rows(seed)
    packed = pack(ids, mask)
    rows = [row[:length].tolist() for row, length in zip(ids, needed(mask), strict=True)]
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    assert len(packed.ids) == len(prefixes) and packed.tokens == sum(map(len, rows)) > len(prefixes)
    found = set()
    for queries, keys, starts in packed.paths:
        for i, (own, path) in enumerate(zip(queries, keys, strict=True)):
            start = 0 if starts is None else int(starts[i])
            for j, token in enumerate(own):
                if packed.home[token] == sum(q.numel() for q, *_ in packed.paths[: index_of(packed.paths, queries)]) + i * len(own) + j:
                    assert path[start + j] == token and packed.positions[token] == start + j
                    found.add(tuple(packed.ids[path[: start + j + 1]].tolist()))
    assert found == prefixes
    sampled = [tuple(ids[row, : at + 1].tolist()) for row, at in mask.nonzero().tolist()]
    assert len(packed.targets) == len(set(sampled)) and len(packed.inverse) == len(sampled)
    assert torch.equal(packed.targets[packed.inverse], ids[mask])


def index_of(paths, queries):
    return next(i for i, part in enumerate(paths) if part.queries is queries)


def naive(model, ids, mask):
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    taken = torch.nn.functional.pad(logprobs.gather(2, ids[:, 1:, None])[..., 0], (1, 0))
    return taken.masked_fill(~mask, 0.0)


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


SIZE = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "bos_token_id": 0, "eos_token_id": 1}
WIDE = SIZE | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "qwen3": Qwen3Config(**WIDE, head_dim=8),
    "llama": LlamaConfig(**WIDE),
    "gpt2": GPT2Config(**SIZE, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "mistral, sliding window": MistralConfig(**WIDE, sliding_window=4),
    "qwen3, sliding window": Qwen3Config(**WIDE, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="sdpa").double().train()


@pytest.mark.parametrize("mask_entries", [packing.MASK_ENTRIES, 1])
@pytest.mark.parametrize("recompute", [False, True])
def test_scores_and_gradients_are_those_of_padded_rows(model, mask_entries, recompute, monkeypatch):
    """For models that read packed rows and those that cannot, also where backward attends again."""
    monkeypatch.setattr(packing, "MASK_ENTRIES", mask_entries)
    ids, mask = make_rows(0)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = naive(model, ids, mask)
    wanted = gradient(model, (weights * expected).sum())
    allow_packing(model)
    assert (model.config._attn_implementation == ATTENTION) == (getattr(model.config, "sliding_window", None) is None)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = forward_logprobs(model, pack(ids, mask)).logprobs
    # float64 rounding over a few thousand operations
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)
    tolerance = 1e-10 if model.config.model_type == "gpt2" else 1e-6  # the others' norms are computed in float32
    assert (gradient(model, (weights * got).sum()) - wanted).norm() < tolerance * wanted.norm()
    torch.testing.assert_close(naive(model, ids, mask), expected, rtol=0, atol=1e-12)  # nothing changes for any other call


@pytest.mark.parametrize("kind", ["head", "separate"])
def test_values_are_those_of_the_states_before_the_tokens(tiny, kind):
    model = copy.deepcopy(tiny.model).double()
    critic = make_critic(model, model=kind, trunk_gradient=True).double()
    torch.nn.init.normal_(critic.head.value.weight, generator=torch.Generator().manual_seed(0))
    ids, mask = make_rows(0)
    states = model.base_model(input_ids=ids).last_hidden_state
    expected = torch.nn.functional.pad(critic.head(states)[:, :-1], (1, 0)).masked_fill(~mask, 0.0)
    torch.testing.assert_close(forward_logprobs(model, pack(ids, mask), critic=critic).values, expected, rtol=0, atol=1e-10)


def test_a_row_that_begins_with_a_sampled_token_is_refused():
    ids, mask = make_rows(0)
    mask[7, 0] = True
    with pytest.raises(ValueError, match="row 7 begins with a sampled token"):
        pack(ids, mask)


def test_nothing_sampled_is_nothing_packed(tiny):
    ids, mask = make_rows(0)
    scores = forward_logprobs(tiny.model, pack(ids, torch.zeros_like(mask)))
    assert scores.logprobs.shape == ids.shape and not scores.logprobs.any()
