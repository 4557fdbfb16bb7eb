"""Filters of groups and of tokens."""

import pytest
import torch

from laws import each
from rlkit.functional import every_token, keep_all, mixed_groups, top_entropy

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


def test_every_token_is_the_mask() -> None:
    mask = torch.tensor([[True, False]])
    assert torch.equal(every_token(mask), mask)


def test_top_entropy_by_hand() -> None:
    """Six tokens over two rows: the 0.8 quantile of 1 … 6 is 5 exactly, the 0.75 quantile 4.75, the ½ quantile 3.5."""
    entropy = torch.tensor([[4.0, 9.0, 1.0, 6.0], [2.0, 5.0, 9.0, 3.0]])
    mask = entropy < 9
    for fraction, kept in (
        (0.2, [6.0, 5.0]),
        (0.25, [6.0, 5.0]),
        (0.5, [4.0, 6.0, 5.0]),
        (1e-6, [6.0]),
        (1.0, [4.0, 1.0, 6.0, 2.0, 5.0, 3.0]),
    ):
        got = top_entropy(entropy, mask, fraction=fraction)
        assert got.dtype == torch.bool and entropy[got].tolist() == sorted(kept, key=entropy[mask].tolist().index)


@each("n", [1, 2, 7, 11, 100, 101])
@each("fraction", [0.01, 0.2, 0.29, 0.3, 0.5, 0.9, 1.0])
def test_top_entropy_is_the_quantile_of_torch(n: int, fraction: float) -> None:
    """As TRL computes it; in float64 with a slack of 1e-9 for the rounding of 1 - fraction."""
    entropy = torch.rand(1, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = entropy >= torch.quantile(entropy, 1 - fraction) - 1e-9
    assert torch.equal(top_entropy(entropy, torch.ones(1, n, dtype=torch.bool), fraction=fraction), expected)


def test_top_entropy_keeps_ties_and_survives_garbage_and_nothing() -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    assert top_entropy(torch.ones(1, 5), mask).tolist() == mask.tolist()
    clean = top_entropy(torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0]]), mask)
    for garbage in (NAN, float("inf"), -float("inf")):
        assert torch.equal(top_entropy(torch.tensor([[1.0, 2.0, 3.0, 4.0, garbage]]), mask), clean)
    assert not top_entropy(torch.ones(1, 5), torch.zeros(1, 5, dtype=torch.bool)).any()


def test_top_entropy_of_a_nan_that_counts_keeps_it_visible() -> None:
    assert top_entropy(torch.tensor([[NAN, 1.0, 2.0]]), torch.ones(1, 3, dtype=torch.bool))[0, 0]


@pytest.mark.slow
def test_top_entropy_of_more_tokens_than_torch_quantile_takes() -> None:
    """2^24 + 1 of them; torch.quantile refuses."""
    entropy = torch.zeros(1, 2**24 + 1, dtype=torch.bfloat16)
    entropy[0, -1] = 1
    with pytest.raises(RuntimeError):
        entropy.float().quantile(0.8)
    assert top_entropy(entropy, torch.ones_like(entropy, dtype=torch.bool), fraction=1e-8).sum() == 1


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, NAN])
def test_fractions_are_checked(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"fraction is {fraction}; allowed: "):
        top_entropy(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), fraction=fraction)
