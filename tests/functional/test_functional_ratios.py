"""The ratio of the policy over the policy before the update."""

import math

import pytest
import torch

from rlkit.functional import (
    clipped,
    rollout_mean,
    sequence_mean,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)

ONE = torch.tensor([[True]])


def test_by_hand() -> None:
    """p 0.3 → 0.6 doubles, 0.5 → 0.25 halves; under the mask it is 1 whatever stands there."""
    new = torch.tensor([[0.6, 0.25, 0.9]]).log()
    old = torch.tensor([[0.3, 0.5, 0.1]]).log()
    got = token_ratio(new, old, torch.tensor([[True, True, False]]))
    torch.testing.assert_close(
        got, torch.tensor([[2.0, 0.5, 1.0]]), rtol=1e-6, atol=0
    )  # float32 rounding
    assert got[0, 2] == 1.0


@pytest.mark.parametrize(
    ("log_ratio", "clamped"), [(1e4, 20.0), (-1e4, -20.0), (math.inf, 20.0), (19.0, 19.0)]
)
def test_clamped_at_20(log_ratio: float, clamped: float) -> None:
    """exp(1e4) overflows. Inside the clamp the gradient is the ratio, beyond it 0."""
    new = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    old = torch.full((1, 1), -log_ratio, dtype=torch.float64)
    ratio = token_ratio(new, old, ONE)
    ratio.backward()
    assert ratio.item() == pytest.approx(math.exp(clamped), rel=1e-14)  # float64 rounding of exp
    assert new.grad.item() == (ratio.item() if log_ratio == clamped else 0.0)


def test_nothing_flows_into_the_old_policy() -> None:
    new, old = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    token_ratio(new, old, ONE).sum().backward()
    assert old.grad is None
    assert new.grad.item() == 1.0


def test_a_nan_that_counts_stays_visible() -> None:
    """Only the mask hides: a broken log-prob of a trained token must reach the loss and stop the
    run."""
    assert token_ratio(torch.tensor([[math.nan]]), torch.zeros(1, 1), ONE).isnan().all()


def test_half_precision_is_widened_before_the_difference() -> None:
    new, old = (
        torch.tensor([[-1.0]], dtype=torch.bfloat16),
        torch.tensor([[-1.0078125]], dtype=torch.bfloat16),
    )
    ratio = token_ratio(new, old, ONE)
    assert ratio.dtype == torch.float32
    assert ratio.item() == pytest.approx(
        math.exp(0.0078125), rel=1e-6
    )  # 2^-7, exact in bfloat16; float32 rounding


SEQUENCE = {"sequence": sequence_ratio, "sequence_token": sequence_token_ratio}


def _rollouts(
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """6 rows of 5 positions: rollouts 0 and 1 fill two rows each, 2 has no trained token."""
    generator = torch.Generator().manual_seed(0)
    new, old = -torch.rand(2, 6, 5, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[2] = False
    return new, old, mask, torch.tensor([0, 1, 2, 1, 3, 0])


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_ratio_is_the_geometric_mean_over_all_rows_of_a_rollout(name: str) -> None:
    new, old, mask, rollout_ids = _rollouts()
    got = SEQUENCE[name](new, old, mask, rollout_ids)
    for rollout in range(4):
        rows = rollout_ids == rollout
        ratios = [math.exp(d) for d in (new - old)[rows][mask[rows]].tolist()]
        expected = math.prod(ratios) ** (1 / max(len(ratios), 1))
        assert got[rows][mask[rows]].tolist() == pytest.approx(
            [expected] * len(ratios), rel=1e-13
        )  # float64 rounding
    assert (got[~mask] == 1).all()


def test_a_row_alone_has_the_mean_of_its_own() -> None:
    """p ½ → 1 and ½ → ¼: √(2 · ½) = 1; ½ → 1 alone: 2."""
    new, old = torch.tensor([[1.0, 0.25], [1.0, 0.7]]).log(), torch.full((2, 2), 0.5).log()
    got = sequence_ratio(
        new, old, torch.tensor([[True, True], [True, False]]), torch.tensor([0, 1])
    )
    torch.testing.assert_close(
        got, torch.tensor([[1.0, 1.0], [2.0, 1.0]]), rtol=1e-6, atol=0
    )  # float32 rounding


def test_both_sequence_forms_have_one_value_and_in_the_loss_one_gradient() -> None:
    """With one advantage a rollout and sequence_mean, also where the clip binds; their gradients
    differ token by token before."""
    new, old, mask, rollout_ids = _rollouts()
    advantages = (
        torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)[rollout_ids]
        .unsqueeze(1)
        .expand(6, 5)
    )
    gradients, values = [], []
    for form in SEQUENCE.values():
        leaf = new.clone().requires_grad_()
        ratio = form(leaf, old, mask, rollout_ids)
        values.append(ratio.detach())
        loss = (
            sequence_mean(mask, rollout_ids).double()
            * clipped(ratio, advantages, clip_low=0.05, clip_high=0.05)
        ).sum()
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert torch.equal(*values)
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=0)  # the weights are float32
    binds = (
        clipped(values[0], advantages, clip_low=0.05, clip_high=0.05) != -values[0] * advantages
    )[mask]
    assert gradients[0].any() and binds.any() and not binds.all()


