"""KL estimators: value and gradient, by enumerating a vocabulary of five."""

import math

import pytest
import torch
from torch import Tensor

from rlkit.functional import k1, k2, k3

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0, -2.0], dtype=torch.float64)
LOGITS_REF = torch.tensor([-0.5, 2.5, 0.1, 1.0, -1.2], dtype=torch.float64)
CLOSE = {"rtol": 0, "atol": 1e-14}  # float64 rounding of five terms of order 1


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p‖q) from log-probs, exactly."""
    return (p.exp() * (p - q)).sum()


def _half_square(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q).square()).sum() / 2


def _zero(p: Tensor, q: Tensor) -> Tensor:
    return p.sum() * 0


def _policies() -> tuple[Tensor, Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    return logits, logits.log_softmax(-1), LOGITS_REF.log_softmax(-1)


@pytest.mark.parametrize(
    ("name", "q", "expected"),
    [
        ("k1", 0.5, -0.5),
        ("k2", 0.5, 0.125),
        ("k3", math.log(2), 1 - math.log(2)),  # e^q - q - 1 = 2 - log 2 - 1
        ("k3", -math.log(2), math.log(2) - 0.5),  # 1/2 + log 2 - 1
    ],
)
def test_by_hand(name: str, q: float, expected: float) -> None:
    """q = log ref - log π."""
    logprobs = torch.tensor([[-3.0]], dtype=torch.float64)
    assert ESTIMATORS[name](logprobs, logprobs + q).item() == pytest.approx(expected, abs=1e-14)  # float64 rounding


@pytest.mark.parametrize(("name", "exact"), [("k1", _kl), ("k2", _half_square), ("k3", _kl)])
def test_expected_value(name: str, exact) -> None:
    """E_π[k1] = E_π[k3] = KL(π‖ref); k2 is its own quantity."""
    _, p, ref = _policies()
    expected = (p.exp() * ESTIMATORS[name](p, ref)).sum()
    torch.testing.assert_close(expected, exact(p, ref), **CLOSE)
    assert abs(_kl(p, ref) - _kl(ref, p)) > 1e-2  # the two directions differ here, so that confusing them shows


@pytest.mark.parametrize(("name", "exact"), [("k1", _zero), ("k2", _kl), ("k3", lambda p, ref: _kl(ref, p))], ids=["k1", "k2", "k3"])
def test_expected_gradient_in_the_loss(name: str, exact) -> None:
    """Tokens are drawn, so the draw is a constant: k1 gives nothing, k2 ∇KL(π‖ref), k3 ∇KL(ref‖π)."""
    logits, p, ref = _policies()
    (ours,) = torch.autograd.grad((p.exp().detach() * ESTIMATORS[name](p, ref)).sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(exact(p, ref), logits)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("name", "exact"), [("k1", _kl), ("k2", _half_square), ("k3", _kl)])
def test_expected_gradient_with_the_ratio(name: str, exact) -> None:
    """Times π / sg(π) the gradient is that of the expectation: k1 and k3 give ∇KL(π‖ref)."""
    logits, p, ref = _policies()
    ratio = (p - p.detach()).exp()
    (ours,) = torch.autograd.grad((p.exp().detach() * ratio * ESTIMATORS[name](p, ref)).sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(exact(p, ref), logits)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("q", [1e-3, -1e-3])
def test_k2_and_k3_meet_for_small_log_ratios(q: float) -> None:
    """k3 / k2 = 1 + q/3 + O(q²)."""
    policy = torch.zeros(1, dtype=torch.float64)
    quotient = k3(policy, policy + q) / k2(policy, policy + q)
    assert quotient.item() == pytest.approx(1 + q / 3, abs=2e-7)  # the next term is q²/12 = 8e-8


def test_k3_keeps_its_digits_in_float32() -> None:
    """exp(q) - 1 - q at q = 1e-3 is off by 10 % in float32; expm1 keeps four digits."""
    policy, ref = torch.zeros(1), torch.full((1,), 1e-3)
    assert k3(policy, ref).item() == pytest.approx(1e-6 / 2 * (1 + 1e-3 / 3), rel=2e-4)  # one rounding of 1e-3 in 5e-7


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_never_negative(name: str) -> None:
    q = torch.linspace(-30, 30, 6001)
    assert (ESTIMATORS[name](torch.zeros_like(q), q) >= 0).all()


@pytest.mark.parametrize(
    ("name", "at_20", "at_minus_20"),
    [
        ("k1", -20.0, 20.0),
        ("k2", 200.0, 200.0),
        ("k3", math.exp(20) - 21, 19 + math.exp(-20)),
    ],
)
@pytest.mark.parametrize("size", [1e4, math.inf])
def test_finite_at_any_log_ratio(name: str, at_20: float, at_minus_20: float, size: float) -> None:
    """Clamped at ±20, without gradient beyond."""
    logprobs = torch.zeros(2, requires_grad=True)
    got = ESTIMATORS[name](logprobs, torch.tensor([size, -size]))
    got.sum().backward()
    assert got.tolist() == pytest.approx([at_20, at_minus_20], rel=1e-6)  # float32 rounding
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_clamp_does_not_bite_inside(name: str) -> None:
    logprobs = torch.zeros(2, requires_grad=True)
    ESTIMATORS[name](logprobs, torch.tensor([19.9, -19.9])).sum().backward()
    assert (logprobs.grad != 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_reference_is_a_constant_and_half_precision_is_widened(name: str) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.bfloat16, requires_grad=True)
    ref = torch.tensor([-1.5], dtype=torch.bfloat16, requires_grad=True)
    got = ESTIMATORS[name](logprobs, ref)
    got.backward()
    assert got.dtype == torch.float32
    assert ref.grad is None
    assert logprobs.grad is not None
