"""Filters of groups and of tokens."""

import pytest
import torch

from parametrise import each
from rlkit.functional import (
    clip_cov,
    covariance_rank,
    every_token,
    keep_all,
    mixed_component,
    mixed_groups,
    top_entropy,
)

NAN = float("nan")


def test_keep_all_keeps_also_the_unscored() -> None:
    kept = keep_all(torch.tensor([1.0, NAN, 0.0]))
    assert kept.dtype == torch.bool
    assert kept.tolist() == [True, True, True]


def test_mixed_groups_by_hand() -> None:
    """Prompt 7: 1, 0, nan differ → kept whole. Prompt 3: 1, 1 equal. Prompt -2: one scored. Prompt
    0: none scored."""
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 5.0, NAN, NAN])
    group_ids = torch.tensor([7, 3, 7, 3, 7, -2, -2, 0])
    assert mixed_groups(rewards, group_ids).tolist() == [
        True,
        False,
        True,
        False,
        True,
        False,
        False,
        False,
    ]


def test_mixed_groups_compares_exactly() -> None:
    """0.1 thrice has a standard deviation of 1e-17 in float64; one unit in the last place is a
    difference."""
    groups = torch.tensor([0, 0, 0, 1, 1])
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 1.0 + 2.0**-52], dtype=torch.float64)
    assert mixed_groups(rewards, groups).tolist() == [False, False, False, True, True]


def test_mixed_groups_of_negative_rewards() -> None:
    """Guards the start values of the maximum and the minimum."""
    assert (
        mixed_groups(torch.tensor([-3.0, -3.0, -3.0, -4.0]), torch.tensor([0, 0, 1, 1])).tolist()
        == [False] * 2 + [True] * 2
    )
    assert mixed_groups(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_every_token_is_the_mask() -> None:
    mask = torch.tensor([[True, False]])
    assert torch.equal(every_token(mask), mask)


def test_top_entropy_by_hand() -> None:
    """Six tokens over two rows: the 0.8 quantile of 1 … 6 is 5 exactly, the 0.75 quantile 4.75, the
    ½ quantile 3.5."""
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
        assert got.dtype == torch.bool and entropy[got].tolist() == sorted(
            kept, key=entropy[mask].tolist().index
        )


@each("n", [1, 2, 7, 11, 100, 101])
@each("fraction", [0.01, 0.2, 0.29, 0.3, 0.5, 0.9, 1.0])
def test_top_entropy_is_the_quantile_of_torch(n: int, fraction: float) -> None:
    """As TRL computes it; in float64 with a slack of 1e-9 for the rounding of 1 - fraction."""
    entropy = torch.rand(1, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    expected = entropy >= torch.quantile(entropy, 1 - fraction) - 1e-9
    assert torch.equal(
        top_entropy(entropy, torch.ones(1, n, dtype=torch.bool), fraction=fraction), expected
    )


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
    assert (
        top_entropy(entropy, torch.ones_like(entropy, dtype=torch.bool), fraction=1e-8).sum() == 1
    )


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, NAN])
def test_fractions_are_checked(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"fraction is {fraction}; allowed: "):
        top_entropy(torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), fraction=fraction)


def test_mixed_component_by_hand() -> None:
    """Prompt 0 has right and wrong answers; all of prompt 1 are right, and their format and length
    keep no group alive."""
    right = torch.tensor([1.0, 0.0, 1.0, 1.0, NAN])
    components = {"right": right, "format": torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5])}
    rewards, groups = right + components["format"], torch.tensor([0, 0, 1, 1, 1])
    assert mixed_groups(rewards, groups).tolist() == [True] * 5
    assert mixed_component(rewards, components, groups).tolist() == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert mixed_component(rewards, components, groups, component="format").tolist() == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert torch.equal(mixed_component(rewards, {}, groups), mixed_groups(rewards, groups))
    with pytest.raises(
        ValueError, match="component is 'rihgt'; allowed: one of right, format, or None"
    ):
        mixed_component(rewards, components, groups, component="rihgt")


