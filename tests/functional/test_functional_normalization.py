"""Scales of advantages: by hand, with the advantages they belong to, and what takes no part in
them."""

import inspect
import math
import statistics
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from parametrise import each
from rlkit.functional import (
    group_mean,
    no_normalization,
    normalize_advantages,
    normalize_batch,
    normalize_group,
    reward_to_go,
    whiten,
)

NAN = float("nan")
CLOSE = {"rtol": 0, "atol": 1e-12}  # float64 rounding of sums of at most 40 terms
OPTIONS = {
    "none": no_normalization,
    "group": normalize_group,
    "group population": partial(normalize_group, std="population", eps=0.0),
    "batch": normalize_batch,
    "batch population": partial(normalize_batch, std="population", eps=0.0),
    "advantages": normalize_advantages,
    "whiten": whiten,
}


def _batch(seed: int = 0) -> dict[str, Tensor]:
    """9 rows of 7 positions of 6 rollouts of 2 prompts; rollout 1 is unscored, row 3 has no
    token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 7, generator=generator) < 0.6
    mask[3] = False
    rewards = torch.randn(6, generator=generator, dtype=torch.float64)
    rewards[1] = NAN
    return {
        "advantages": torch.randn(9, 7, generator=generator, dtype=torch.float64),
        "rewards": rewards,
        "group_ids": torch.tensor([3, 3, 3, 8, 8, 8]),
        "rollout_ids": torch.tensor([0, 1, 2, 3, 2, 4, 4, 2, 5]),
        "response_mask": mask,
    }


def _call(option, given: dict[str, Tensor], **numbers) -> Tensor:
    return option(
        **{n: given[n] for n in inspect.signature(option).parameters if n in given}, **numbers
    )


def _rows(advantages: Tensor) -> Tensor:
    """[N] → [N, 1], a row a rollout."""
    return advantages.unsqueeze(1)


def test_two_rollouts_under_the_group_are_one_over_root_two() -> None:
    """Rewards 0 and 1, sample deviation 1/√2: ±½ · √2 = ±1/√2; with the population's ½: ±1."""
    rewards, groups, rollouts = (
        torch.tensor([1.0, 0.0], dtype=torch.float64),
        torch.zeros(2).long(),
        torch.arange(2),
    )
    rows = _rows(group_mean(rewards, groups))
    half = 1 / math.sqrt(2)
    sample = normalize_group(rows, rewards, groups, rollouts, eps=0.0)
    torch.testing.assert_close(
        sample, torch.tensor([[half], [-half]], dtype=torch.float64), **CLOSE
    )
    assert normalize_group(rows, rewards, groups, rollouts, std="population", eps=0.0).tolist() == [
        [1.0],
        [-1.0],
    ]


