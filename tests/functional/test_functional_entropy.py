"""Entropy: values by hand, edges, gradient."""

import math

import pytest
import torch

from rlkit.functional import from_log_probs, from_logits


def test_by_hand() -> None:
    """p = (1/2, 1/4, 1/4): H = 1/2 log 2 + 2 · 1/4 log 4 = 3/2 log 2."""
    logits = (
        torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log() + 7.0
    )  # a shift changes no distribution
    assert from_logits(logits).item() == pytest.approx(
        1.5 * math.log(2), abs=1e-14
    )  # a few float64 roundings


@pytest.mark.parametrize("entropy", [from_logits, from_log_probs])
def test_impossible_tokens_add_nothing(entropy) -> None:
    """0 log 0 = 0, in the value and in the gradient: -inf logits mask part of a vocabulary."""
    logits = torch.tensor([math.log(0.5), math.log(0.5), -math.inf], requires_grad=True)
    value = entropy(logits)
    value.backward()
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)  # float32 rounding of log 2
    assert logits.grad.isfinite().all()
    assert logits.grad[2] == 0.0


def test_gradient_is_that_of_the_textbook_form() -> None:
    """∂H/∂z_v = -p_v (log p_v + H)."""
    logits = torch.randn(
        4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True
    )
    value = from_logits(logits)
    value.sum().backward()
    log_p = logits.detach().log_softmax(-1)
    expected = -log_p.exp() * (log_p + value.detach().unsqueeze(-1))
    torch.testing.assert_close(
        logits.grad, expected, rtol=0, atol=1e-14
    )  # float64 rounding of terms of order 1


def test_bfloat16_logits_are_worked_in_float32() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(from_logits(logits), from_logits(logits.float()))
    assert from_logits(logits).dtype == torch.float32


def test_large_logits_lose_no_digits() -> None:
    """The form logsumexp - Σ p · logit is off by 1e-3 and more at logits of 1e4 in float32; ours by
    rounding alone."""
    logits = torch.tensor([1e4, 1e4 - 1, 1e4 - 2])
    exact = from_logits(torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)).item()
    assert from_logits(logits).item() == pytest.approx(
        exact, abs=1e-6
    )  # float32 rounding of a value of order 1


def test_a_certain_token_has_entropy_zero_and_not_below() -> None:
    """A log-prob that rounding left just above 0 may not give a negative entropy."""
    assert from_log_probs(torch.tensor([1e-7, -torch.inf])).item() == 0.0
    assert from_logits(torch.tensor([1e4, 0.0, -1e4])).item() == 0.0
