"""KL estimators: value and gradient, by enumerating a vocabulary of five."""

import math

import pytest
import torch
from torch import Tensor

from rlkit.functional import confident, forward, k1, k2, k3, k3_straight_through, reverse, truncated

ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
WEIGHTED = {"forward": forward, "reverse": reverse}  # these carry the ratio themselves
LOGITS = torch.tensor([0.3, -1.0, 0.8, 0.0, -2.0], dtype=torch.float64)
LOGITS_OLD = torch.tensor([0.0, -0.4, 0.5, 0.6, -1.0], dtype=torch.float64)
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
    assert ESTIMATORS[name](logprobs, logprobs + q).item() == pytest.approx(
        expected, abs=1e-14
    )  # float64 rounding


@pytest.mark.parametrize(("name", "exact"), [("k1", _kl), ("k2", _half_square), ("k3", _kl)])
def test_expected_value(name: str, exact) -> None:
    """E_π[k1] = E_π[k3] = KL(π‖ref); k2 is its own quantity."""
    _, p, ref = _policies()
    expected = (p.exp() * ESTIMATORS[name](p, ref)).sum()
    torch.testing.assert_close(expected, exact(p, ref), **CLOSE)
    assert (
        abs(_kl(p, ref) - _kl(ref, p)) > 1e-2
    )  # the two directions differ here, so that confusing them shows


@pytest.mark.parametrize(
    ("name", "exact"),
    [("k1", _zero), ("k2", _kl), ("k3", lambda p, ref: _kl(ref, p))],
    ids=["k1", "k2", "k3"],
)
def test_expected_gradient_in_the_loss(name: str, exact) -> None:
    """Tokens are drawn, so the draw is a constant: k1 gives nothing, k2 ∇KL(π‖ref), k3
    ∇KL(ref‖π)."""
    logits, p, ref = _policies()
    (ours,) = torch.autograd.grad(
        (p.exp().detach() * ESTIMATORS[name](p, ref)).sum(), logits, retain_graph=True
    )
    (theirs,) = torch.autograd.grad(exact(p, ref), logits)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(("name", "exact"), [("k1", _kl), ("k2", _half_square), ("k3", _kl)])
