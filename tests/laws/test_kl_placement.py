"""Where a KL stands decides whose gradient is descended: every estimator × placement, by
enumerating all that can be sampled.

Five tokens. `single`: one token. `episode`: token 0 ends it, any other is followed by a second
token: 21 sequences, two lengths.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from parametrise import each
from rlkit.algorithm import KL, Algorithm
from rlkit.config.compose import compose, experiment
from rlkit.functional import (
    confident,
    forward,
    full,
    k1,
    k2,
    k3,
    keep_all,
    leave_one_out,
    raw,
    reinforce,
    reverse,
    token_ratio,
    truncated,
)
from rlkit.training.update.loss import loss_weights, surrogate
from rlkit.training.update.weighted import penalize, weigh
from rlkit.types import Scored, TokenLogprobs

NAN = float("nan")
COEF = 0.7
CLOSE = {"rtol": 0, "atol": 1e-13}  # float64 rounding over sums of 21 terms of order 1


def _logits(seed: int) -> Tensor:
    """Of the first token [5], then of the second after each first [5, 5]; log-ratios between two of
    them reach 4."""
    return torch.randn(30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


POLICY, OLD, REF = _logits(0), _logits(1), _logits(2)
FIRST = {
    "single": torch.arange(5),
    "episode": torch.tensor([0] + [v for v in range(1, 5) for _ in range(5)]),
}
SECOND = {
    "single": torch.zeros(5, dtype=torch.int64),
    "episode": torch.tensor([0] + list(range(5)) * 4),
}
KINDS = list(FIRST)


def _distributions(logits: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:5].log_softmax(-1), logits[5:].view(5, 5).log_softmax(-1)


def _mask(kind: str) -> Tensor:
    """Position 0 is the prompt; the second token is there unless the first ends the episode."""
    longer = FIRST[kind] > 0 if kind == "episode" else torch.zeros(5, dtype=torch.bool)
    return torch.stack([torch.zeros_like(longer), torch.ones_like(longer), longer], 1)


def _rows(kind: str, first: Tensor, second: Tensor) -> Tensor:
    """[rows, 3], with nan wherever nothing was sampled."""
    tokens = torch.stack([torch.full_like(first, NAN), first, second], 1)
    return torch.where(_mask(kind), tokens, NAN)


def _logprobs(kind: str, logits: Tensor) -> Tensor:
    first, second = _distributions(logits)
    return _rows(kind, first[FIRST[kind]], second[FIRST[kind], SECOND[kind]])


def _full_kl(kind: str, logits: Tensor, ref: Tensor) -> Tensor:
    (p1, p2), (r1, r2) = _distributions(logits), _distributions(ref)
    return _rows(
        kind, _kl(p1, r1).expand(len(FIRST[kind])), (p2.exp() * (p2 - r2)).sum(-1)[FIRST[kind]]
    )


def _probabilities(kind: str, logits: Tensor) -> Tensor:
    """Of each sequence."""
    return torch.where(_mask(kind), _logprobs(kind, logits), 0.0).sum(1).exp()


# ------------------------------------------------------ what each estimator is, on one distribution


def _kl(p: Tensor, r: Tensor) -> Tensor:
    return (p.exp() * (p - r)).sum()


def _reverse_kl(p: Tensor, r: Tensor) -> Tensor:
    return _kl(r, p)


def _half_square(p: Tensor, r: Tensor) -> Tensor:
    return (p.exp() * (r - p).square()).sum() / 2


def _zero(p: Tensor, r: Tensor) -> Tensor:
    return p.sum() * 0


def _k3(q: Tensor) -> Tensor:
    return q.exp() - q - 1


def _likely(p: Tensor) -> Tensor:
    return (p > torch.tensor(0.2).log()).double().detach()


def _scored(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Its gradient is E[f ∇log π] with f a constant."""
    return lambda p, r: (p.exp() * f(p, r).detach()).sum()


class Facts(NamedTuple):
    """Functions of (log π, log ref) of one state. The gradients of the last three are what is
    descended there."""

    estimator: Callable[..., Tensor]
    token: Callable[[Tensor, Tensor], Tensor]  # the estimate of each token [5]
    value: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    reward: Callable[[Tensor, Tensor], Tensor]  # of the token itself


