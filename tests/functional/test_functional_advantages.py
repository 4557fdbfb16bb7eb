"""Advantages of whole rollouts: by hand, against loops, and the laws that all of them obey."""

import inspect
import statistics
from functools import partial

import pytest
import torch
from torch import Tensor

from rlkit.functional import batch_mean, group_mean, group_norm, leave_one_out, raw

NAN = float("nan")
OPTIONS = {
    "raw": raw,
    "batch_mean": batch_mean,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "group_norm": group_norm,
    "group_norm population": partial(group_norm, std="population", eps=0.0),
}
CENTRED = [name for name in OPTIONS if name != "raw"]
# name → (scores of its group, of the whole batch, own position in the group) → advantage
LOOPS = {
    "raw": lambda group, batch, i: group[i],
    "batch_mean": lambda group, batch, i: group[i] - statistics.fmean(batch),
    "group_mean": lambda group, batch, i: group[i] - statistics.fmean(group),
    "leave_one_out": lambda group, batch, i: group[i] - statistics.fmean(group[:i] + group[i + 1 :]) if len(group) > 1 else 0.0,
    "group_norm": lambda group, batch, i: (
        (group[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4) if len(group) > 1 else 0.0
    ),
    "group_norm population": lambda group, batch, i: (
        (group[i] - statistics.fmean(group)) / statistics.pstdev(group) if len(set(group)) > 1 else 0.0
    ),
}


def _call(name: str, rewards: Tensor, group_ids: Tensor) -> Tensor:
    option = OPTIONS[name]
    wants_groups = "group_ids" in inspect.signature(option).parameters
    return option(rewards, group_ids) if wants_groups else option(rewards)


def _random(seed: int = 0) -> tuple[Tensor, Tensor]:
    """40 rollouts of 8 prompts of uneven size, unsorted, three of them unscored."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    rewards[[3, 17, 30]] = NAN
    group_ids = torch.randint(8, (40,), generator=generator) * 100 - 300
    return rewards, group_ids


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # rewards 1, 0, 0, 3 of prompt 4 (mean 1) and 5, nan, 7 of prompt 2 (mean 6); batch mean 16 / 6 = 8/3
        ("raw", [1, 0, 0, 3, 5, 0, 7]),
        ("batch_mean", [-5 / 3, -8 / 3, -8 / 3, 1 / 3, 7 / 3, 0, 13 / 3]),
        ("group_mean", [0, -1, -1, 2, -1, 0, 1]),
        # n/(n-1) is 4/3 and 2/1: 1 - (0+0+3)/3 = 0, 0 - 4/3, 3 - 1/3 = 8/3; 5 - 7 = -2
        ("leave_one_out", [0, -4 / 3, -4 / 3, 8 / 3, -2, 0, 2]),
        # squares 0+1+1+4 = 6: sample std √2, population √1.5; 1+1 = 2: sample √2, population 1
        ("group_norm", [0, -0.70706, -0.70706, 1.41411, -0.70706, 0, 0.70706]),  # 1 / (1.41421 + 0.0001) = 0.70706
        ("group_norm population", [0, -0.81650, -0.81650, 1.63299, -1, 0, 1]),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0, 5.0, NAN, 7.0])
    got = _call(name, rewards, torch.tensor([4, 4, 4, 4, 2, 2, 2]))
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-5)  # the table has five decimals


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", OPTIONS)
def test_against_a_loop(name: str, seed: int) -> None:
    rewards, group_ids = _random(seed)
    got = _call(name, rewards, group_ids).tolist()
    scored = [i for i in range(40) if rewards[i] == rewards[i]]
    batch = rewards[scored].tolist()
    for i in range(40):
        if i not in scored:
            assert got[i] == 0.0
            continue
        members = [j for j in scored if group_ids[j] == group_ids[i]]
        expected = LOOPS[name](rewards[members].tolist(), batch, members.index(i))
        assert got[i] == pytest.approx(expected, abs=1e-12)  # float64 rounding of sums of at most 40 terms


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("name", CENTRED)
def test_equal_rewards_give_exactly_zero(name: str, value: float, dtype: torch.dtype) -> None:
    """0.1 + 0.1 + 0.1 is not 3 × 0.1 in floating point, and an epsilon of 1e-9 would blow the difference up."""
    assert not _call(name, torch.full((3,), value, dtype=dtype), torch.zeros(3, dtype=torch.int64)).any()


@pytest.mark.parametrize("name", CENTRED)
def test_a_lone_rollout_gives_exactly_zero(name: str) -> None:
    """A group of one, and a group of which only one is scored: nothing to compare with. verl gives it its reward."""
    assert not _call(name, torch.tensor([5.0]), torch.tensor([0])).any()
    assert not _call(name, torch.tensor([5.0, NAN]), torch.tensor([0, 0])).any()


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_scored_gives_zeros(name: str) -> None:
    assert _call(name, torch.full((3,), NAN), torch.tensor([0, 0, 1])).tolist() == [0.0, 0.0, 0.0]
    assert _call(name, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_unscored_rollout_changes_nobody(name: str) -> None:
    rewards, group_ids = _random()
    scored = ~rewards.isnan()
    without = _call(name, rewards[scored], group_ids[scored])
    assert torch.equal(_call(name, rewards, group_ids)[scored], without)


@pytest.mark.parametrize("name", OPTIONS)
def test_order_and_names_of_groups_do_not_matter(name: str) -> None:
    rewards, group_ids = _random()
    got = _call(name, rewards, group_ids)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    close = {"rtol": 0, "atol": 1e-13}  # sums in another order: float64 rounding
    torch.testing.assert_close(_call(name, rewards[order], group_ids[order]), got[order], **close)
    torch.testing.assert_close(_call(name, rewards, 5 - group_ids), got, **close)


@pytest.mark.parametrize("name", CENTRED)
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    rewards, group_ids = _random()
    shifted = _call(name, rewards + 64.0, group_ids)
    torch.testing.assert_close(shifted, _call(name, rewards, group_ids), rtol=0, atol=1e-12)  # rounding of 64 + R


@pytest.mark.parametrize(
    ("name", "power"),
    [("raw", 1), ("batch_mean", 1), ("group_mean", 1), ("leave_one_out", 1), ("group_norm population", 0)],
)
def test_units(name: str, power: int) -> None:
    """Rewards in other units: the advantage scales along, or not at all once standardised (with eps = 0)."""
    rewards, group_ids = _random()
    scaled = _call(name, rewards * 8, group_ids)
    torch.testing.assert_close(scaled, _call(name, rewards, group_ids) * 8.0**power, rtol=1e-12, atol=0)  # float64


def test_leave_one_out_is_the_group_mean_stretched() -> None:
    """RLOO = n/(n-1) × (R - mean), n the scored rollouts of the group: 4 and 3 here."""
    rewards = torch.tensor([1.0, 0.5, 0.0, 3.0, 5.0, NAN, 7.0, 1.0], dtype=torch.float64)
    group_ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    n = torch.tensor([4.0] * 4 + [3.0] * 4, dtype=torch.float64)
    expected = n / (n - 1) * group_mean(rewards, group_ids)
    torch.testing.assert_close(leave_one_out(rewards, group_ids), expected, rtol=1e-14, atol=0)  # float64 rounding


@pytest.mark.parametrize("name", OPTIONS)
def test_dtype_is_kept(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert _call(name, torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([0, 0])).dtype == dtype


def test_hyperparameters_are_checked() -> None:
    rewards, group_ids = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match=r"std is 'biased'; allowed: sample or population"):
        group_norm(rewards, group_ids, std="biased")  # type: ignore[arg-type]
    for eps in (-1e-4, NAN):
        with pytest.raises(ValueError, match=r"eps is .*; allowed: ≥ 0"):
            group_norm(rewards, group_ids, eps=eps)