def test_expected_gradient_with_the_ratio(name: str, exact) -> None:
    """Times π / sg(π) the gradient is that of the expectation: k1 and k3 give ∇KL(π‖ref)."""
    logits, p, ref = _policies()
    ratio = (p - p.detach()).exp()
    (ours,) = torch.autograd.grad(
        (p.exp().detach() * ratio * ESTIMATORS[name](p, ref)).sum(), logits, retain_graph=True
    )
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
    assert k3(policy, ref).item() == pytest.approx(
        1e-6 / 2 * (1 + 1e-3 / 3), rel=2e-4
    )  # one rounding of 1e-3 in 5e-7


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


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        # π ¼, old ½, ref ⅛: r = ½, q = -log 2, e^q = ½
        (
            forward(
                torch.tensor(0.25).double().log(),
                torch.tensor(0.125).double().log(),
                torch.tensor(0.5).double().log(),
            ),
            math.log(2) / 2,
        ),
        (
            reverse(
                torch.tensor(0.25).double().log(),
                torch.tensor(0.125).double().log(),
                torch.tensor(0.5).double().log(),
            ),
            -math.log(2) / 4,
        ),
        # q = log 4 is cut to log 2, -log 4 to -log 2: 2 - log 2 - 1 and ½ + log 2 - 1
        (
            truncated(
                torch.tensor(0.125).double().log(),
                torch.tensor(0.5).double().log(),
                threshold=math.log(2),
            ),
            1 - math.log(2),
        ),
        (
            truncated(
                torch.tensor(0.5).double().log(),
                torch.tensor(0.125).double().log(),
                threshold=math.log(2),
            ),
            math.log(2) - 0.5,
        ),
        # π = ¼ counts above 0.2 and not above 0.3; q = log 2
        (
            confident(
                torch.tensor(0.25).double().log(), torch.tensor(0.5).double().log(), probability=0.2
            ),
            1 - math.log(2),
        ),
        (
            confident(
                torch.tensor(0.25).double().log(), torch.tensor(0.5).double().log(), probability=0.3
            ),
            0.0,
        ),
        # exactly on the bound: ¼ is not above ¼
        (
            confident(
                torch.tensor(0.5).double().log() * 2,
                torch.tensor(0.5).double().log(),
                probability=0.25,
            ),
            0.0,
        ),
    ],
)
def test_weighted_and_partial_estimators_by_hand(got: Tensor, expected: float) -> None:
    assert got.item() == pytest.approx(expected, abs=1e-14)  # float64 rounding


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(
    ("name", "exact"),
    [("forward", _kl), ("reverse", lambda p, ref: _kl(ref, p))],
    ids=["forward", "reverse"],
)
def test_weighted_estimators_have_value_and_gradient_of_their_divergence(
    name: str, exact, on_policy: bool
) -> None:
    """Enumerated over the tokens that the old policy may draw: unbiased on its samples too, and the
    gradient with it."""
    logits, p, ref = _policies()
    old = p.detach() if on_policy else LOGITS_OLD.log_softmax(-1)
    expected = (old.exp() * WEIGHTED[name](p, ref, old)).sum()
    torch.testing.assert_close(expected, exact(p, ref), **CLOSE)
    (ours,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(exact(p, ref), logits)
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("name", ["truncated", "confident"])
def test_partial_estimators_have_value_and_gradient_of_their_tokens(name: str) -> None:
    """On the tokens that count, k3 and Σ (π - ref) ∇log π; the others add a constant, or nothing.
    Some count and some do not."""
    logits, p, ref = _policies()
    q = (ref - p).detach()
    if name == "truncated":
        counts, got = q.abs() < 1.0, truncated(p, ref, threshold=1.0)
        outside = torch.where(
            q > 0, q.new_tensor(math.e - 2), q.new_tensor(1 / math.e)
        )  # e^1 - 1 - 1 and e^-1 + 1 - 1
    else:
        counts, got, outside = p.exp() > 0.2, confident(p, ref, probability=0.2), torch.zeros(5)
    assert 0 < counts.sum() < 5
    expected = torch.where(counts, q.exp() - q - 1, outside.double())
    torch.testing.assert_close((p.exp().detach() * got).sum(), (p.exp() * expected).sum(), **CLOSE)
    (ours,) = torch.autograd.grad((p.exp().detach() * got).sum(), logits, retain_graph=True)
    pulls = ((p.exp() - ref.exp()) * counts).detach()
    (theirs,) = torch.autograd.grad((pulls * p).sum(), logits)
    torch.testing.assert_close(ours, theirs, **CLOSE)


def test_partial_estimators_at_their_limits_are_k3() -> None:
    _, p, ref = _policies()
    assert torch.equal(truncated(p, ref, threshold=20.0), k3(p, ref))
    assert torch.equal(confident(p, ref, probability=0.0), k3(p, ref))


@pytest.mark.parametrize("size", [1e4, math.inf])
@pytest.mark.parametrize("name", ["forward", "reverse", "truncated", "confident"])
def test_the_others_are_finite_at_any_log_ratio(name: str, size: float) -> None:
    """And no step away from the reference comes of it: at a capped log-ratio `reverse` has no
    gradient, `forward` the right sign."""
    logprobs = torch.zeros(2, requires_grad=True)
    ref = torch.tensor([size, -size])
    options = {"truncated": truncated, "confident": confident}
    got = (
        WEIGHTED[name](logprobs, ref, torch.zeros(2))
        if name in WEIGHTED
        else options[name](logprobs, ref)
    )
    got.sum().backward()
    assert got.isfinite().all() and logprobs.grad.isfinite().all()
    assert logprobs.grad.tolist() == ([-20.0, 20.0] if name == "forward" else [0.0, 0.0])
    for old in (size, -size):
        if name in WEIGHTED:
            assert WEIGHTED[name](torch.zeros(2), ref, torch.full((2,), old)).isfinite().all()


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_estimators_give_no_gradient_to_constants_and_widen(name: str) -> None:
    given = [
        torch.tensor([x], dtype=torch.bfloat16, requires_grad=True) for x in (-1.0, -1.5, -1.25)
    ]
    got = WEIGHTED[name](*given)
    got.backward()
    assert got.dtype == torch.float32
    assert [x.grad is None for x in given] == [False, True, True]


def test_a_nan_that_counts_stays_visible() -> None:
    for estimator in (truncated, confident):
        assert estimator(torch.tensor([math.nan]), torch.zeros(1)).isnan().all()


@pytest.mark.parametrize(
    ("estimator", "name", "value"),
    [(truncated, "threshold", v) for v in (0.0, -1.0, 21.0, math.nan)]
    + [(confident, "probability", v) for v in (-0.1, 1.0, math.nan)],
)
def test_hyperparameters_are_checked(estimator, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; allowed: "):
        estimator(torch.zeros(1), torch.zeros(1), **{name: value})


def test_straight_through_has_the_value_of_k3_and_the_gradient_of_its_divergence() -> None:
    """By enumeration: E = KL(π‖ref) and ∇ = ∇KL(π‖ref) in the loss; with a ratio 2 ∇KL(π‖ref) -
    ∇KL(ref‖π), as the table says."""
    logits, p, ref = _policies()
    got = k3_straight_through(p, ref)
    assert torch.equal(got.detach(), k3(p, ref).detach())
    torch.testing.assert_close((p.exp() * got).sum(), _kl(p, ref), **CLOSE)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    drawn = p.exp().detach()
    torch.testing.assert_close(gradient((drawn * got).sum()), gradient(_kl(p, ref)), **CLOSE)
    weighted = gradient((drawn * (p - p.detach()).exp() * got).sum())
    torch.testing.assert_close(weighted, 2 * gradient(_kl(p, ref)) - gradient(_kl(ref, p)), **CLOSE)
    reward = gradient((drawn * got.detach() * p).sum())
    torch.testing.assert_close(reward, gradient(_kl(p, ref)) - gradient(_kl(ref, p)), **CLOSE)
    far = torch.zeros(2, requires_grad=True)
    k3_straight_through(far, torch.tensor([math.inf, -1e4])).sum().backward()
    assert far.grad.tolist() == [0.0, 0.0]
