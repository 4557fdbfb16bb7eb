"""Pairs of a prompt's rollouts: which there are, their loss, and the advantage that has exactly its
gradient."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from parametrise import each
from rlkit.functional import (
    all_pairs,
    best_worst,
    fill_masked,
    pairwise,
    pairwise_loss,
    reinforce,
    sequence_sum,
)

NAN = float("nan")
SELECTORS = {"all_pairs": all_pairs, "best_worst": best_worst}


def _batch(seed: int = 0) -> dict[str, Tensor]:
    """10 rows of 8 positions of 8 rollouts of 3 prompts: one unscored, one without a token, one
    without a row, two alike."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(10, 8, generator=generator) < 0.5
    mask[:, 1] = True
    mask[4] = False
    return {
        "rewards": torch.tensor([1.0, 0.5, 0.0, NAN, 1.0, 0.0, 1.0, 0.2], dtype=torch.float64),
        "group_ids": torch.tensor([7, 7, 7, 7, 7, 2, 2, 9]),
        "logprobs_old": -2 * torch.rand(10, 8, generator=generator, dtype=torch.float64),
        "response_mask": mask,
        "rollout_ids": torch.tensor([0, 1, 2, 3, 4, 5, 6, 0, 0, 5]),
    }


def _trained(given: dict[str, Tensor]) -> Tensor:
    """Rewards as the selector sees them: rollouts without a trained token are in no pair."""
    tokens = torch.zeros(8).index_add(
        0, given["rollout_ids"], given["response_mask"].sum(1).float()
    )
    return given["rewards"].where(tokens > 0, NAN)


def _same_pairs(got: Tensor, expected: list[tuple[int, int]]) -> bool:
    return (
        got.dtype == torch.int64
        and got.shape == (len(expected), 2)
        and sorted(map(tuple, got.tolist())) == sorted(expected)
    )


def test_pairs_by_hand() -> None:
    rewards, groups = (
        torch.tensor([1.0, 0.0, 1.0, NAN, 5.0, 0.0, 3.0]),
        torch.tensor([4, 4, 4, 4, 1, 2, 2]),
    )
    assert _same_pairs(all_pairs(rewards, groups), [(0, 1), (2, 1), (6, 5)])
    assert _same_pairs(best_worst(rewards, groups), [(0, 1), (6, 5)])


@pytest.mark.parametrize("seed", range(5))
def test_pairs_against_a_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, groups = (
        torch.randint(4, (20,), generator=generator).float(),
        torch.randint(5, (20,), generator=generator) * 10 - 7,
    )
    rewards[[2, 11]] = NAN
    every = [
        (i, j)
        for i, j in itertools.permutations(range(20), 2)
        if groups[i] == groups[j] and rewards[i] > rewards[j]
    ]
    assert _same_pairs(all_pairs(rewards, groups), every)
    extremes = []
    for group in set(groups.tolist()):
        members = [i for i in range(20) if groups[i] == group and rewards[i] == rewards[i]]
        if members and max(rewards[members]) > min(rewards[members]):
            extremes.append(
                (
                    max(members, key=lambda i: (rewards[i], -i)),
                    min(members, key=lambda i: (rewards[i], i)),
                )
            )
    assert _same_pairs(best_worst(rewards, groups), extremes)


@each("selector", SELECTORS.values(), ids=SELECTORS)
@each("rewards", [[0.5, 0.5, 0.5], [NAN, NAN, 1.0], [NAN, NAN, NAN], [0.0, 1.0, 2.0], []])
def test_ties_unscored_and_lone_rollouts_are_in_no_pair(selector, rewards: list[float]) -> None:
    groups = torch.arange(3) if rewards[:1] == [0.0] else torch.zeros(len(rewards)).long()
    assert _same_pairs(selector(torch.tensor(rewards), groups), [])


def test_loss_by_hand() -> None:
    """Sums -3 and -2 (what is masked is nan), β = ½: -log σ(½ · -1) = log(1 + √e); means -1 and -2:
    log(1 + 1/√e)."""
    logprobs = torch.tensor(
        [[-1.0, NAN, -2.0], [-2.0, NAN, NAN], [0.0, NAN, NAN]], dtype=torch.float64
    )
    mask, rollouts, pairs = ~logprobs.isnan(), torch.tensor([0, 1, 0]), torch.tensor([[0, 1]])
    assert pairwise_loss(logprobs, mask, rollouts, pairs, beta=0.5).item() == pytest.approx(
        math.log(1 + math.exp(0.5)), abs=1e-12
    )
    mean = pairwise_loss(logprobs, mask, rollouts, pairs, beta=0.5, length_normalise=True).item()
    assert mean == pytest.approx(math.log(1 + math.exp(-0.5)), abs=1e-12)


def test_no_pair_is_a_zero_with_a_gradient() -> None:
    logprobs = torch.zeros(2, 1, requires_grad=True)
    loss = pairwise_loss(
        logprobs, torch.ones(2, 1).bool(), torch.arange(2), torch.zeros(0, 2).long()
    )
    loss.sum().backward()
    assert loss.shape == (0,) and not logprobs.grad.any()


