"""Advantages of whole rollouts: by hand, against loops, and the laws that all of them obey."""

import inspect
import itertools
import math
import statistics
from functools import partial

import pytest
import torch
from torch import Tensor

from parametrise import each
from rlkit.functional import (
    batch_mean,
    best_minus_second,
    gdpo,
    gpg,
    group_mean,
    leave_one_out,
    length_weighted,
    max_rl,
    normalize_group,
    pass_at_k_advantage,
    raw,
)

NAN = float("nan")


def _group_norm(rewards: Tensor, group_ids: Tensor, *, advantage=group_mean, **numbers) -> Tensor:
    """GRPO's advantage and verl's `grpo_passk`: two parts of rlkit, each rollout being one row of
    one token."""
    rows = advantage(rewards, group_ids).unsqueeze(1)
    return normalize_group(rows, rewards, group_ids, torch.arange(len(rewards)), **numbers).squeeze(
        1
    )


OPTIONS = {
    "raw": raw,
    "batch_mean": batch_mean,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "group_norm": _group_norm,
    "group_norm population": partial(_group_norm, std="population", eps=0.0),
    "length_weighted": length_weighted,
    "gpg": gpg,
    "gdpo": lambda rewards, group_ids: gdpo({"one": rewards}, group_ids),
    "max_rl": max_rl,
    "pass_at_k": partial(pass_at_k_advantage, k=3),
    "best_minus_second": best_minus_second,
    "best_minus_second normalized": partial(_group_norm, advantage=best_minus_second, eps=1e-6),
}
CENTRED = [name for name in OPTIONS if name != "raw"]
MOVABLE = [
    name for name in CENTRED if name not in ("max_rl", "pass_at_k")
]  # these two know where 0 or "correct" is


def _length(i: int) -> int:
    """Of rollout i, where a test gives none."""
    return 1 + i * i % 7


def _pass_at_k(group: list[float], i: int, k: int) -> float:
    """By going through all subsets, as the definition has it: their reward, standardised, averaged
    over those with i."""
    subsets = list(itertools.combinations(range(len(group)), min(k, len(group))))
    best = {s: float(any(group[j] > 0.5 for j in s)) for s in subsets}
    mean = statistics.fmean(best.values())
    deviation = statistics.pstdev(best.values())
    return (
        statistics.fmean((best[s] - mean) / deviation for s in subsets if i in s)
        if deviation
        else 0.0
    )


def _best_minus_second(group: list[float], i: int) -> float:
    """The best of all less the best without i."""
    return max(group) - max(group[:i] + group[i + 1 :]) if len(group) > 1 else 0.0


# name → (scores of its group, of the whole batch, own position in the group) → advantage
LOOPS = {
    "raw": lambda group, batch, i: group[i],
    "batch_mean": lambda group, batch, i: group[i] - statistics.fmean(batch),
    "group_mean": lambda group, batch, i: group[i] - statistics.fmean(group),
    "leave_one_out": lambda group, batch, i: (
        group[i] - statistics.fmean(group[:i] + group[i + 1 :]) if len(group) > 1 else 0.0
    ),
    "group_norm": lambda group, batch, i: (
        (group[i] - statistics.fmean(group)) / (statistics.stdev(group) + 1e-4)
        if len(group) > 1
        else 0.0
    ),
    "group_norm population": lambda group, batch, i: (
        (group[i] - statistics.fmean(group)) / statistics.pstdev(group)
        if len(set(group)) > 1
        else 0.0
    ),
    "max_rl": lambda group, batch, i: (
        group[i] / statistics.fmean(group) - 1
        if len(group) > 1 and statistics.fmean(group) > 0
        else 0.0
    ),
    "pass_at_k": lambda group, batch, i: _pass_at_k(group, i, 3),
    "best_minus_second": lambda group, batch, i: _best_minus_second(group, i),
    "best_minus_second normalized": lambda group, batch, i: (
        _best_minus_second(group, i) / (statistics.stdev(group) + 1e-6) if len(group) > 1 else 0.0
    ),
}