FACTS = {
    "k1": Facts(k1, lambda p, r: p - r, _kl, _zero, _kl),
    "k2": Facts(
        k2,
        lambda p, r: (r - p).square() / 2,
        _half_square,
        _kl,
        lambda p, r: _half_square(p, r) - _kl(p, r),
    ),
    "k3": Facts(
        k3, lambda p, r: _k3(r - p), _kl, _reverse_kl, lambda p, r: _kl(p, r) - _reverse_kl(p, r)
    ),
    "forward": Facts(forward, lambda p, r: p - r, _kl, _kl, _kl),
    "reverse": Facts(
        reverse,
        lambda p, r: (r - p).exp() * (r - p),
        _reverse_kl,
        _reverse_kl,
        lambda p, r: -(r.exp() * (r - p).square()).sum() / 2,
    ),
    "truncated": Facts(
        functools.partial(truncated, threshold=1.0),
        lambda p, r: _k3((r - p).clamp(-1, 1)),
        lambda p, r: (p.exp() * _k3((r - p).clamp(-1, 1))).sum(),
        lambda p, r: (((p.exp() - r.exp()) * ((r - p).abs() < 1)).detach() * p).sum(),
        _scored(lambda p, r: _k3((r - p).clamp(-1, 1))),
    ),
    "confident": Facts(
        functools.partial(confident, probability=0.2),
        lambda p, r: _k3(r - p) * _likely(p),
        lambda p, r: (p.exp() * _k3(r - p) * _likely(p)).sum(),
        lambda p, r: (((p.exp() - r.exp()) * _likely(p)).detach() * p).sum(),
        _scored(lambda p, r: _k3(r - p) * _likely(p)),
    ),
    "full": Facts(full, lambda p, r: _kl(p, r).expand(5), _kl, _kl, _zero),
}
WEIGHTED = ("forward", "reverse")  # these carry the ratio: importance_weight is refused
UNWEIGHTED = [name for name in FACTS if name not in WEIGHTED]


def _visited(
    kind: str,
    f: Callable[[Tensor, Tensor], Tensor],
    logits: Tensor,
    sampled: Tensor,
    *,
    whole: bool = False,
) -> Tensor:
    """Σ over states of the probability of being there × f. `whole`: with the gradient of being
    there."""
    (p1, p2), (r1, r2) = _distributions(logits), _distributions(REF)
    there = _distributions(sampled)[0].exp()
    there = there if whole else there.detach()
    total = f(p1, r1)
    return (
        total if kind == "single" else total + sum(there[v] * f(p2[v], r2[v]) for v in range(1, 5))
    )


def _gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


# ----------------------------------------------------------------- what rlkit makes of each of them


def _batch(kind: str, logits: Tensor, old: Tensor) -> Scored:
    mask, n = _mask(kind), len(FIRST[kind])
    return Scored(
        ids=torch.zeros(n, 3, dtype=torch.int64),
        attention_mask=torch.ones_like(mask),
        response_mask=mask,
        sampled_mask=mask,
        rollout_ids=torch.arange(n),
        step_ids=torch.zeros(n, 3, dtype=torch.int64),
        rewards=torch.zeros(n, dtype=torch.float64),
        group_ids=torch.zeros(n, dtype=torch.int64),
        truncated=torch.zeros(n, dtype=torch.bool),
        lengths=mask.sum(1),
        reply_lengths=mask.sum(1),
        versions=torch.zeros(n, 3, dtype=torch.int64),
        token_rewards=torch.zeros(n, 3, dtype=torch.float64),
        logprobs_sampler=_logprobs(kind, old),
        logprobs_old=_logprobs(kind, old),
        logprobs_ref=_logprobs(kind, REF),
        full_kl=_full_kl(kind, old, REF),
    )


def changed(batch: Scored, change: Callable[[Tensor], Tensor]) -> Scored:
    own = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
    return replace(batch, **{name: change(value) for name, value in own.items()})


def _algorithm(weights: Tensor, advantage: Callable[..., Tensor] = raw) -> Algorithm:
    """Its aggregation is the exact expectation: each sequence counts with its probability."""
    return Algorithm(
        "exact",
        advantage,
        token_ratio,
        reinforce,
        lambda response_mask: weights[:, None] * response_mask,
        keep_all,
    )


