"""Off-policy corrections between sampler and trainer."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from rlkit.functional import (
    binary_kl,
    binary_kl_mask,
    divergence_mask,
    geometric_mask,
    interpolated_old,
    no_correction,
    product_correction,
    second_moment_mask,
    sequence_correction,
    token_correction,
)

MASK = torch.tensor([[True, True, False], [False, True, False], [True, True, True]])
ROLLOUTS = torch.tensor([1, 0, 1])  # the second rollout fills two rows
RATIOS = torch.tensor([[0.5, 3.0, 1.0], [1.0, 2.5, 1.0], [2.0, 1.0, 0.5]], dtype=torch.float64)
SAMPLER = torch.full((3, 3), -4.0, dtype=torch.float64)
OLD = SAMPLER + RATIOS.log()
ADVANTAGES = torch.tensor([[-1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, -1.0]])
BY_ROLLOUT = partial(sequence_correction, rollout_ids=ROLLOUTS)
PARTS = {"token": token_correction, "sequence": BY_ROLLOUT}
MASKS = {
    "geometric": partial(geometric_mask, rollout_ids=ROLLOUTS, low=0.5, high=0.5),
    "geometric fixed": partial(
        geometric_mask, rollout_ids=ROLLOUTS, low=0.1, high=0.1, scaled=False
    ),
    "k3": partial(divergence_mask, rollout_ids=ROLLOUTS, bound=0.3),
    "veto": partial(divergence_mask, rollout_ids=ROLLOUTS, estimator="k2", over="max", bound=0.5),
    "kpop": partial(binary_kl_mask, bound=0.02),
    "m2po": partial(second_moment_mask, advantages=ADVANTAGES, bound=0.4),
    "product": partial(
        product_correction,
        rollout_ids=ROLLOUTS,
        advantages=ADVANTAGES,
        parts={"weight": token_correction, "mask": partial(geometric_mask, low=0.5, high=0.5)},
    ),
}
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
    at = token_correction(
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
        cap=1.0,
        floor=1.0,
        mode=mode,
    )
    assert at.item() == 1.0
    rollouts = BY_ROLLOUT(
        OLD, SAMPLER, MASK, cap=2.6, floor=1.6, mode="mask"
    )  # rollout 0 has 2.5, rollout 1 has 1.5
    assert rollouts[MASK].tolist() == pytest.approx([0, 0, 2.5, 0, 0, 0])


@pytest.mark.parametrize("mode, of_the_first", {"truncate": 2.0, "mask": 0.0}.items())
def test_sequences_by_hand(mode: str, of_the_first: float) -> None:
    """Rollout 0: 2.5. Rollout 1, over its two rows: ½ · 3 · 2 · 1 · ½ = 1.5."""
    expected = torch.tensor(
        [[1.5, 1.5, 1.0], [1.0, of_the_first, 1.0], [1.5, 1.5, 1.5]], dtype=torch.float64
    )
    torch.testing.assert_close(BY_ROLLOUT(OLD, SAMPLER, MASK, mode=mode), expected, **CLOSE)


def test_a_sequence_of_one_token_is_a_token() -> None:
    first = MASK & (torch.arange(3) == 1)
    for mode in ("truncate", "mask"):
        sequences = sequence_correction(OLD, SAMPLER, first, torch.arange(3), mode=mode)
        torch.testing.assert_close(
            sequences, token_correction(OLD, SAMPLER, first, mode=mode), **CLOSE
        )


def test_plain_importance_sampling_is_unbiased() -> None:
    """Without a cap E_μ[w f] = E_π[f], enumerated over five tokens; a cap can only take away."""
    generator = torch.Generator().manual_seed(0)
    old, sampler = (
        torch.randn(1, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
        for _ in range(2)
    )
    f, everywhere = (
        torch.randn(1, 5, generator=generator, dtype=torch.float64),
        torch.ones(1, 5, dtype=torch.bool),
    )
    weights = token_correction(old, sampler, everywhere, cap=math.inf)
    torch.testing.assert_close((sampler.exp() * weights * f).sum(), (old.exp() * f).sum(), **CLOSE)
    assert (token_correction(old, sampler, everywhere, cap=1.0) < weights).any()
    assert (
        token_correction(old, sampler, everywhere, cap=1.0, mode="mask")
        <= token_correction(old, sampler, everywhere, cap=1.0)
    ).all()


EVERY = {
    f"{name} {mode}": partial(part, mode=mode)
    for name, part in PARTS.items()
    for mode in ("truncate", "mask", "keep")
} | MASKS


@pytest.mark.parametrize("name", EVERY)
def test_laws_of_every_correction(name: str) -> None:
    """One where both agree and under the mask, whatever stands there; constants; finite and bounded
    at any log-ratio."""
    part = partial(EVERY[name], response_mask=MASK)
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
    assert part(OLD.where(RATIOS != 0.5, math.nan), SAMPLER)[
        0, 0
    ].isnan()  # a nan that counts stays visible


@pytest.mark.parametrize("name", EVERY)
def test_neither_order_nor_split_of_rows_changes_a_factor(name: str) -> None:
    """Rows in another order; and each token in a row of its own, which the rollouts join again."""
    part = EVERY[name]
    bound = part.keywords if isinstance(part, partial) else {}
    keywords = {key: bound[key] for key in ("rollout_ids", "advantages") if key in bound}
    generator = torch.Generator().manual_seed(1)
    old = SAMPLER + 0.3 * torch.randn(3, 3, generator=generator, dtype=torch.float64)
    whole, order = part(old, SAMPLER, MASK), torch.tensor([2, 0, 1])
    shuffled = part(
        old[order], SAMPLER[order], MASK[order], **{k: v[order] for k, v in keywords.items()}
    )
    torch.testing.assert_close(shuffled, whole[order], **CLOSE)
    split = {
        k: v.reshape(9, 1) if v.dim() == 2 else v.repeat_interleave(3) for k, v in keywords.items()
    }
    rows = part(*(x.reshape(9, 1) for x in (old, SAMPLER, MASK)), **split)
    torch.testing.assert_close(rows.view(3, 3), whole, **CLOSE)


# rollout 0 has the ratio 2.5, rollout 1 ½ 3 2 1 ½: a mean log-ratio of 0.0811, times √5 0.1813
MASKS_BY_HAND = {
    "geometric": (partial(geometric_mask, rollout_ids=ROLLOUTS), "low high", 0.1813, 0.1814),
    "geometric fixed": (
        partial(geometric_mask, rollout_ids=ROLLOUTS, scaled=False),
        "low high",
        0.0810,
        0.0811,
    ),
    "mean k3": (
        partial(divergence_mask, rollout_ids=ROLLOUTS),
        "bound",
        0.3189,
        0.3190,
    ),  # (.1931 + .9014 + .3069 + 0 + .1931) / 5
    "worst k2": (
        partial(divergence_mask, rollout_ids=ROLLOUTS, estimator="k2", over="max"),
        "bound",
        0.6034,
        0.6035,
    ),  # ½ log² 3
}


@pytest.mark.parametrize("name", MASKS_BY_HAND)
def test_masks_of_rollouts_by_hand(name: str) -> None:
    """Rollout 1 is dropped whole just below its own value, and kept just above; rollout 0 is
    outside both but for the worst token."""
    part, names, below, above = MASKS_BY_HAND[name]
    for bound, kept in ((below, 0.0), (above, 1.0)):
        got = part(OLD, SAMPLER, MASK, **dict.fromkeys(names.split(), bound))
        assert (
            got[1, 1] == (name == "worst k2")
            and got[MASK & (ROLLOUTS == 1)[:, None]].tolist() == [kept] * 5
        )


def test_bounds_hold_at_equality() -> None:
    """Log-ratios of ¼, exact in binary."""
    old, sampler, everywhere, one = (
        torch.full((1, 4), -1.0),
        torch.full((1, 4), -1.25),
        torch.ones(1, 4).bool(),
        torch.tensor([0]),
    )
    rollouts = (old, sampler, everywhere, one)
    for part in (
        partial(geometric_mask, low=0.0, high=0.5),
        partial(geometric_mask, high=0.25, scaled=False),
        partial(divergence_mask, estimator="k2", bound=1 / 32),
        partial(divergence_mask, estimator="k2", over="max", bound=1 / 32),
    ):
        assert part(*rollouts).all()
        tighter = {
            name: part.keywords[name] * (1 - 1e-6)
            for name in ("high", "bound")
            if name in part.keywords
        }
        assert not part(*rollouts, **tighter).any()
    bound = binary_kl(old, sampler).maximum(binary_kl(sampler, old))[0, 0].item()
    assert binary_kl_mask(old, sampler, everywhere, bound=bound).all()
    assert not binary_kl_mask(old, sampler, everywhere, bound=bound * (1 - 1e-6)).any()
    up = torch.ones(1, 4)
    assert second_moment_mask(old, sampler, everywhere, up, bound=1 / 16).all()
    assert not second_moment_mask(old, sampler, everywhere, up, bound=1 / 16 * (1 - 1e-6)).any()


def test_a_scaled_band_keeps_the_same_share_at_every_length() -> None:
    """Log-ratios of standard deviation 0.02: ±0.001 keeps 18 % at 20 tokens and 89 % at 1,000;
    ±0.04 / √length keeps 95 % of both."""
    generator = torch.Generator().manual_seed(0)
    for length, fixed in ((20, 0.18), (1000, 0.89)):
        gaps = 0.02 * torch.randn(2000, length, generator=generator)
        given = (
            gaps,
            torch.zeros_like(gaps),
            torch.ones_like(gaps, dtype=torch.bool),
            torch.arange(2000),
        )
        assert geometric_mask(*given, low=0.001, high=0.001, scaled=False)[
            :, 0
        ].mean() == pytest.approx(fixed, abs=0.03)
        assert geometric_mask(*given, low=0.04, high=0.04)[:, 0].mean() == pytest.approx(
            0.954, abs=0.02
        )  # 2 sigma; 0.005 a deviation


def test_the_second_moment_by_hand() -> None:
    """The squares of the gaps are .25 .09 .04 .01 0, and a gap of 0 is in no trust region.

    All pushed further up: of .25 .09 .04 .01 two go, and the mean of the others is .025; with one
    gone it is .0467. At .05 one goes, at .02 three, at .1 (the mean of all is .0975) none. Ties go
    together.
    """
    gaps = torch.tensor([[0.5, 0.3, 0.2, 0.1, 0.0]], dtype=torch.float64)
    part = partial(
        second_moment_mask,
        logprobs_sampler=torch.zeros(1, 5),
        response_mask=torch.ones(1, 5).bool(),
    )
    for sign in (1.0, -1.0):
        pushed = partial(part, sign * gaps, advantages=torch.full((1, 5), sign))
        assert pushed(bound=0.04).tolist() == [[0, 0, 1, 1, 1]]
        assert pushed(bound=0.05).tolist() == [[0, 1, 1, 1, 1]]
        assert pushed(bound=0.02).tolist() == [[0, 0, 0, 1, 1]]
        assert pushed(bound=0.1).all()
        assert pushed(bound=0.0001).tolist() == [[0, 0, 0, 0, 1]]
    ties = torch.tensor([[0.5, 0.5, 0.2, 0.1, 0.0]])
    assert part(ties, advantages=torch.ones(1, 5), bound=0.11).tolist() == [
        [0, 0, 1, 1, 1]
    ]  # with one gone the mean is .1


def test_the_second_moment_masks_what_an_update_pushes_further_out() -> None:
    """Four quadrants with squares of 1: A > 0 with r > 1 and A < 0 with r < 1 go. The others pull
    back to the sampler and stay.

    The fifth token has no advantage and stays. Harmless outliers count in no mean: beside them .04
    is kept at a bound of .04.
    """
    gaps = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 0.0]])
    given = {"logprobs_sampler": torch.zeros(1, 5), "response_mask": torch.ones(1, 5).bool()}
    assert second_moment_mask(gaps, advantages=advantages, **given).tolist() == [[0, 0, 1, 1, 1]]
    small = torch.tensor([[0.125, -0.125, 9.0, -9.0, 9.0]], dtype=torch.float64)
    assert second_moment_mask(small, advantages=advantages, bound=0.125**2, **given).all()


def test_binary_kl_by_hand() -> None:
    """KL of (¾, ¼) to (¼, ¾): ½ log 3. Probabilities of 0 and 1 are finite."""
    a, b = (torch.tensor([p], dtype=torch.float64).log() for p in (0.75, 0.25))
    assert binary_kl(a, b).item() == pytest.approx(0.5 * math.log(3), rel=1e-14)
    assert all(
        binary_kl(torch.tensor([x]), torch.tensor([y])).isfinite()
        for x in (0.0, -math.inf)
        for y in (0.0, -math.inf)
    )


def test_a_product_multiplies_what_each_part_gives() -> None:
    """A weight and a mask of whole rollouts; parts get the quantities that they ask for, the
    advantages too."""
    parts = {
        "weight": partial(token_correction, mode="mask"),
        "band": partial(geometric_mask, low=0.2, high=0.2),
    }
    got = product_correction(OLD, SAMPLER, MASK, ROLLOUTS, ADVANTAGES, parts=parts)
    torch.testing.assert_close(
        got[MASK],
        torch.tensor([0.5, 0.0, 0.0, 2.0, 1.0, 0.5], dtype=torch.float64),
        rtol=0,
        atol=2e-12,
    )
    signed = product_correction(
        OLD,
        SAMPLER,
        MASK,
        ROLLOUTS,
        ADVANTAGES,
        parts={"mask": partial(second_moment_mask, bound=0.5)},
    )
    assert torch.equal(
        signed, second_moment_mask(OLD, SAMPLER, MASK, ADVANTAGES, bound=0.5).to(signed)
    )


def test_weights_over_their_mean() -> None:
    """By tokens, and by rollouts whatever their length; the mean is then 1."""
    tokens = token_correction(OLD, SAMPLER, MASK, cap=math.inf, normalise=True)
    torch.testing.assert_close(tokens[MASK], RATIOS[MASK] / 9.5 * 6, **CLOSE)
    rollouts = BY_ROLLOUT(OLD, SAMPLER, MASK, cap=math.inf, normalise=True)
    torch.testing.assert_close(
        rollouts[:2, 1], torch.tensor([1.5, 2.5], dtype=torch.float64) / 2, **CLOSE
    )
    assert (
        BY_ROLLOUT(OLD, SAMPLER, MASK, cap=1.2, floor=1.1, mode="mask", normalise=True)[
            MASK
        ].tolist()
        == [0.0] * 6
    )


def test_a_sequence_is_corrected_exactly_and_its_tokens_are_not() -> None:
    """Two tokens of three each, enumerated: Σ μ w R ∇log π is Σ π R ∇log π with the sequence's
    weight, off by 1 % with the tokens'."""
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(3, generator=generator).double(),
        torch.randn(3, 3, generator=generator).double(),
    )
    mu_first, mu_second = (
        x + 0.5 * torch.randn(x.shape, generator=generator).double() for x in (first, second)
    )
    rewards = torch.randn(9, generator=generator).double()
    cells = torch.cartesian_prod(torch.arange(3), torch.arange(3))

    def logs(one: Tensor, two: Tensor) -> Tensor:
        return torch.stack(
            [one.log_softmax(-1)[cells[:, 0]], two.log_softmax(-1)[cells[:, 0], cells[:, 1]]], 1
        )

    leaves = [first.requires_grad_(), second.requires_grad_()]
    new, sampler, everywhere = (
        logs(*leaves),
        logs(mu_first, mu_second),
        torch.ones(9, 2, dtype=torch.bool),
    )

    def gradient(share: Tensor) -> Tensor:
        found = torch.autograd.grad(
            (share * rewards[:, None] * new).sum(), leaves, retain_graph=True
        )
        return torch.cat([g.flatten() for g in found])

    exact, sampled = gradient(new.detach().sum(1).exp()[:, None]), sampler.sum(1).exp()[:, None]
    given = {"logprobs_old": new.detach(), "logprobs_sampler": sampler, "response_mask": everywhere}
    by_sequence = gradient(
        sampled * sequence_correction(**given, rollout_ids=torch.arange(9), cap=math.inf)
    )
    torch.testing.assert_close(by_sequence, exact, rtol=0, atol=1e-12)
    assert (
        gradient(sampled * token_correction(**given, cap=math.inf)) - exact
    ).norm() > 0.01 * exact.norm()