def test_group_and_batch_by_hand() -> None:
    """Groups (0, 1) and (0, 2), sample deviations 1/√2 and √2; all four: mean ¾, squares 2.75,
    deviation √(2.75 / 3)."""
    rewards, groups = (
        torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=torch.float64),
        torch.tensor([5, 5, 2, 2]),
    )
    advantages = torch.tensor(
        [[3.0, 7.0], [1.0, 1.0], [2.0, 0.0], [-4.0, 1.0]], dtype=torch.float64
    )
    got = normalize_group(advantages, rewards, groups, torch.tensor([0, 3, 2, 1]), eps=0.5)
    scales = (
        torch.tensor(
            [[math.sqrt(0.5)], [math.sqrt(2)], [math.sqrt(2)], [math.sqrt(0.5)]],
            dtype=torch.float64,
        )
        + 0.5
    )
    torch.testing.assert_close(got, advantages / scales, **CLOSE)
    got = normalize_batch(advantages, rewards, eps=0.5)
    torch.testing.assert_close(got, advantages / (math.sqrt(2.75 / 3) + 0.5), **CLOSE)
    got = normalize_batch(advantages, rewards, std="population", eps=0.0)
    torch.testing.assert_close(got, advantages / math.sqrt(2.75 / 4), **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_scales_are_those_of_the_scored_rewards(seed: int) -> None:
    given = _batch(seed)
    rewards = [r if r == r else None for r in given["rewards"].tolist()]
    spread = [
        statistics.stdev(r for r in part if r is not None) + 1e-4
        for part in (rewards[:3], rewards[3:], rewards)
    ]
    per_row = torch.tensor(
        [spread[int(rollout >= 3)] for rollout in given["rollout_ids"]], dtype=torch.float64
    ).unsqueeze(1)
    torch.testing.assert_close(
        _call(normalize_group, given), given["advantages"] / per_row, **CLOSE
    )
    torch.testing.assert_close(
        _call(normalize_batch, given), given["advantages"] / spread[2], **CLOSE
    )


@pytest.mark.parametrize("option", [normalize_group, normalize_batch])
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.1, NAN, NAN], [NAN, NAN, NAN]])
def test_without_spread_nothing_is_divided(option, rewards: list[float]) -> None:
    """0.1 + 0.1 + 0.1 is not 3 × 0.1 in floating point; over an epsilon alone an advantage would
    grow ten-thousandfold."""
    given = {
        "advantages": torch.tensor([[2.0], [-1.0], [0.5]]),
        "rewards": torch.tensor(rewards),
        "rollout_ids": torch.arange(3),
    }
    assert torch.equal(
        _call(option, given | {"group_ids": torch.zeros(3).long()}), given["advantages"]
    )


def test_a_group_of_one_stays_as_it_is() -> None:
    given = {
        "advantages": torch.tensor([[2.0], [-1.0], [0.5]]),
        "rewards": torch.tensor([3.0, 0.0, 1.0]),
        "rollout_ids": torch.arange(3),
    }
    got = _call(
        normalize_group, given | {"group_ids": torch.tensor([0, 1, 1])}, std="population", eps=0.0
    )
    assert got.tolist() == [[2.0], [-2.0], [1.0]]


def test_normalize_advantages_by_hand() -> None:
    """Means 2, 0 and -2 of three rollouts, one of them of two rows; the fourth cannot be scored:
    deviation √(8 / 2) = 2."""
    advantages = torch.tensor(
        [[1.0, 9.0], [3.0, 9.0], [0.0, 0.0], [-2.0, NAN], [7.0, 7.0]], dtype=torch.float64
    )
    mask = torch.tensor([[True, False], [True, False], [True, True], [True, False], [True, True]])
    rewards, rollouts = (
        torch.tensor([1.0, 0.0, 0.0, NAN], dtype=torch.float64),
        torch.tensor([0, 0, 1, 2, 3]),
    )
    got = normalize_advantages(advantages, rewards, rollouts, mask, eps=0.5)
    assert got[mask].tolist() == pytest.approx([x / 2.5 for x in (1, 3, 0, 0, -2, 7, 7)])
    assert torch.equal(
        normalize_advantages(advantages[:1], rewards, rollouts[:1], mask[:1]), advantages[:1]
    )  # one rollout


def test_an_easy_prompt_does_not_widen_the_scale_of_the_advantages() -> None:
    """Rewards of one prompt raised by 10: the deviation of all rewards grows, that of their
    distance from the group's mean does not."""
    rewards, groups, rollouts = (
        torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=torch.float64),
        torch.tensor([5, 5, 2, 2]),
        torch.arange(4),
    )
    moved, mask = rewards + 10 * (groups == 2), torch.ones(4, 1).bool()
    scaled = [
        normalize_advantages(_rows(group_mean(r, groups)), r, rollouts, mask, eps=0.0)
        for r in (rewards, moved)
    ]
    torch.testing.assert_close(*scaled, **CLOSE)
    assert scaled[0].std() == pytest.approx(1)
    one, other = (normalize_batch(_rows(group_mean(r, groups)), r) for r in (rewards, moved))
    assert (one.abs() > 2 * other.abs()).all()


