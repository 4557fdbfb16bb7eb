"""Policy losses per token."""

import math

import pytest
import torch
from torch import Tensor

from parametrise import each
from rlkit.functional import (
    cispo,
    clipped,
    dppo,
    gmpo,
    kl_cov,
    reinforce,
    sapo,
    sequence_mean,
    token_ratio,
    vespo,
)

# (ratio, advantage) → (loss, gradient with respect to the ratio) at clip_low 0.2, clip_high 0.28
BY_HAND = [
    (1.0, 2.0, -2.0, -2.0),
    (1.5, 1.0, -1.28, 0.0),  # above, wants to go up: min(1.5, 1.28)
    (1.25, 1.0, -1.25, -1.0),  # inside the higher bound, outside the lower width
    (1.5, -1.0, 1.5, 1.0),  # above, wants to go down: min(-1.5, -1.28)
    (0.5, -1.0, 0.8, 0.0),  # below, wants to go down: min(-0.5, -0.8)
    (0.5, 1.0, -0.5, -1.0),  # below, wants to go up: min(0.5, 0.8)
    (0.75, -2.0, 1.6, 0.0),  # below 0.8, though inside 1 - 0.28
    (3.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), BY_HAND)
def test_clipped_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    r = torch.tensor([[ratio]], requires_grad=True)
    got = clipped(r, torch.tensor([[advantage]]), clip_low=0.2, clip_high=0.28)
    got.backward()
    assert got.item() == pytest.approx(loss, abs=1e-6)  # float32 rounding of values of order 1
    assert r.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_clipped_defaults_are_those_of_ppo() -> None:
    ratio, advantages = torch.tensor([[0.1, 5.0]]), torch.tensor([[-1.0, 1.0]])
    torch.testing.assert_close(clipped(ratio, advantages), torch.tensor([[0.8, -1.2]]))


def test_reinforce_by_hand() -> None:
    """-2 · -0.5 = 1; the gradient is -A."""
    logprobs = torch.tensor([[-0.5, -3.0]], requires_grad=True)
    loss = reinforce(logprobs, torch.tensor([[2.0, -1.0]]))
    loss.sum().backward()
    assert loss.tolist() == [[1.0, -3.0]]
    assert logprobs.grad.tolist() == [[-2.0, 1.0]]


