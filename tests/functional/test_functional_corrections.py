"""Off-policy corrections between sampler and trainer."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from rlkit.functional import no_correction, sequence_correction, token_correction

MASK = torch.tensor([[True, True, False], [False, True, False], [True, True, True]])
ROLLOUTS = torch.tensor([1, 0, 1])  # the second rollout fills two rows
RATIOS = torch.tensor([[0.5, 3.0, 1.0], [1.0, 2.5, 1.0], [2.0, 1.0, 0.5]], dtype=torch.float64)
SAMPLER = torch.full((3, 3), -4.0, dtype=torch.float64)
OLD = SAMPLER + RATIOS.log()
BY_ROLLOUT = partial(sequence_correction, rollout_ids=ROLLOUTS)
PARTS = {"token": token_correction, "sequence": BY_ROLLOUT}
CLOSE = {"rtol": 0, "atol": 1e-14}  # float64 rounding


@pytest.mark.parametrize(
    "mode, expected",
    {
        "truncate": [[0.5, 2.0, 1.0], [1.0, 2.0, 1.0], [2.0, 1.0, 0.5]],
        "mask": [[0.5, 0.0, 1.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.5]],
    }.items(),
)
def test_tokens_by_hand(mode: str, expected: list[list[float]]) -> None:
    """The cap is 2 and a hair, since log and exp do not quite cancel at 2 itself."""
    got = token_correction(OLD, SAMPLER, MASK, cap=2.0 + 1e-12, mode=mode)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-12)


@pytest.mark.parametrize(
    "mode, expected",
    {
        "truncate": [[0.75, 2.6, 1.0], [1.0, 2.5, 1.0], [2.0, 1.0, 0.75]],
        "mask": [[0.0, 0.0, 1.0], [1.0, 2.5, 1.0], [2.0, 1.0, 0.0]],  # IcePop
    }.items(),
)
def test_a_floor_bounds_from_below(mode: str, expected: list[list[float]]) -> None:
    """Bounds 0.75 … 2.6. A ratio that is a bound itself is within."""
    got = token_correction(OLD, SAMPLER, MASK, cap=2.6, floor=0.75, mode=mode)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), **CLOSE)
    at = token_correction(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), cap=1.0, floor=1.0, mode=mode)
    assert at.item() == 1.0
    rollouts = BY_ROLLOUT(OLD, SAMPLER, MASK, cap=2.6, floor=1.6, mode="mask")  # rollout 0 has 2.5, rollout 1 has 1.5
    assert rollouts[MASK].tolist() == pytest.approx([0, 0, 2.5, 0, 0, 0])


@pytest.mark.parametrize("mode, of_the_first", {"truncate": 2.0, "mask": 0.0}.items())
def test_sequences_by_hand(mode: str, of_the_first: float) -> None:
    """Rollout 0: 2.5. Rollout 1, over its two rows: ½ · 3 · 2 · 1 · ½ = 1.5."""
    expected = torch.tensor([[1.5, 1.5, 1.0], [1.0, of_the_first, 1.0], [1.5, 1.5, 1.5]], dtype=torch.float64)
    torch.testing.assert_close(BY_ROLLOUT(OLD, SAMPLER, MASK, mode=mode), expected, **CLOSE)


def test_a_sequence_of_one_token_is_a_token() -> None:
    first = MASK & (torch.arange(3) == 1)
    for mode in ("truncate", "mask"):
        sequences = sequence_correction(OLD, SAMPLER, first, torch.arange(3), mode=mode)
        torch.testing.assert_close(sequences, token_correction(OLD, SAMPLER, first, mode=mode), **CLOSE)


def test_plain_importance_sampling_is_unbiased() -> None:
    """Without a cap E_μ[w f] = E_π[f], enumerated over five tokens; a cap can only take away."""
    generator = torch.Generator().manual_seed(0)
    old, sampler = (torch.randn(1, 5, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    f, everywhere = torch.randn(1, 5, generator=generator, dtype=torch.float64), torch.ones(1, 5, dtype=torch.bool)
    weights = token_correction(old, sampler, everywhere, cap=math.inf)
    torch.testing.assert_close((sampler.exp() * weights * f).sum(), (old.exp() * f).sum(), **CLOSE)
    assert (token_correction(old, sampler, everywhere, cap=1.0) < weights).any()
    assert (token_correction(old, sampler, everywhere, cap=1.0, mode="mask") <= token_correction(old, sampler, everywhere, cap=1.0)).all()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("name", PARTS)
def test_laws_of_every_correction(name: str, mode: str) -> None:
    """One where both agree and under the mask, whatever stands there; constants; finite and bounded at any log-ratio."""
    part = partial(PARTS[name], response_mask=MASK, mode=mode)
    assert torch.equal(part(SAMPLER, SAMPLER), no_correction(MASK).double())
    clean = part(OLD, SAMPLER)
    for garbage in (math.nan, math.inf, -math.inf, 1e4):
        assert torch.equal(part(OLD.where(MASK, garbage), SAMPLER.where(MASK, -garbage)), clean)
    leaf = OLD.clone().requires_grad_()
    assert not part(leaf, SAMPLER.clone().requires_grad_()).requires_grad
    for size in (1e4, -1e4, math.inf, -math.inf):
        got = part(torch.full((3, 3), size), torch.zeros(3, 3))
        assert ((got >= 0) & (got <= 2)).all()
    assert part(OLD.bfloat16(), SAMPLER.bfloat16()).dtype == torch.float32
    assert part(OLD.where(RATIOS != 0.5, math.nan), SAMPLER)[0, 0].isnan()  # a nan that counts stays visible


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(
    "given, words",
    [
        ({"cap": 0.0}, "cap is 0.0"),
        ({"cap": math.nan}, "cap is nan"),
        ({"mode": "clip"}, "mode is 'clip'; allowed: truncate"),
        ({"floor": 2.5}, "floor is 2.5; allowed: 0 … cap"),
    ],
)
def test_hyperparameters_are_checked(name: str, given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PARTS[name](OLD, SAMPLER, MASK, **given)


def test_a_rollout_without_a_trained_token_is_neutral() -> None:
    nothing: Tensor = torch.zeros_like(MASK)
    assert torch.equal(BY_ROLLOUT(OLD, SAMPLER, nothing), torch.ones(3, 3, dtype=torch.float64))
