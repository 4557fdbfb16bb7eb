"""Weights of tokens in the loss: by hand, against loops, and their laws over the table of
options."""

import inspect
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import Tensor

from parametrise import each
from rlkit.functional import prompt_mean, sequence_mean, sequence_sum, token_mean

OPTIONS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": partial(sequence_sum, constant=16),
    "prompt_mean": prompt_mean,
}
NORMALISED = ["token_mean", "sequence_mean", "prompt_mean"]
MASK = torch.tensor(
    [[1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool
)
ROLLOUTS = torch.tensor(
    [0, 1, 0, 2, 3]
)  # rollout 0 fills rows 0 and 2 (6 tokens); 1 has 2, 2 has 1, 3 has none
GROUPS = torch.tensor([8, 8, -1, -1])  # prompt 8: 8 tokens, prompt -1: 1 token


def _call(name: str, response_mask: Tensor, rollout_ids: Tensor, group_ids: Tensor) -> Tensor:
    given = {"response_mask": response_mask, "rollout_ids": rollout_ids, "group_ids": group_ids}
    return OPTIONS[name](
        **{k: given[k] for k in inspect.signature(OPTIONS[name]).parameters if k in given}
    )


def _random(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """24 rows of 15 rollouts of 5 prompts; some rollouts have several rows, some no token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(24, 9, generator=generator) < 0.4
    rollouts = torch.randint(15, (24,), generator=generator)
    rollouts[0] = 14
    mask[rollouts == rollouts[5]] = False
    return mask, rollouts, torch.randint(5, (15,), generator=generator) * 7


@pytest.mark.parametrize(
    ("name", "per_row"),
    [
        ("token_mean", [1 / 9, 1 / 9, 1 / 9, 1 / 9]),  # 9 tokens
        (
            "sequence_mean",
            [1 / 18, 1 / 6, 1 / 18, 1 / 3],
        ),  # 3 rollouts with tokens: 1/(3·6), 1/(3·2), 1/(3·1)
        ("sequence_sum", [1 / 64, 1 / 64, 1 / 64, 1 / 64]),  # all 4 rollouts count: 1/(4·16)
        ("prompt_mean", [1 / 16, 1 / 16, 1 / 16, 1 / 2]),  # 2 prompts: 1/(2·8), 1/(2·1)
    ],
)
def test_by_hand(name: str, per_row: list[float]) -> None:
    expected = MASK * torch.tensor([*per_row, 0.0]).unsqueeze(-1)
    got = _call(name, MASK, ROLLOUTS, GROUPS)
    torch.testing.assert_close(
        got, expected, rtol=1e-6, atol=0
    )  # float32 rounding; 0 under the mask is exact


def _loop(name: str, mask: Tensor, rollouts: Tensor, groups: Tensor) -> list[float]:
    """loss = Σ w · l as the papers write it, as nested means over the loss l[i, t] = (t + 1)(i +
    2)."""
    per_rollout, per_prompt = defaultdict(list), defaultdict(list)
    for i, row in enumerate(mask.tolist()):
        per_rollout[int(rollouts[i])] += []
        for t, counts in enumerate(row):
            if counts:
                per_rollout[int(rollouts[i])].append((t + 1.0) * (i + 2.0))
                per_prompt[int(groups[rollouts[i]])].append((t + 1.0) * (i + 2.0))
    every = [loss for losses in per_rollout.values() for loss in losses]
    filled = [losses for losses in per_rollout.values() if losses]
    return {
        "token_mean": lambda: sum(every) / len(every),
        "sequence_mean": lambda: sum(sum(losses) / len(losses) for losses in filled) / len(filled),
        "sequence_sum": lambda: (
            sum(sum(losses) / 16 for losses in per_rollout.values()) / len(per_rollout)
        ),
        "prompt_mean": lambda: (
            sum(sum(losses) / len(losses) for losses in per_prompt.values()) / len(per_prompt)
        ),
    }[name]()


@each("seed", range(4))
@each("name", OPTIONS)
def test_against_nested_means(name: str, seed: int) -> None:
    mask, rollouts, groups = _random(seed)
    rows, columns = torch.arange(24.0).double().unsqueeze(-1) + 2, torch.arange(9.0).double() + 1
    got = (_call(name, mask, rollouts, groups).double() * rows * columns).sum().item()
    assert got == pytest.approx(
        _loop(name, mask, rollouts, groups), rel=1e-6
    )  # weights are float32


@pytest.mark.parametrize("name", NORMALISED)
def test_weights_sum_to_one(name: str) -> None:
    """Also where rollouts and prompts without a trained token are among them."""
    for seed in range(4):
        total = _call(name, *_random(seed)).double().sum().item()
        assert total == pytest.approx(
            1.0, abs=1e-6
        )  # each float32 weight is off by at most 6e-8 of itself
    assert _call(name, MASK[3:4], ROLLOUTS[3:4], GROUPS).sum() == 1.0  # a single token


def test_sequence_sum_sums_to_mean_length_over_constant() -> None:
    """9 tokens / 4 rollouts / 16."""
    assert _call("sequence_sum", MASK, ROLLOUTS, GROUPS).sum().item() == 9 / 64


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_trained_gives_zeros(name: str) -> None:
    """0 / 0 must not become nan: a batch may be masked away as a whole."""
    got = _call(name, torch.zeros_like(MASK), ROLLOUTS, GROUPS)
    assert torch.equal(got, torch.zeros(5, 4))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert _call(name, MASK[:0], nothing, nothing).shape == (0, 4)


@pytest.mark.parametrize("name", OPTIONS)
def test_padding_and_the_order_of_rows_do_not_matter(name: str) -> None:
    mask, rollouts, groups = _random(0)
    got = _call(name, mask, rollouts, groups)
    padded = _call(name, torch.nn.functional.pad(mask, (0, 5)), rollouts, groups)
    assert torch.equal(padded, torch.nn.functional.pad(got, (0, 5)))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    assert torch.equal(_call(name, mask[order], rollouts[order], groups), got[order])


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_that_a_rollout_fills_do_not_matter(name: str) -> None:
    """A rollout as one long row or as one row per step: every token weighs the same."""
    whole, rollouts, groups = (
        torch.ones(3, 6, dtype=torch.bool),
        torch.arange(3),
        torch.tensor([0, 0, 1]),
    )
    whole[1, 4:] = False
    split = whole.reshape(6, 3)
    got = _call(name, split, rollouts.repeat_interleave(2), groups)
    assert torch.equal(got.reshape(3, 6), _call(name, whole, rollouts, groups))


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_are_float32_and_zero_under_the_mask(name: str) -> None:
    mask, rollouts, groups = _random(2)
    got = _call(name, mask, rollouts, groups)
    assert got.dtype == torch.float32
    assert torch.equal(got > 0, mask)


def test_long_rollouts_keep_their_weight() -> None:
    """Length 1 against length 4,000: both rollouts have half of the loss."""
    mask = torch.zeros(2, 4000, dtype=torch.bool)
    mask[0, 0], mask[1] = True, True
    got = sequence_mean(mask, torch.tensor([0, 1])).double().sum(-1)
    assert got.tolist() == pytest.approx([0.5, 0.5], rel=1e-6)  # one float32 rounding of 1/8000


@pytest.mark.parametrize("constant", [0, -1.0, float("nan"), float("inf")])
def test_the_constant_is_checked(constant: float) -> None:
    with pytest.raises(ValueError, match=rf"constant is {constant}; allowed: > 0"):
        sequence_sum(MASK, ROLLOUTS, constant=constant)