def _descended(kind: str, kl: KL, *, old: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Expected KL, and the expected gradient of the loss per unit of the coefficient; all rewards
    are 0."""
    logits = POLICY.clone().requires_grad_()
    old = POLICY if old is None else old
    algorithm = _algorithm(_probabilities(kind, old))
    batch = loss_weights(weigh(_batch(kind, logits, old), algorithm, kl), algorithm)
    logprobs = _logprobs(kind, logits)
    scores = TokenLogprobs(
        logprobs, torch.zeros_like(logprobs), full_kl=_full_kl(kind, logits, REF)
    )
    loss, terms = surrogate(batch, scores, algorithm, kl)
    value = (batch.weights * torch.where(batch.response_mask, terms["kl"], 0.0)).sum()
    return value, torch.autograd.grad(loss, logits)[0] / COEF


def _kl_of(name: str, placement: str = "loss", **more: bool) -> KL:
    return KL(name, FACTS[name].estimator, placement, COEF, **more)


@each("kind", KINDS)
@each("name", FACTS)
def test_in_the_loss(name: str, kind: str) -> None:
    """The states are those that were visited; that the policy decides which is left out."""
    logits = POLICY.clone().requires_grad_()
    value, gradient = _descended(kind, _kl_of(name))
    torch.testing.assert_close(value, _visited(kind, FACTS[name].value, POLICY, POLICY), **CLOSE)
    torch.testing.assert_close(
        gradient, _gradient(_visited(kind, FACTS[name].loss, logits, logits), logits), **CLOSE
    )


@each("kind", KINDS)
@each("name", UNWEIGHTED)
def test_in_the_loss_with_its_ratio(name: str, kind: str) -> None:
    logits = POLICY.clone().requires_grad_()
    _, gradient = _descended(kind, _kl_of(name, importance_weight=True))
    torch.testing.assert_close(
        gradient, _gradient(_visited(kind, FACTS[name].value, logits, logits), logits), **CLOSE
    )


@each("kind", KINDS)
@each("name", FACTS)
def test_the_ratio_makes_it_right_on_samples_of_the_old_policy(name: str, kind: str) -> None:
    """State by state, at the states that the old policy visits. `full` needs no ratio: tried with
    and without."""
    logits = POLICY.clone().requires_grad_()
    expected = _gradient(_visited(kind, FACTS[name].value, logits, OLD), logits)
    weighted = {True} if name in UNWEIGHTED else {False}
    for importance_weight in weighted | ({False} if name == "full" else set()):
        _, gradient = _descended(kind, _kl_of(name, importance_weight=importance_weight), old=OLD)
        torch.testing.assert_close(gradient, expected, **CLOSE)


@pytest.mark.slow
@each("in_baseline", [False, True])
@each("kind", KINDS)
@each("name", FACTS)
def test_in_the_reward(name: str, kind: str, in_baseline: bool) -> None:
    """The token's own part as in the table, and all of what comes after it."""
    logits = POLICY.clone().requires_grad_()
    facts = FACTS[name]
    later = _visited(kind, facts.value, logits, logits, whole=True) - _visited(
        kind, facts.value, logits, logits
    )
    expected = _gradient(_visited(kind, facts.reward, logits, logits) + later, logits)
    _, gradient = _descended(kind, _kl_of(name, "reward", in_baseline=in_baseline))
    torch.testing.assert_close(gradient, expected, **CLOSE)


@pytest.mark.slow
@each("placement", ["reward", "reward_sequence"])
@each("kind", KINDS)
@each("name", FACTS)
def test_in_the_reward_of_the_rollout(name: str, kind: str, placement: str) -> None:
    """∇ Σ_y π(y) f(y) with f a constant: the sum over a rollout's tokens, or their mean."""
    logits, mask = POLICY.clone().requires_grad_(), _mask(kind)
    (p1, p2), (r1, r2) = _distributions(POLICY), _distributions(REF)
    second = torch.stack([FACTS[name].token(p, r) for p, r in zip(p2, r2, strict=True)])
    tokens = _rows(
        kind, FACTS[name].token(p1, r1)[FIRST[kind]], second[FIRST[kind], SECOND[kind]]
    ).nan_to_num(0.0)
    scores = tokens.sum(1) / (mask.sum(1) if placement == "reward_sequence" else 1)
    expected = _gradient((_probabilities(kind, logits) * scores).sum(), logits)
    for in_baseline in (False, True):
        _, gradient = _descended(kind, _kl_of(name, placement, in_baseline=in_baseline))
        torch.testing.assert_close(gradient, expected, **CLOSE)


@each("kind", KINDS)
@each("name", UNWEIGHTED)
def test_loss_and_reward_together_give_the_gradient_of_the_value(name: str, kind: str) -> None:
    """The product rule: one is the gradient of the estimate, the other that of the draw."""
    logits = POLICY.clone().requires_grad_()
    whole = _gradient(_visited(kind, FACTS[name].value, logits, logits, whole=True), logits)
    both = _descended(kind, _kl_of(name))[1] + _descended(kind, _kl_of(name, "reward"))[1]
    torch.testing.assert_close(both, whole, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["k1", "forward"])
def test_k1_in_the_reward_descends_the_divergence_of_whole_rollouts(name: str, kind: str) -> None:
    """Written over sequences: Σ_y π(y) log π(y) / ref(y)."""
    logits = POLICY.clone().requires_grad_()
    probabilities, reference = _probabilities(kind, logits), _probabilities(kind, REF)
    expected = _gradient((probabilities * (probabilities / reference).log()).sum(), logits)
    torch.testing.assert_close(_descended(kind, _kl_of(name, "reward"))[1], expected, **CLOSE)


@pytest.mark.parametrize("name", FACTS)
def test_in_the_baseline_of_the_others_the_gradient_is_the_same(name: str) -> None:
    """All 25 pairs of samples, each a group: what the other sample is worth does not depend on this
    one."""
    logits, pairs = (
        POLICY.clone().requires_grad_(),
        torch.cartesian_prod(torch.arange(5), torch.arange(5)).flatten(),
    )
    old = _batch("single", POLICY, POLICY)
    batch = changed(old, lambda v: v[pairs])
    batch = replace(batch, rollout_ids=torch.arange(50), group_ids=torch.arange(50) // 2)
    weights = _probabilities("single", POLICY)[pairs].view(25, 2).prod(1).repeat_interleave(2) / 2
    algorithm = _algorithm(weights, leave_one_out)
    kl = _kl_of(name, "reward", in_baseline=True)
    batch = loss_weights(weigh(batch, algorithm, kl), algorithm)
    logprobs = _logprobs("single", logits)[pairs]
    loss, _ = surrogate(
        batch,
        TokenLogprobs(logprobs, torch.zeros_like(logprobs), full_kl=batch.full_kl),
        algorithm,
        kl,
    )
    torch.testing.assert_close(
        _gradient(loss, logits) / COEF,
        _descended("single", kl._replace(in_baseline=False))[1],
        **CLOSE,
    )


@pytest.mark.parametrize(
    "name, pulls",
    {"k1": 1.0, "forward": 1.0, "k2": 0.0, "k3": 0.0, "truncated": 0.0, "reverse": -1.0}.items(),
)
def test_near_the_reference_only_k1_in_the_reward_pulls(name: str, pulls: float) -> None:
    """To first order in the distance: the gradient of KL(π‖ref), nothing, or away."""
    logits = (REF[:5] + 1e-4 * POLICY[:5]).requires_grad_()
    p, r = logits.log_softmax(-1), REF[:5].log_softmax(-1)
    got, towards = _gradient(FACTS[name].reward(p, r), logits), _gradient(_kl(p, r), logits)
    assert (
        got - pulls * towards
    ).norm() <= 1e-3 * towards.norm()  # the next order is 1e-4 of it, times numbers of order 1


def test_k1_of_the_config_is_k1_in_the_reward() -> None:
    """The option carries the ratio, for the loss; in the reward it is 1, whatever was sampled."""
    kl = experiment(compose(["kl=k1", "kl.placement=reward"])).kl
    assert kl.placement == "reward" and kl.estimator.func is forward
    batch = _batch("episode", POLICY, OLD)
    assert torch.equal(penalize(batch, kl), penalize(batch, kl._replace(estimator=k1)))


# --------------------------------------------------------------------- before or after the baseline


def _z_score(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def _equal_rewards() -> tuple[Scored, Tensor]:
    """The 21 episodes as one group with equal rewards; and k3 of each token, the coefficient in
    it."""
    batch = _batch("episode", POLICY, POLICY)
    estimates = k3(batch.logprobs_old, batch.logprobs_ref)
    return replace(batch, rewards=torch.ones(21, dtype=torch.float64)), COEF * torch.where(
        batch.response_mask, estimates, 0.0
    )


def test_after_the_baseline_equal_rewards_leave_the_divergence_to_come() -> None:
    """Group statistics see the raw rewards, so a group of equal ones says nothing but the KL, in
    nats."""
    batch, penalty = _equal_rewards()
    got = weigh(batch, _algorithm(torch.ones(21), _z_score), _kl_of("k3", "reward")).advantages
    expected = torch.where(batch.response_mask, -penalty.flip(1).cumsum(1).flip(1), 0.0)
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("advantage", [_z_score, leave_one_out, raw])
def test_in_the_baseline_the_penalty_of_the_rollout_is_a_part_of_its_reward(
    advantage: Callable[..., Tensor],
) -> None:
    """And a group of equal rewards is spread by its KL alone, to a deviation of 1 where it is
    divided by that."""
    batch, penalty = _equal_rewards()
    algorithm = _algorithm(torch.ones(21), advantage)
    got = weigh(batch, algorithm, _kl_of("k3", "reward", in_baseline=True)).advantages
    by_hand = weigh(replace(batch, rewards=batch.rewards - penalty.sum(1)), algorithm).advantages
    torch.testing.assert_close(got, by_hand, **CLOSE)
    if advantage is _z_score:
        assert got[:, 1].std().item() == pytest.approx(1.0, abs=1e-4)  # the 1e-6 in the denominator


def test_the_mean_of_the_rollout_stands_at_its_last_token() -> None:
    """An advantage of tokens sees it there, once."""
    batch, penalty = _equal_rewards()
    mean = penalty.sum(1) / batch.response_mask.sum(1)
    expected = torch.zeros(21, 3, dtype=torch.float64)
    expected[torch.arange(21), batch.response_mask.sum(1)] = -mean
    for kl, want in (
        (_kl_of("k3", "reward_sequence"), expected),
        (_kl_of("k3", "reward"), -penalty),
    ):
        got = weigh(
            batch, _algorithm(torch.ones(21), lambda token_rewards: token_rewards), kl
        ).advantages
        torch.testing.assert_close(got, want, **CLOSE)


# ----------------------------------------------------------------------------------------- numerics

PLACES = [("loss", False), ("loss", True), ("reward", False), ("reward_sequence", False)]


@each("placement, importance_weight", PLACES)
@each("name", FACTS)
def test_finite_at_any_log_ratio(name: str, placement: str, importance_weight: bool) -> None:
    """In float32, every order of policy, old policy and reference, 1e4 nats apart."""
    if importance_weight and name in WEIGHTED:
        pytest.skip("refused")
    corners = torch.tensor(list(itertools.product([0.0, -1e4], repeat=3)))
    logprobs, old, ref = (
        torch.stack([torch.full((8,), NAN), column, column.flip(0)], 1)
        for column in corners.unbind(1)
    )
    leaf = logprobs.clone().requires_grad_()
    kl = _kl_of(name, placement, importance_weight=importance_weight)
    batch = _batch("episode", POLICY, POLICY)
    batch = changed(batch, lambda v: v[:8])
    batch = replace(
        batch,
        response_mask=torch.tensor([[False, True, True]]).expand(8, 3),
        rewards=torch.zeros(8),
        token_rewards=torch.zeros(8, 3),
        logprobs_old=old,
        logprobs_ref=ref,
        full_kl=torch.full((8, 3), 1e4),
    )
    algorithm = _algorithm(torch.full((8,), 1 / 16))
    batch = loss_weights(weigh(batch, algorithm, kl), algorithm)
    loss, _ = surrogate(
        batch, TokenLogprobs(leaf, torch.zeros_like(leaf), full_kl=leaf * 0 + 1e4), algorithm, kl
    )
    loss.backward()
    assert loss.isfinite() and leaf.grad.isfinite().all() and batch.advantages.isfinite().all()


@pytest.mark.slow
@each("in_baseline", [False, True])
@each("placement", ["reward", "reward_sequence"])
@each("name", FACTS)
def test_garbage_under_the_mask_changes_no_bit_of_the_advantages(
    name: str, placement: str, in_baseline: bool
) -> None:
    kl, algorithm = _kl_of(name, placement, in_baseline=in_baseline), _algorithm(torch.ones(21))
    batch = _batch("episode", POLICY, OLD)
    clean = weigh(batch, algorithm, kl).advantages
    for garbage in (0.0, float("inf"), -float("inf"), 1e4, -1e300):
        floats = {
            k: v
            for k, v in vars(batch).items()
            if torch.is_tensor(v) and v.is_floating_point() and v.dim() == 2
        }
        dirty = replace(
            batch, **{k: torch.where(batch.response_mask, v, garbage) for k, v in floats.items()}
        )
        assert torch.equal(weigh(dirty, algorithm, kl).advantages, clean)
    assert clean.isfinite().all() and clean.any()
