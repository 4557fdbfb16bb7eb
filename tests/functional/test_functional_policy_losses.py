"""Policy losses per token."""

import pytest
import torch

from rlkit.functional import clipped, reinforce, token_ratio

# (ratio, advantage) → (loss, gradient with respect to the ratio) at clip_low 0.2, clip_high 0.28
BY_HAND = [
    (1.0, 2.0, -2.0, -2.0),
    (1.5, 1.0, -1.28, 0.0),  # above, wants to go up: min(1.5, 1.28)
    (1.25, 1.0, -1.25, -1.0),  # inside the higher bound, outside the lower width
    (1.5, -1.0, 1.5, 1.0),  # above, wants to go down: min(-1.5, -1.28)
    (0.5, -1.0, 0.8, 0.0),  # below, wants to go down: min(-0.5, -0.8)
    (0.5, 1.0, -0.5, -1.0),  # below, wants to go up: min(0.5, 0.8)
    (0.75, -2.0, 1.6, 0.0),  # below 0.8, though inside 1 - 0.28
    (3.0, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), BY_HAND)
def test_clipped_by_hand(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    r = torch.tensor([[ratio]], requires_grad=True)
    got = clipped(r, torch.tensor([[advantage]]), clip_low=0.2, clip_high=0.28)
    got.backward()
    assert got.item() == pytest.approx(loss, abs=1e-6)  # float32 rounding of values of order 1
    assert r.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_clipped_defaults_are_those_of_ppo() -> None:
    ratio, advantages = torch.tensor([[0.1, 5.0]]), torch.tensor([[-1.0, 1.0]])
    torch.testing.assert_close(clipped(ratio, advantages), torch.tensor([[0.8, -1.2]]))


def test_reinforce_by_hand() -> None:
    """-2 · -0.5 = 1; the gradient is -A."""
    logprobs = torch.tensor([[-0.5, -3.0]], requires_grad=True)
    loss = reinforce(logprobs, torch.tensor([[2.0, -1.0]]))
    loss.sum().backward()
    assert loss.tolist() == [[1.0, -3.0]]
    assert logprobs.grad.tolist() == [[-2.0, 1.0]]


@pytest.mark.parametrize("widths", [(0.2, 0.2), (1.0, 1e6)])
def test_clipped_at_ratio_one_has_the_gradient_of_reinforce(widths: tuple[float, float]) -> None:
    """On policy the ratio is 1 and the clip never binds: the first step of PPO is REINFORCE, whatever the widths."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(3, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    ratio = token_ratio(logprobs, logprobs.detach(), torch.ones(3, 5, dtype=torch.bool))
    (ours,) = torch.autograd.grad(clipped(ratio, advantages, clip_low=widths[0], clip_high=widths[1]).sum(), logprobs)
    (theirs,) = torch.autograd.grad(reinforce(logprobs, advantages).sum(), logprobs)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loss", [clipped, reinforce])
def test_advantages_are_constants(loss) -> None:
    policy, advantages = torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    loss(policy, advantages).sum().backward()
    assert advantages.grad is None
    assert policy.grad is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip_low", v) for v in (0.0, -0.2, 1.5, float("nan"))] + [("clip_high", v) for v in (0.0, -1.0, float("nan"))],
)
def test_clip_widths_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value}; allowed: "):
        clipped(torch.ones(1, 1), torch.ones(1, 1), **{name: value})