def _covaried(n: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Advantages, log-probs, a mask and the rollouts of n rows of 6 tokens."""
    generator = torch.Generator().manual_seed(0)
    advantages, logprobs = (
        torch.randn(n, 6, generator=generator),
        -3 * torch.rand(n, 6, generator=generator),
    )
    return advantages, logprobs, torch.rand(n, 6, generator=generator) < 0.8, torch.arange(n) // 2


def test_clip_cov_by_hand() -> None:
    """A -1 1 0 and log π -5 -1 -6, means 0 and -4: 1, 3 and 0. Only 3 is strictly between 1 and 5;
    at least one token is drawn."""
    given = (
        torch.tensor([[-1.0, 1.0, 0.0]]),
        torch.tensor([[-5.0, -1.0, -6.0]]),
        torch.ones(1, 3).bool(),
        torch.tensor([0]),
    )
    assert clip_cov(*given).tolist() == [[True, False, True]]
    assert clip_cov(*given, low=3.0).tolist() == [[True, True, True]]
    assert clip_cov(*given, low=-1.0, share=1.0).tolist() == [[False, False, False]]
    for name, value in (("share", 1.1), ("share", NAN), ("low", 5.0)):
        with pytest.raises(ValueError, match=f"{name} is {value}; allowed: "):
            clip_cov(*given, **{name: value})


def test_clip_cov_draws_a_share_that_floats_round_down() -> None:
    """0.29 · 100 is 28.999…"""
    advantages = torch.arange(100.0)[None]
    given = (advantages, advantages / 100 - 1, torch.ones(1, 100).bool(), torch.tensor([0]))
    assert (~clip_cov(*given, share=0.29, low=-1e9, high=1e9)).sum() == 29


def test_clip_cov_draws_its_share_from_the_band() -> None:
    """So many of all trained tokens, evenly from the band, and the same ones whatever the order of
    rows or the padding."""
    advantages, logprobs, mask, rollouts = given = _covaried()
    kept = clip_cov(*given, share=0.05, low=0.5)
    left = mask & ~kept
    a, p = advantages[mask], logprobs[mask]
    covariance = (advantages - a.mean()) * (logprobs - p.mean())
    band = mask & (covariance > 0.5) & (covariance < 5)
    assert (
        int(left.sum()) == int(0.05 * mask.sum()) < band.sum()
        and not (left & ~band).any()
        and not (kept & ~mask).any()
    )
    assert (
        abs(covariance[left].mean() - covariance[band].mean()) < 0.15
    )  # a random sample of the band, not its top
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(1))
    assert torch.equal(clip_cov(*(x[order] for x in given), share=0.05, low=0.5), kept[order])
    wide = [torch.nn.functional.pad(x, (0, 3)) if x.dim() == 2 else x for x in given]
    assert torch.equal(clip_cov(*wide, share=0.05, low=0.5), torch.nn.functional.pad(kept, (0, 3)))
    other = clip_cov(advantages, logprobs - 1e-3, mask, rollouts, share=0.05, low=0.5)
    assert not torch.equal(other, kept)  # other log-probs draw others


def test_covariance_rank_by_hand() -> None:
    """Covariances 1, 3, 0 as above, and a token under the mask: a third of the tokens is above 1,
    none above 3."""
    given = (
        torch.tensor([[-1.0, 1.0, 0.0, NAN]]),
        torch.tensor([[-5.0, -1.0, -6.0, NAN]]),
        torch.tensor([[True, True, True, False]]),
    )
    assert covariance_rank(*given).tolist()[0] == pytest.approx([1 / 3, 0, 2 / 3, 1])
    nothing = covariance_rank(*given[:2], torch.zeros(1, 4).bool())
    assert nothing.tolist() == [[1.0] * 4]


def test_a_share_of_ranks_is_that_share_of_the_tokens() -> None:
    advantages, logprobs, mask, _ = _covaried()
    rank, n = covariance_rank(advantages, logprobs, mask), int(mask.sum())
    for share in (2e-4, 0.1, 0.5):
        assert (rank < share).sum() == -(-int(share * n * 1000) // 1000)  # rounded up