def test_whiten_by_hand() -> None:
    """1, 1 and 0: mean 2/3, variance (2/9 + 4/9) / 2 = ⅓; ⅓ / √⅓ = 0.57735, -⅔ / √⅓ = -1.1547."""
    mask = torch.tensor([[True, False, True], [False, True, False]])
    advantages = torch.tensor([[1.0, 9.0, 1.0], [NAN, 0.0, -9.0]])
    got = whiten(advantages, torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), mask)
    torch.testing.assert_close(
        got, torch.tensor([[0.57735, 0, 0.57735], [0, -1.1547, 0]]), rtol=0, atol=1e-5
    )  # five decimals


def test_reinforce_pp_is_reward_to_go_whitened() -> None:
    """γ = ½ on two tokens and one: returns ½, 1 and 0, mean ½, variance ¼: 0, 1 and -1."""
    mask = torch.tensor([[True, True], [True, False]])
    token_rewards, rollouts = (
        torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
        torch.tensor([0, 1]),
    )
    returns = reward_to_go(token_rewards, rollouts, torch.zeros(2, 2).long(), mask, gamma=0.5)
    got = whiten(returns, torch.tensor([1.0, 0.0]), rollouts, mask, eps=0.0)
    torch.testing.assert_close(got, torch.tensor([[0, 1], [-1, 0]], dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_whitened_tokens_have_mean_0_and_variance_1(seed: int) -> None:
    """Over the trained tokens of scored rollouts; also whatever the advantages' unit and origin
    are."""
    given = _batch(seed)
    got = _call(whiten, given)
    counts = given["response_mask"] & (given["rollout_ids"] != 1).unsqueeze(1)
    assert got[counts].mean().item() == pytest.approx(0, abs=1e-12) and got[
        counts
    ].var().item() == pytest.approx(1, abs=1e-6)  # eps is 1e-8
    assert not got[~counts].any()
    moved = _call(whiten, given | {"advantages": 8 * given["advantages"] + 64}, eps=0.0)
    torch.testing.assert_close(moved, _call(whiten, given, eps=0.0), **CLOSE)


def test_whitening_equal_advantages_one_token_and_none_gives_zeros() -> None:
    given = _batch()
    one = torch.zeros(9, 7, dtype=torch.bool)
    one[0, 2] = True
    for change in (
        {"advantages": torch.full((9, 7), 0.1)},
        {"rewards": torch.full((6,), NAN)},
        {"response_mask": torch.zeros(9, 7, dtype=torch.bool)},
        {"response_mask": one},
    ):
        assert not _call(whiten, given | change).any()


@pytest.mark.parametrize("name", OPTIONS)
def test_padding_garbage_and_the_order_of_rows_change_no_trained_token(name: str) -> None:
    given, option = _batch(), OPTIONS[name]
    mask, got = given["response_mask"], _call(OPTIONS[name], given)
    for garbage in (NAN, float("inf"), -1e300):
        assert torch.equal(
            _call(option, given | {"advantages": given["advantages"].where(mask, garbage)})[mask],
            got[mask],
        )
    wide = _call(option, {n: pad(v, (0, 4)) if v.dim() == 2 else v for n, v in given.items()})
    assert torch.equal(wide[:, :7], got)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    mixed = {
        n: v[order] if n in ("advantages", "rollout_ids", "response_mask") else v
        for n, v in given.items()
    }
    torch.testing.assert_close(_call(option, mixed), got[order], **CLOSE)


@each("dtype", [torch.bfloat16, torch.float32, torch.float64])
@each("name", OPTIONS)
def test_dtype_is_kept_and_an_empty_batch_stays_empty(name: str, dtype: torch.dtype) -> None:
    given = _batch()
    assert (
        _call(OPTIONS[name], given | {"advantages": given["advantages"].to(dtype)}).dtype == dtype
    )
    assert _call(OPTIONS[name], {n: v[:0] for n, v in given.items()}).shape == (0, 7)


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [(o, "std", "biased") for o in (normalize_group, normalize_batch)]
    + [
        (o, "eps", v)
        for o in (normalize_group, normalize_batch, normalize_advantages, whiten)
        for v in (-1e-4, NAN)
    ],
)
def test_hyperparameters_are_checked(option, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*; allowed: "):
        _call(option, _batch(), **{name: value})