def test_gradients_of_the_sequence_forms() -> None:
    """∂s/∂logπ_u = s/|y| at every token of the rollout; ∂s_t/∂logπ_u = s at u = t alone."""
    new, old, mask, rollout_ids = _rollouts()
    for name, form in SEQUENCE.items():
        leaf = new.clone().requires_grad_()
        ratio = form(leaf, old, mask, rollout_ids)
        t = int(mask[0].nonzero()[0])
        (gradient,) = torch.autograd.grad(ratio[0, t], leaf)
        own = mask & (rollout_ids == 0).unsqueeze(1)
        expected = torch.zeros_like(leaf)
        if name == "sequence":
            expected[own] = ratio[0, t].item() / int(own.sum())
        else:
            expected[0, t] = ratio[0, t].item()
        torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)  # float64 rounding


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_forms_see_nothing_under_the_mask_and_no_old_policy(name: str) -> None:
    new, old, mask, rollout_ids = _rollouts()
    clean = SEQUENCE[name](new, old, mask, rollout_ids)
    for garbage in (math.nan, math.inf, -1e300):
        leaf, constant = (
            new.where(mask, garbage).requires_grad_(),
            old.where(mask, garbage).requires_grad_(),
        )
        got = SEQUENCE[name](leaf, constant, mask, rollout_ids)
        got.sum().backward()
        assert torch.equal(got.detach(), clean) and constant.grad is None
        assert leaf.grad[mask].all() and not leaf.grad[~mask].any()


@pytest.mark.parametrize("name", SEQUENCE)
@pytest.mark.parametrize(("log_ratio", "clamped"), [(1e4, 20.0), (-1e4, -20.0), (19.0, 19.0)])
def test_sequence_forms_are_finite(name: str, log_ratio: float, clamped: float) -> None:
    leaf = torch.full((1, 2), log_ratio, dtype=torch.float64, requires_grad=True)
    ratio = SEQUENCE[name](leaf, torch.zeros(1, 2), torch.ones(1, 2).bool(), torch.tensor([0]))
    ratio.sum().backward()
    assert ratio.tolist() == [
        pytest.approx([math.exp(clamped)] * 2, rel=1e-14)
    ]  # float64 rounding of exp
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_forms_widen_half_precision(name: str) -> None:
    new, old, mask, rollout_ids = _rollouts(torch.bfloat16)
    got = SEQUENCE[name](new, old, mask, rollout_ids)
    assert got.dtype == torch.float32
    assert torch.equal(got, SEQUENCE[name](new.float(), old.float(), mask, rollout_ids))


def test_rollout_mean_of_nothing_is_zero() -> None:
    got = rollout_mean(
        torch.tensor([[math.nan], [2.0]]), torch.tensor([[False], [True]]), torch.tensor([0, 1])
    )
    assert got.tolist() == [[0.0], [2.0]]
