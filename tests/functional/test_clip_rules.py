"""Every policy loss declares what its clip does; held against the gradient of the loss itself, for
every shipped option."""

from __future__ import annotations

import pytest
import torch

from parametrise import cases
from rlkit.algorithm import call
from rlkit.config.compose import compose, conf_dir, experiment
from rlkit.functional import token_ratio
from rlkit.training.update.loss import find_clipped_tokens

OPTIONS = sorted(
    {file.stem for file in (conf_dir() / "algorithm" / "policy_loss").glob("*.yaml")} - {"vespo"}
)  # which has no clip
CAPS = {"cispo"}  # bound a weight and leave the gradient


def given(seed: int) -> dict[str, torch.Tensor]:
    """Four rollouts of eight tokens, log-ratios on both sides of every interval, advantages of both
    signs and zero."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 8, generator=generator, dtype=torch.float64) - 1
    new = (old + torch.randn(4, 8, generator=generator, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(4, 8, generator=generator) < 0.9
    advantages = (
        torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64)[:, None].expand(4, 8).roll(seed, 0)
        * mask
    )
    ratio = token_ratio(new, old, mask)
    return {
        "logprobs": new,
        "logprobs_old": old,
        "response_mask": mask,
        "rollout_ids": torch.arange(4),
        "advantages": advantages,
        "ratio": ratio,
        "logprobs_sampler": old,
        "covariance_rank": torch.rand(4, 8, generator=generator),
    }


@pytest.mark.slow
@pytest.mark.parametrize("option", cases(OPTIONS, 2))
def test_what_a_loss_says_it_holds_is_what_has_no_gradient(option):
    alone = (
        ["algorithm.policy_loss.penalty=0"] if option == "dppo" else []
    )  # its penalty has a gradient on every token
    loss = experiment(
        compose([f"algorithm/policy_loss={option}", "algorithm/ratio=token", *alone])
    ).algorithm.policy_loss
    held = capped = 0
    for seed in range(8):
        quantities = given(seed)
        (gradient,) = torch.autograd.grad(call(loss, quantities).sum(), quantities["logprobs"])
        live = quantities["response_mask"] & (quantities["advantages"] != 0)
        found = find_clipped_tokens(loss, quantities)
        assert (
            torch.equal(found["clip_held"] & live, (gradient == 0) & live)
            and not (found["clip_held"] & ~live).any()
        )
        held, capped = (
            held + int(found["clip_held"].sum()),
            capped + int((found["clip_capped"] & live).sum()),
        )
    assert (held > 0) == (option not in {*CAPS, "sapo", "reinforce", "kl_cov"}) and (
        capped > 0
    ) == (option in CAPS)


def test_a_loss_without_a_rule_has_no_figures():
    assert find_clipped_tokens(lambda ratio, advantages: -ratio * advantages, given(0)) == {}
