"""Group filters."""

import torch

from rlkit.functional import keep_all, mixed_groups

NAN = float("nan")


def test_keep_all_keeps_also_the_unscored() -> None:
    kept = keep_all(torch.tensor([1.0, NAN, 0.0]))
    assert kept.dtype == torch.bool
    assert kept.tolist() == [True, True, True]


def test_mixed_groups_by_hand() -> None:
    """Prompt 7: 1, 0, nan differ → kept whole. Prompt 3: 1, 1 equal. Prompt -2: one scored. Prompt 0: none scored."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 5.0, NAN, NAN])
    group_ids = torch.tensor([7, 3, 7, 3, 7, -2, -2, 0])
    assert mixed_groups(rewards, group_ids).tolist() == [True, False, True, False, True, False, False, False]


def test_mixed_groups_compares_exactly() -> None:
    """0.1 thrice has a standard deviation of 1e-17 in float64; one unit in the last place is a difference."""
    groups = torch.tensor([0, 0, 0, 1, 1])
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 1.0 + 2.0**-52], dtype=torch.float64)
    assert mixed_groups(rewards, groups).tolist() == [False, False, False, True, True]


def test_mixed_groups_of_negative_rewards() -> None:
    """Guards the start values of the maximum and the minimum."""
    assert mixed_groups(torch.tensor([-3.0, -3.0, -3.0, -4.0]), torch.tensor([0, 0, 1, 1])).tolist() == [False] * 2 + [True] * 2
    assert mixed_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