def _call(name: str, rewards: Tensor, group_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """With the quantities that the option asks for; lengths are those of the positions unless
    given."""
    given = {"rewards": rewards, "group_ids": group_ids, "lengths": lengths}
    if lengths is None:
        given["lengths"] = torch.tensor(
            [_length(i) for i in range(len(rewards))], dtype=torch.int64
        )
    return OPTIONS[name](
        **{n: given[n] for n in inspect.signature(OPTIONS[name]).parameters if n in given}
    )


def _random(seed: int = 0) -> tuple[Tensor, Tensor]:
    """40 rollouts of 8 prompts of uneven size, unsorted, three of them unscored."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    rewards[[3, 17, 30]] = NAN
    group_ids = torch.randint(8, (40,), generator=generator) * 100 - 300
    return rewards, group_ids


@each(
    ("name", "expected"),
    [
        # rewards 1, 0, 0, 3 of prompt 4 (mean 1) and 5, nan, 7 of prompt 2 (mean 6); batch mean 16
        # / 6 = 8/3
        ("raw", [1, 0, 0, 3, 5, 0, 7]),
        ("batch_mean", [-5 / 3, -8 / 3, -8 / 3, 1 / 3, 7 / 3, 0, 13 / 3]),
        ("group_mean", [0, -1, -1, 2, -1, 0, 1]),
        # n/(n-1) is 4/3 and 2/1: 1 - (0+0+3)/3 = 0, 0 - 4/3, 3 - 1/3 = 8/3; 5 - 7 = -2
        ("leave_one_out", [0, -4 / 3, -4 / 3, 8 / 3, -2, 0, 2]),
        # squares 0+1+1+4 = 6: sample std √2, population √1.5; 1+1 = 2: sample √2, population 1
        (
            "group_norm",
            [0, -0.70706, -0.70706, 1.41411, -0.70706, 0, 0.70706],
        ),  # 1 / (1.41421 + 0.0001) = 0.70706
        ("group_norm population", [0, -0.81650, -0.81650, 1.63299, -1, 0, 1]),
        # lengths 1, 2, 5, 3, 3, 5, 2: (1·1 + 3·3) / 11 = 10/11; (5·3 + 7·2) / 5 = 29/5
        ("length_weighted", [1 / 11, -10 / 11, -10 / 11, 23 / 11, -0.8, 0, 1.2]),
        ("gpg", [0, -1, -1, 2, -1, 0, 1]),  # both prompts have a signal: α is 1
        # the squares of group_norm add up to 4 · 0.49993 + 1.99971 = 3.99943, over 5: 0.89436 +
        # 0.0001
        ("gdpo", [0, -0.79049, -0.79049, 1.58097, -0.79049, 0, 0.79049]),
        (
            "max_rl",
            [0, -1, -1, 2, -1 / 6, 0, 1 / 6],
        ),  # the deviations 0, -1, -1, 2 over 1 and -1, 1 over 6
        (
            "pass_at_k",
            [0, 0, 0, 0, 0, 0, 0],
        ),  # every subset of 3 of 4 holds one of the two correct ones; of the pair both are
        ("best_minus_second", [0, 0, 0, 2, 0, 0, 2]),
        # 3 - 1 = 2 over √2 + 1e-6, 7 - 5 = 2 over √2 + 1e-6
        ("best_minus_second normalized", [0, 0, 0, 1.41421, 0, 0, 1.41421]),
    ],
)
def test_by_hand(name: str, expected: list[float]) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0, 5.0, NAN, 7.0])
    got = _call(name, rewards, torch.tensor([4, 4, 4, 4, 2, 2, 2]))
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float32), rtol=0, atol=1e-5
    )  # the table has five decimals


@pytest.mark.slow
@each("seed", range(5))
@each("name", LOOPS)
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
        assert got[i] == pytest.approx(
            expected, abs=1e-12
        )  # float64 rounding of sums of at most 40 terms


@each("dtype", [torch.float32, torch.float64])
@each("value", [0.0, 0.1, -1 / 3, 1e6 + 0.1])
@each("name", CENTRED)
def test_equal_rewards_give_exactly_zero(name: str, value: float, dtype: torch.dtype) -> None:
    """0.1 + 0.1 + 0.1 is not 3 × 0.1 in floating point, and an epsilon of 1e-9 would blow the
    difference up."""
    assert not _call(
        name, torch.full((3,), value, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    ).any()


@each("name", CENTRED)
def test_a_lone_rollout_gives_exactly_zero(name: str) -> None:
    """A group of one, and a group of which only one is scored: nothing to compare with. verl gives
    it its reward."""
    assert not _call(name, torch.tensor([5.0]), torch.tensor([0])).any()
    assert not _call(name, torch.tensor([5.0, NAN]), torch.tensor([0, 0])).any()


@each("name", OPTIONS)
def test_nothing_scored_gives_zeros(name: str) -> None:
    assert _call(name, torch.full((3,), NAN), torch.tensor([0, 0, 1])).tolist() == [0.0, 0.0, 0.0]
    assert _call(name, torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@each("name", OPTIONS)
def test_an_unscored_rollout_changes_nobody(name: str) -> None:
    rewards, group_ids = _random()
    scored = ~rewards.isnan()
    lengths = torch.tensor([_length(i) for i in range(40)])
    without = _call(name, rewards[scored], group_ids[scored], lengths[scored])
    assert torch.equal(_call(name, rewards, group_ids)[scored], without)


@each("name", OPTIONS)
def test_order_and_names_of_groups_do_not_matter(name: str) -> None:
    rewards, group_ids = _random()
    got = _call(name, rewards, group_ids)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    close = {"rtol": 0, "atol": 1e-13}  # sums in another order: float64 rounding
    lengths = torch.tensor([_length(i) for i in range(40)])
    torch.testing.assert_close(
        _call(name, rewards[order], group_ids[order], lengths[order]), got[order], **close
    )
    torch.testing.assert_close(_call(name, rewards, 5 - group_ids), got, **close)


@pytest.mark.parametrize("name", MOVABLE)
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    rewards, group_ids = _random()
    shifted = _call(name, rewards + 64.0, group_ids)
    torch.testing.assert_close(
        shifted, _call(name, rewards, group_ids), rtol=0, atol=1e-12
    )  # rounding of 64 + R


@pytest.mark.parametrize(
    ("name", "power"),
    [
        ("raw", 1),
        ("batch_mean", 1),
        ("group_mean", 1),
        ("leave_one_out", 1),
        ("gpg", 1),
        ("group_norm population", 0),
        ("length_weighted", 1),
        ("max_rl", 0),
        ("best_minus_second", 1),
    ],
)
def test_units(name: str, power: int) -> None:
    """Rewards in other units: the advantage scales along, or not at all once standardised (with eps
    = 0)."""
    rewards, group_ids = _random()
    scaled = _call(name, rewards * 8, group_ids)
    torch.testing.assert_close(
        scaled, _call(name, rewards, group_ids) * 8.0**power, rtol=1e-12, atol=0
    )  # float64


def test_leave_one_out_is_the_group_mean_stretched() -> None:
    """RLOO = n/(n-1) × (R - mean), n the scored rollouts of the group: 4 and 3 here."""
    rewards = torch.tensor([1.0, 0.5, 0.0, 3.0, 5.0, NAN, 7.0, 1.0], dtype=torch.float64)
    group_ids = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    n = torch.tensor([4.0] * 4 + [3.0] * 4, dtype=torch.float64)
    expected = n / (n - 1) * group_mean(rewards, group_ids)
    torch.testing.assert_close(
        leave_one_out(rewards, group_ids), expected, rtol=1e-14, atol=0
    )  # float64 rounding


@each("name", OPTIONS)
def test_dtype_is_kept(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert (
            _call(name, torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([0, 0])).dtype == dtype
        )


@pytest.mark.parametrize(
    ("option", "name", "value"),
    [(pass_at_k_advantage, "k", 0), (pass_at_k_advantage, "correct_above", NAN)],
)
def test_hyperparameters_of_group_options_are_checked(option, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*; allowed: "):
        option(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), **{name: value})


def test_length_weighted_by_hand_and_against_a_loop() -> None:
    """The loop is over groups of 40 random rollouts, three of them unscored; a group without a
    token counts them alike."""
    rewards, group_ids = _random()
    lengths = torch.randint(1, 100, (40,), generator=torch.Generator().manual_seed(2))
    got = length_weighted(rewards, group_ids, lengths)
    for i in range(40):
        members = [
            j for j in range(40) if group_ids[j] == group_ids[i] and rewards[j] == rewards[j]
        ]
        if i in members:
            weighted = sum(float(lengths[j] * rewards[j]) for j in members) / sum(
                int(lengths[j]) for j in members
            )
            assert float(got[i]) == pytest.approx(
                float(rewards[i]) - weighted, abs=1e-12
            )  # float64 sums of at most 40 terms
    zeros = torch.zeros(40, dtype=torch.int64)
    assert torch.equal(length_weighted(rewards, group_ids, zeros), group_mean(rewards, group_ids))


def test_length_weighted_with_equal_lengths_is_the_group_mean() -> None:
    rewards, group_ids = _random()
    got = length_weighted(rewards, group_ids, torch.full((40,), 17))
    torch.testing.assert_close(
        got, group_mean(rewards, group_ids), rtol=0, atol=1e-14
    )  # 17 x / 17: float64 rounding


def test_max_rl_of_a_group_without_reward_is_zero() -> None:
    """Mean 0, and a negative mean: nothing was learned of what is correct; dividing would turn the
    sign around."""
    rewards = torch.tensor([1.0, -1.0, 1.0, -3.0])
    assert max_rl(rewards, torch.tensor([0, 0, 1, 1])).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("n", "c", "k"), [(8, 1, 4), (8, 3, 4), (8, 5, 4), (6, 2, 1), (4, 1, 4), (5, 2, 9), (8, 4, 5)]
)
def test_pass_at_k_is_the_mean_over_all_subsets(n: int, c: int, k: int) -> None:
    rewards = torch.tensor([1.0] * c + [0.0] * (n - c), dtype=torch.float64)
    got = pass_at_k_advantage(rewards, torch.zeros(n, dtype=torch.int64), k=k)
    expected = [_pass_at_k(rewards.tolist(), i, k) for i in range(n)]
    assert got.tolist() == pytest.approx(
        expected, abs=1e-12
    )  # float64 sums over at most 126 subsets
    if n - c >= k:  # as printed in the paper
        mean = 1 - math.comb(n - c, k) / math.comb(n, k)
        deviation = math.sqrt(mean * (1 - mean))
        assert got[0].item() == pytest.approx((1 - mean) / deviation, abs=1e-12)
        assert got[-1].item() == pytest.approx(
            (1 - mean - math.comb(n - c - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation,
            abs=1e-12,
        )


def test_pass_at_1_is_the_group_norm() -> None:
    rewards, group_ids = _random()
    binary = (rewards > 0.5).double().where(~rewards.isnan(), NAN)
    ours, theirs = (
        pass_at_k_advantage(rewards, group_ids, k=1),
        _group_norm(binary, group_ids, std="population", eps=0.0),
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)  # float64 rounding


def test_best_minus_second_of_two_that_share_the_best_place_is_zero() -> None:
    """Each is the other's second; the third is no matter. Without the tie it is, and an unscored
    rollout never."""
    groups = torch.zeros(4, dtype=torch.int64)
    assert best_minus_second(torch.tensor([2.0, 0.5, 2.0, NAN]), groups).tolist() == [0.0] * 4
    assert best_minus_second(torch.tensor([2.0, 0.5, 1.0, NAN]), groups).tolist() == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]


def test_gpg_by_hand() -> None:
    """Of seven scored rollouts three are in a group with spread: α = 7/3. The unscored one counts
    nowhere."""
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 1.0, NAN, 5.0], dtype=torch.float64)
    got = gpg(rewards, torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]))
    assert got.tolist() == pytest.approx([0, 0, 0, -14 / 9, 7 / 9, 7 / 9, 0, 0], abs=1e-15)


def test_gpg_is_not_diluted_by_groups_without_a_signal() -> None:
    """The mean over all rollouts stays that of the groups with one, where α is 1: there GPG is the
    group mean."""
    rewards, group_ids = (
        torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64),
        torch.tensor([0, 0, 1, 1]),
    )
    score = torch.tensor([0.3, 0.7, -0.2, 0.4], dtype=torch.float64)
    assert torch.equal(gpg(rewards, group_ids), group_mean(rewards, group_ids))
    more, groups = (
        torch.cat([rewards, torch.ones(6, dtype=torch.float64)]),
        torch.cat([group_ids, torch.full((6,), 2)]),
    )
    diluted = gpg(more, groups)
    assert (diluted[:4] * score).sum() / 10 == pytest.approx(
        float((group_mean(rewards, group_ids) * score).mean()), abs=1e-15
    )


def test_gdpo_refuses_an_unknown_component_of_any_weight() -> None:
    with pytest.raises(ValueError, match=r"weights is .*typo.*names of right"):
        gdpo({"right": torch.ones(2)}, torch.zeros(2).long(), weights={"right": 1.0, "typo": 0.0})


def test_gdpo_reads_every_component_on_its_own_scale() -> None:
    """A component in other units, or with a constant added, moves nothing; a weight does, and one
    of 0 takes it out, nan included."""
    generator = torch.Generator().manual_seed(0)
    right, short = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    groups = torch.arange(12) // 4
    got = gdpo({"right": right, "short": short}, groups, eps=0.0)
    torch.testing.assert_close(
        gdpo({"right": right, "short": 1000 * short - 7}, groups, eps=0.0), got, rtol=0, atol=1e-10
    )
    assert got.mean().abs() < 1e-15 and got.std() == pytest.approx(1, abs=1e-12)
    alone = gdpo({"right": right}, groups)
    assert torch.equal(
        gdpo({"right": right, "short": short * NAN}, groups, weights={"right": 1.0, "short": 0.0}),
        alone,
    )
    assert not torch.allclose(
        got,
        gdpo(
            {"right": right, "short": short}, groups, weights={"right": 1.0, "short": 0.1}, eps=0.0
        ),
    )
    with pytest.raises(ValueError, match=r"weights is .*; allowed: names of right, short"):
        gdpo({"right": right, "short": short}, groups, weights={"rihgt": 1.0})
    with pytest.raises(ValueError, match="eps is -1; allowed"):
        gdpo({"right": right}, groups, eps=-1)