@pytest.mark.parametrize("widths", [(0.2, 0.2), (1.0, 1e6)])
def test_clipped_at_ratio_one_has_the_gradient_of_reinforce(widths: tuple[float, float]) -> None:
    """On policy the ratio is 1 and the clip never binds: the first step of PPO is REINFORCE,
    whatever the widths."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(3, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    ratio = token_ratio(logprobs, logprobs.detach(), torch.ones(3, 5, dtype=torch.bool))
    (ours,) = torch.autograd.grad(
        clipped(ratio, advantages, clip_low=widths[0], clip_high=widths[1]).sum(), logprobs
    )
    (theirs,) = torch.autograd.grad(reinforce(logprobs, advantages).sum(), logprobs)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loss", [clipped, reinforce])
def test_advantages_are_constants(loss) -> None:
    policy, advantages = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    loss(policy, advantages).sum().backward()
    assert advantages.grad is None
    assert policy.grad is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip_low", v) for v in (0.0, -0.2, 1.5, float("nan"))]
    + [("clip_high", v) for v in (0.0, -1.0, float("nan"))],
)
def test_clip_widths_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; allowed: "):
        clipped(torch.ones(1, 1), torch.ones(1, 1), **{name: value})


@pytest.mark.parametrize("cap", ["dual_clip", "delta"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (5.0, -1.0, 3.0, 0.0),  # min(5, 3)
        (2.9, -2.0, 5.8, 2.0),  # below the cap: the ratio itself
        (5.0, 1.0, -1.2, 0.0),  # a positive advantage is bounded by the clip already
        (0.5, -1.0, 0.8, 0.0),
    ],
)
def test_both_caps_by_hand(
    cap: str, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    r = torch.tensor([[ratio]], requires_grad=True)
    got = clipped(r, torch.tensor([[advantage]]), **{cap: 3.0})
    got.backward()
    assert got.item() == pytest.approx(loss, abs=1e-6)  # float32 rounding of values of order 1
    assert r.grad.item() == pytest.approx(gradient, abs=1e-6)


def _random(seed: int = 0) -> dict[str, Tensor]:
    """6 rows of 5 positions of 4 rollouts; log-ratios of order 1, one advantage a rollout."""
    generator = torch.Generator().manual_seed(seed)
    rollout_ids = torch.tensor([0, 1, 2, 1, 3, 0])
    logprobs, old = -2 * torch.rand(2, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[2] = False  # rollout 2 has no trained token
    advantages = (
        torch.randn(4, generator=generator, dtype=torch.float64)[rollout_ids]
        .unsqueeze(1)
        .expand(6, 5)
    )
    return {
        "logprobs": logprobs,
        "logprobs_old": old,
        "response_mask": mask,
        "rollout_ids": rollout_ids,
        "advantages": advantages,
    }


def test_the_two_caps_are_the_same_function() -> None:
    given = _random()
    ratio = token_ratio(
        given["logprobs"], given["logprobs_old"], given["response_mask"]
    ).requires_grad_()
    dual, delta = (
        clipped(ratio, given["advantages"], **{cap: 1.5}) for cap in ("dual_clip", "delta")
    )
    assert torch.equal(dual, delta) and not torch.equal(dual, clipped(ratio, given["advantages"]))
    assert torch.equal(
        *(torch.autograd.grad(loss.sum(), ratio, retain_graph=True)[0] for loss in (dual, delta))
    )


@each(
    ("ratio", "weight"),
    [(0.1, 0.8), (0.9, 0.9), (1.0, 1.0), (1.1, 1.1), (7.0, 1.3)],  # [1 - 0.2, 1 + 0.3]
)
@each("advantage", [2.0, -1.0])
def test_cispo_by_hand(ratio: float, weight: float, advantage: float) -> None:
    """The gradient is -weight · A, on both sides of the clip and for both signs; none flows into
    the ratio."""
    r, logprobs = (
        torch.tensor([[ratio]], requires_grad=True),
        torch.tensor([[-0.5]], requires_grad=True),
    )
    loss = cispo(r, torch.tensor([[advantage]]), logprobs, clip_low=0.2, clip_high=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(weight * advantage * 0.5, rel=1e-6)  # float32 rounding
    assert logprobs.grad.item() == pytest.approx(-weight * advantage, rel=1e-6)
    assert r.grad is None


def test_cispo_inside_the_bounds_has_the_gradient_of_the_ratio() -> None:
    """r ∇log π = ∇r: REINFORCE with the importance weight, and REINFORCE itself on policy."""
    given = _random()
    leaf = given["logprobs"].clone().requires_grad_()
    everywhere = torch.ones_like(given["response_mask"])
    ratio = token_ratio(leaf, given["logprobs_old"], everywhere)
    (ours,) = torch.autograd.grad(
        cispo(ratio, given["advantages"], leaf, clip_high=10.0).sum(), leaf, retain_graph=True
    )
    (theirs,) = torch.autograd.grad(-(ratio * given["advantages"]).sum(), leaf)
    torch.testing.assert_close(
        ours, theirs, rtol=1e-14, atol=0
    )  # one product in another order: float64
    on_policy = token_ratio(leaf, leaf.detach(), everywhere)
    (ours,) = torch.autograd.grad(cispo(on_policy, given["advantages"], leaf).sum(), leaf)
    (theirs,) = torch.autograd.grad(reinforce(leaf, given["advantages"]).sum(), leaf)
    assert torch.equal(ours, theirs)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.5), (-1.0, 3.0), (0.0, 3.0)])
@pytest.mark.parametrize("ratio", [0.2, 1.0, 4.0])
def test_sapo_by_hand(ratio: float, advantage: float, tau: float) -> None:
    r = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    loss = sapo(
        r, torch.tensor([[advantage]], dtype=torch.float64), tau_positive=1.5, tau_negative=3.0
    )
    loss.backward()
    p = _sigmoid(tau * (ratio - 1))
    assert loss.item() == pytest.approx(-4 / tau * p * advantage, rel=1e-14)  # float64 rounding
    assert r.grad.item() == pytest.approx(-4 * p * (1 - p) * advantage, rel=1e-13)


def test_sapo_keeps_float64() -> None:
    """1.05 is not a number of float32: rounded there, the loss is off in the eighth digit."""
    got = sapo(
        torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64)
    )
    assert got.item() == pytest.approx(4 / 1.05 * _sigmoid(1.05), rel=1e-14)  # float64 rounding


@pytest.mark.parametrize("seed", range(3))
def test_gmpo_against_a_loop(seed: int) -> None:
    """One rollout at a time, as the paper writes it: the root of the product of clipped ratios.

    The two widths differ. verl clamps the log-ratio to (-low, high) in the same way, then takes the
    smaller of both after multiplying by the sign of the advantage.
    """
    given, low, high = _random(seed), 0.2, 0.5
    got = gmpo(**given, clip_log_low=low, clip_log_high=high)
    for rollout in range(4):
        rows = [r for r in range(6) if given["rollout_ids"][r] == rollout]
        advantage = float(given["advantages"][rows[0], 0])
        product, count = 1.0, 0
        for r, t in [(r, t) for r in rows for t in range(5) if given["response_mask"][r, t]]:
            ratio = math.exp(float(given["logprobs"][r, t] - given["logprobs_old"][r, t]))
            clip = min(max(ratio, math.exp(-low)), math.exp(high))
            product *= min(ratio * advantage, clip * advantage) / advantage
            count += 1
        for r in rows:
            expected = -(product ** (1 / max(count, 1))) * advantage
            assert got[r].tolist() == pytest.approx(
                [expected] * 5, rel=1e-12
            )  # float64 rounding of at most 10 factors


def test_gmpo_on_policy_has_the_gradient_of_reinforce_over_sequences() -> None:
    given = _random()
    leaf = given["logprobs"].clone().requires_grad_()
    weights = sequence_mean(given["response_mask"], given["rollout_ids"])
    (ours,) = torch.autograd.grad(
        (weights * gmpo(**given | {"logprobs": leaf, "logprobs_old": leaf.detach()})).sum(), leaf
    )
    (theirs,) = torch.autograd.grad((weights * reinforce(leaf, given["advantages"])).sum(), leaf)
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=1e-8
    )  # the weights are float32, whose sum over a rollout rounds


def test_gmpo_is_finite_at_any_log_ratio() -> None:
    for size in (1e4, -1e4, math.inf, -math.inf):
        leaf = torch.full((2, 2), size, requires_grad=True)
        loss = gmpo(
            leaf,
            torch.zeros(2, 2),
            torch.ones(2, 2).bool(),
            torch.arange(2),
            torch.tensor([[1.0], [-1.0]]).expand(2, 2),
        )
        loss.sum().backward()
        assert loss.isfinite().all() and leaf.grad.isfinite().all()


def test_advantages_are_constants_in_every_loss() -> None:
    given = _random()
    for loss in (cispo, sapo, gmpo):
        advantages, leaf = (
            given["advantages"].clone().requires_grad_(),
            given["logprobs"].clone().requires_grad_(),
        )
        ratio = leaf.exp()
        args = {cispo: (ratio, advantages, leaf), sapo: (ratio, advantages)}
        rest = (
            leaf,
            given["logprobs_old"],
            given["response_mask"],
            given["rollout_ids"],
            advantages,
        )
        loss(*args.get(loss, rest)).sum().backward()
        assert advantages.grad is None and leaf.grad is not None


NAN = float("nan")


@each(
    ("loss", "name", "value"),
    [(clipped, cap, v) for cap in ("dual_clip", "delta") for v in (1.0, 1.2, -3.0, math.inf, NAN)]
    + [(cispo, "clip_low", v) for v in (0.0, 1.1, NAN)]
    + [(cispo, "clip_high", v) for v in (0.0, -0.5, NAN)]
    + [(sapo, name, v) for name in ("tau_positive", "tau_negative") for v in (0.0, -1.0, NAN)]
    + [(gmpo, name, v) for name in ("clip_log_low", "clip_log_high") for v in (0.0, -1.0, NAN)]
    + [(kl_cov, "share", v) for v in (-0.1, 1.1, NAN)]
    + [(kl_cov, "coef", v) for v in (-1.0, math.inf, NAN)]
    + [(dppo, "delta", v) for v in (0.0, -1.0, math.inf, NAN)]
    + [(dppo, "penalty", v) for v in (-1.0, math.inf, NAN)]
    + [
        (vespo, f"{name}_{sign}", v)
        for name in ("k", "lam")
        for sign in ("positive", "negative")
        for v in (0.0, -1.0, NAN)
    ],
)
def test_numbers_are_checked(loss, name: str, value: float) -> None:
    one = torch.ones(1, 1)
    args = {
        clipped: (one, one),
        cispo: (one, one, one),
        sapo: (one, one),
        gmpo: (one, one, one.bool(), one[0].long() * 0, one),
    }
    args |= {kl_cov: (one,) * 5, vespo: args[gmpo], dppo: (one, one, one.bool(), one)}
    with pytest.raises(ValueError, match=rf"{name} is {value}; allowed: "):
        loss(*args[loss], **{name: value})


def test_kl_cov_by_hand() -> None:
    """r = 2, A = -3: 6. Of the two tokens the one of rank 0.1 pays 0.5 · log 2 more; its gradient
    is that of |log π|, 0 at r = 1."""
    old = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[2.0, 2.0, 1.0]], dtype=torch.float64).log().requires_grad_()
    ratio, advantages = (
        torch.tensor([[2.0, 2.0, 1.0]], dtype=torch.float64),
        torch.full((1, 3), -3.0, dtype=torch.float64),
    )
    loss = kl_cov(ratio, advantages, new, old, torch.tensor([[0.1, 0.2, 0.0]]), share=0.2, coef=0.5)
    loss.sum().backward()
    assert loss.tolist()[0] == pytest.approx([6 + math.log(2) / 2, 6, 3], abs=1e-14)
    assert new.grad.tolist() == [[0.5, 0.0, 0.0]]


def test_kl_cov_on_policy_has_the_gradient_of_reinforce() -> None:
    given = _random()
    leaf = given["logprobs"].clone().requires_grad_()
    ratio = token_ratio(leaf, leaf.detach(), torch.ones_like(given["response_mask"]))
    (ours,) = torch.autograd.grad(
        kl_cov(ratio, given["advantages"], leaf, leaf.detach(), torch.zeros(6, 5)).sum(), leaf
    )
    (theirs,) = torch.autograd.grad(reinforce(leaf, given["advantages"]).sum(), leaf)
    assert torch.equal(ours, theirs)


# policy, sampler, advantage, two-sided → the gradient by the log-prob; r = π / μ, delta = 0.2
DPPO_BY_HAND = [
    (0.8, 0.5, 1.0, False, 0.0),  # further up by 0.3, which the advantage asks for
    (0.8, 0.5, -1.0, False, 1.6),  # on its way back
    (0.8, 0.5, -1.0, True, 0.0),
    (0.1, 0.5, -2.0, False, 0.0),
    (0.1, 0.5, 2.0, False, -0.4),
    (0.06, 0.01, 1.0, False, -6.0),  # a ratio of 6, which any clip of ratios holds
    (0.65, 0.5, 1.0, True, -1.3),
]


@pytest.mark.parametrize(("new", "sampler", "advantage", "two_sided", "slope"), DPPO_BY_HAND)
def test_dppo_by_hand(
    new: float, sampler: float, advantage: float, two_sided: bool, slope: float
) -> None:
    leaf, mu = (
        torch.tensor([[new]], dtype=torch.float64).log().requires_grad_(),
        torch.tensor([[sampler]], dtype=torch.float64).log(),
    )
    for penalty in (0.0, 0.5):
        loss = dppo(
            leaf,
            mu,
            torch.ones(1, 1).bool(),
            torch.tensor([[advantage]]),
            two_sided=two_sided,
            penalty=penalty,
        )
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        assert gradient.item() == pytest.approx(
            slope + 2 * penalty * math.log(new / sampler), abs=1e-12
        )


def test_dppo_by_kl_and_on_policy() -> None:
    """By the binary KL a move from 0.5 to 0.8 is 0.223 nats. On policy: the gradient of REINFORCE,
    nothing held, no penalty."""
    leaf, mu = (
        torch.tensor([[0.8]], dtype=torch.float64).log().requires_grad_(),
        torch.tensor([[0.5]], dtype=torch.float64).log(),
    )
    for delta, slope in ((0.2231, 0.0), (0.2232, -1.6)):
        loss = dppo(
            leaf,
            mu,
            torch.ones(1, 1).bool(),
            torch.ones(1, 1),
            divergence="kl",
            delta=delta,
            penalty=0.0,
        )
        assert torch.autograd.grad(loss.sum(), leaf)[0].item() == pytest.approx(slope, abs=1e-12)
    given = _random()
    leaf = given["logprobs"].clone().requires_grad_()
    (ours,) = torch.autograd.grad(
        dppo(leaf, leaf.detach(), torch.ones(6, 5).bool(), given["advantages"]).sum(), leaf
    )
    (theirs,) = torch.autograd.grad(reinforce(leaf, given["advantages"]).sum(), leaf)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


def _vespo_at(w: float, advantage: float) -> float:
    """φ of a rollout of two tokens, read off the gradient."""
    leaf = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    sampler, advantages = (
        leaf.detach() - math.log(w) / 2,
        torch.full((1, 2), advantage, dtype=torch.float64),
    )
    vespo(leaf, sampler, torch.ones(1, 2).bool(), torch.tensor([0]), advantages).sum().backward()
    assert leaf.grad[0, 0] == leaf.grad[0, 1]
    return float(-leaf.grad[0, 0] / advantage)


def test_vespo_by_hand() -> None:
    """φ(1) = 1: REINFORCE on the sampler's own policy. Largest at k/λ: (2/3)² e at ⅔ and (3/2)³
    e^-1 at 3/2."""
    assert _vespo_at(1.0, 2.0) == _vespo_at(1.0, -2.0) == 1.0
    for advantage, peak, height in ((1.0, 2 / 3, 1.208), (-1.0, 3 / 2, 1.242)):
        assert _vespo_at(peak, advantage) == pytest.approx(height, abs=1e-3)
        assert all(
            _vespo_at(peak * (1 + e), advantage) < _vespo_at(peak, advantage) for e in (-0.01, 0.01)
        )
    assert _vespo_at(2.0, 1.0) == pytest.approx(4 * math.exp(-3), rel=1e-12)
    assert _vespo_at(2.0, -1.0) == pytest.approx(8 * math.exp(-2), rel=1e-12)
    assert _vespo_at(1e30, 1.0) == 0.0 and _vespo_at(1e-30, 1.0) == pytest.approx(
        math.exp(3) * 1e-16, rel=1e-6
    )


def test_vespo_weighs_a_rollout_whole() -> None:
    """Rows of one rollout share a weight, tokens under the mask count nowhere, and no gradient
    flows into the weight or the sampler."""
    given = _random()
    leaf, sampler = (
        given["logprobs"].clone().requires_grad_(),
        given["logprobs_old"].clone().requires_grad_(),
    )
    rest = (given["response_mask"], given["rollout_ids"], given["advantages"])
    vespo(leaf, sampler, *rest).sum().backward()
    weights = -leaf.grad / given["advantages"]
    assert sampler.grad is None
    for rollout in range(4):
        own = given["rollout_ids"] == rollout
        delta = (leaf.detach() - sampler.detach())[own][given["response_mask"][own]].sum()
        k, lam = (2, 3) if given["advantages"][own][0, 0] >= 0 else (3, 2)
        phi = math.exp(float(k * delta + lam * (1 - delta.exp())))
        assert weights[own].flatten().tolist() == pytest.approx(
            [phi] * weights[own].numel(), rel=1e-12
        )  # float64 rounding