@pytest.mark.parametrize("versions", [1, 2, 5])
def test_an_interpolated_old_policy_splits_the_ratio(versions: int) -> None:
    """ρ · r = π / μ for every number of versions d, and r = (π / μ)^(1/d); the last of the d steps
    is the update's own."""
    share = torch.full((3, 3), (versions - 1) / versions, dtype=torch.float64)
    old = interpolated_old(OLD.where(MASK, math.nan), SAMPLER.where(MASK, math.nan), share, MASK)
    rho, ratio = (
        token_correction(*pair, MASK, cap=math.inf)[MASK] for pair in ((old, SAMPLER), (OLD, old))
    )
    torch.testing.assert_close(rho * ratio, RATIOS[MASK], rtol=1e-13, atol=0)
    torch.testing.assert_close(ratio, RATIOS[MASK] ** (1 / versions), rtol=1e-13, atol=0)
    assert (old[~MASK] == 0).all()


@pytest.mark.parametrize(
    "part, given, words",
    [
        (MASKS["geometric"], {"low": -1.0}, "low is -1.0"),
        (MASKS["k3"], {"estimator": "k1"}, "estimator is 'k1'; allowed: k2 or k3"),
        (MASKS["k3"], {"over": "sum"}, "over is 'sum'; allowed: mean or max"),
        (MASKS["k3"], {"bound": math.nan}, "bound is nan"),
        (MASKS["kpop"], {"bound": -1.0}, "bound is -1.0"),
        (MASKS["m2po"], {"bound": 0.0}, "bound is 0.0; allowed: > 0"),
    ],
)
def test_numbers_of_masks_are_checked(part, given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        part(OLD, SAMPLER, MASK, **given)


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
