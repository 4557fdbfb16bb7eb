"""Trainer log-probs: equal to the naive form, zero outside the mask, and the adapter-off model is
the base."""

from __future__ import annotations

import copy

import pytest
import torch

from rlkit.models import forward_logprobs, pack
from rlkit.models.head import split_model
from rlkit.models.load import LoRA, add_lora
from rlkit.models.log_probs import compute_states


@pytest.fixture(scope="module")
def double(tiny):
    return copy.deepcopy(tiny.model).double()


@pytest.fixture
def rows(tiny):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(tiny.renderer.tokenizer), (3, 12), generator=generator)
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, 4:9], mask[1, 3:], mask[2, 7:8] = True, True, True
    return ids, mask


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_naive_form_in_float64(double, rows, temperature):
    ids, mask = rows
    naive = (double(ids).logits[:, :-1] / temperature).log_softmax(-1)
    expected = torch.zeros(ids.shape, dtype=torch.float64)
    expected[:, 1:] = naive.gather(2, ids[:, 1:, None])[:, :, 0]
    entropy = torch.zeros(ids.shape, dtype=torch.float64)
    entropy[:, 1:] = -(naive.exp() * naive).sum(-1)
    got, got_entropy, *_ = forward_logprobs(double, pack(ids, mask), temperature=temperature)
    # float64 rounding over a few hundred operations
    torch.testing.assert_close(got, expected * mask, rtol=0, atol=1e-10)
    torch.testing.assert_close(got_entropy, entropy * mask, rtol=0, atol=1e-10)


def test_right_padding_changes_nothing(double, rows):
    """No attention mask is passed: causal attention alone must keep padding out."""
    ids, mask = rows
    wide = torch.cat([ids, torch.full((3, 5), 7)], 1)
    wide_mask = torch.cat([mask, torch.zeros(3, 5, dtype=torch.bool)], 1)
    torch.testing.assert_close(
        forward_logprobs(double, pack(wide, wide_mask))[0][:, :12],
        forward_logprobs(double, pack(ids, mask))[0],
        rtol=0,
        atol=1e-10,
    )


def test_gradient_flows_from_log_probs_and_not_from_entropy(tiny, rows):
    model = copy.deepcopy(tiny.model)
    logprobs, entropy, *_ = forward_logprobs(model, pack(*rows))
    assert logprobs.requires_grad and not entropy.requires_grad


def test_adapter_off_is_the_base(tiny, rows):
    base = forward_logprobs(tiny.model, pack(*rows))[0]
    model = add_lora(copy.deepcopy(tiny.model), LoRA(rank=4))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1))
    assert not torch.allclose(forward_logprobs(model, pack(*rows))[0], base)
    with model.disable_adapter():
        assert torch.equal(forward_logprobs(model, pack(*rows))[0], base)


def test_exact_divergence_equals_the_naive_form(double, rows):
    """Against another model, at each sampled token's own place; 0 outside the mask, and the
    reference is a constant."""
    ids, mask = rows
    other = copy.deepcopy(double)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(
                0.05
                * torch.randn(p.shape, generator=torch.Generator().manual_seed(2), dtype=p.dtype)
            )
        reference = (compute_states(other, pack(ids, mask)), split_model(other)[1])
        p, ref = ((model(ids).logits[:, :-1] / 0.7).log_softmax(-1) for model in (double, other))
    expected = torch.zeros(ids.shape, dtype=torch.float64)
    expected[:, 1:] = (p.exp() * (p - ref)).sum(-1)
    got = forward_logprobs(double, pack(ids, mask), temperature=0.7, reference=reference)
    torch.testing.assert_close(
        got.full_kl, expected * mask, rtol=0, atol=1e-10
    )  # float64 rounding over a few hundred operations
    assert got.full_kl[mask].min() > 1e-3 and got.full_kl.requires_grad
    torch.autograd.grad(
        got.full_kl.sum(), [p for p in double.parameters() if p.requires_grad], allow_unused=True
    )
    assert all(p.grad is None for p in other.parameters())
    torch.testing.assert_close(
        got.logprobs,
        forward_logprobs(double, pack(ids, mask), temperature=0.7).logprobs,
        rtol=0,
        atol=1e-10,
    )
    assert forward_logprobs(double, pack(ids, mask)).full_kl is None