@each("seed", range(3))
@each("length_normalise", [False, True])
@each("beta", [0.1, 2.0])
@each("selector", SELECTORS.values(), ids=SELECTORS)
def test_the_advantage_has_the_gradient_of_the_loss(
    selector, beta: float, length_normalise: bool, seed: int
) -> None:
    """Σ weights × reinforce at the old policy, against autograd of the mean loss of a pair; garbage
    stands under the mask."""
    given = _batch(seed)
    mask, numbers = given["response_mask"], {"beta": beta, "length_normalise": length_normalise}
    leaf = given["logprobs_old"].where(mask, NAN).requires_grad_()
    pairs = selector(_trained(given), given["group_ids"])
    (expected,) = torch.autograd.grad(
        pairwise_loss(leaf, mask, given["rollout_ids"], pairs, **numbers).mean(), leaf
    )
    advantages = pairwise(
        **given | {"logprobs_old": leaf.detach()}, **numbers, pair_selector=selector
    )
    weights = mask.double() / len(
        given["rollout_ids"].unique()
    )  # those of sequence_sum, which are float32
    assert torch.equal(weights.float(), sequence_sum(mask, given["rollout_ids"], constant=1.0))
    loss = (weights * reinforce(fill_masked(leaf, mask, 0.0), advantages)).sum()
    (got,) = torch.autograd.grad(loss, leaf)
    assert expected.norm() > 0
    assert (got - expected).norm() <= 1e-12 * expected.norm()  # float64 rounding


def test_pairwise_by_hand() -> None:
    """Rewards 2, 1, 0, all of log-prob 0, β = 1: σ(0) = ½ a pair, 3 pairs of 3 rollouts: A = ½ + ½,
    ½ - ½, -½ - ½."""
    given = (torch.zeros(3, 2), torch.ones(3, 2).bool(), torch.arange(3))
    got = pairwise(torch.tensor([2.0, 1.0, 0.0]), torch.zeros(3).long(), *given, beta=1.0)
    assert got.tolist() == [[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]]
    per_token = pairwise(
        torch.tensor([2.0, 1.0, 0.0]),
        torch.zeros(3).long(),
        *given,
        beta=1.0,
        length_normalise=True,
    )
    assert per_token.tolist() == [[0.5, 0.5], [0.0, 0.0], [-0.5, -0.5]]


def test_a_pair_in_the_right_order_pulls_less() -> None:
    """σ(-β Δ): the policy has learned the one, and the other way round the pull goes towards β."""
    mask, rollouts, groups = torch.ones(2, 1).bool(), torch.arange(2), torch.zeros(2).long()
    right = pairwise(
        torch.tensor([1.0, 0.0]), groups, torch.tensor([[-1.0], [-9.0]]), mask, rollouts, beta=1.0
    )
    wrong = pairwise(
        torch.tensor([0.0, 1.0]), groups, torch.tensor([[-1.0], [-9.0]]), mask, rollouts, beta=1.0
    )
    assert 0 < right[0, 0] < 0.001 and 1.999 < wrong[1, 0] < 2  # N/P is 2


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_advantages_of_a_group_sum_to_zero_and_rollouts_in_no_pair_have_none(selector) -> None:
    given = _batch()
    got = pairwise(**given, pair_selector=selector)
    first = torch.stack([got[given["rollout_ids"] == rollout][0, 0] for rollout in range(7)])
    assert first[:5].sum().item() == pytest.approx(0, abs=1e-12) and first[
        5:
    ].sum().item() == pytest.approx(0, abs=1e-12)
    assert not first[3] and not first[4]  # unscored, and without a trained token


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_padding_and_garbage_change_no_bit(selector) -> None:
    given = _batch()
    got = pairwise(**given, pair_selector=selector)
    for garbage in (NAN, float("inf"), -1e300):
        dirty = given["logprobs_old"].where(given["response_mask"], garbage)
        assert torch.equal(pairwise(**given | {"logprobs_old": dirty}, pair_selector=selector), got)
    wide = {n: pad(v, (0, 3)) if v.dim() == 2 else v for n, v in given.items()}
    torch.testing.assert_close(
        pairwise(**wide, pair_selector=selector)[:, :8], got, rtol=0, atol=1e-14
    )  # sums in another order


def test_no_pair_and_no_token_give_zeros() -> None:
    given = _batch()
    for change in (
        {"rewards": torch.full((8,), 0.5)},
        {"response_mask": torch.zeros(10, 8).bool()},
    ):
        got = pairwise(**given | change)
        assert got.shape == (10, 8) and not got.any()


@pytest.mark.parametrize("beta", [0.0, -0.1, NAN, float("inf")])
def test_beta_is_checked(beta: float) -> None:
    given = _batch()
    with pytest.raises(ValueError, match=r"beta is .*; allowed: > 0"):
        pairwise(**given, beta=beta)
    with pytest.raises(ValueError, match=r"beta is .*; allowed: > 0"):
        pairwise_loss(
            given["logprobs_old"],
            given["response_mask"],
            given["rollout_ids"],
            torch.tensor([[0, 1]]),
            beta=beta,
        )
