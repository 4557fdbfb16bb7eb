"""Options that equal others under a condition, which the comments of conf/ state.

Other files of tests hold these: truncated and confident against k3, and k3_straight_through against
k2 (test_functional_kl.py); both sequence ratios (test_functional_ratios.py); dual_clip against
delta_clip (test_functional_policy_losses.py); leave_one_out, opo, pass_at_k, turn_group_mean and
adaptive_gae (test_functional_advantages.py, test_functional_token_advantages.py); accuracy against
mixed (test_functional_filters.py); overlap against lag (test_overlap.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parametrise import cases
from rlkit import functional
from rlkit.config.changes import find_differences
from rlkit.config.compose import compose
from rlkit.rewards import group_normalised

TEACHER = ["teacher=start"]
MASKED = [
    "algorithm/correction=token_mask",
    "++algorithm.correction.floor=0.5",
    "algorithm.correction.cap=5",
]
CLIPPED = "algorithm/policy_loss=clipped"
WIDTHS = ["algorithm.policy_loss.clip_low=3e-4", "algorithm.policy_loss.clip_high=4e-4"]
IMITATION = "algorithm.streams.imitation"
# an option → (another option with its numbers, the keys that may differ)
TWINS = {
    "forward": (["kl=forward"], ["kl=k1"], {"kl.name"}),
    "icepop": (["algorithm/correction=icepop"], MASKED, set()),
    "clip_higher": (
        ["algorithm/policy_loss=clip_higher"],
        [CLIPPED, "algorithm.policy_loss.clip_high=0.28"],
        set(),
    ),
    "clip_sequence": (["algorithm/policy_loss=clip_sequence"], [CLIPPED, *WIDTHS], set()),
    "mopd": (
        ["algorithm=mopd", *TEACHER],
        ["algorithm=opd", "algorithm.minibatches=1", *TEACHER],
        {"name"},
    ),
    "gkd": (["algorithm=gkd", *TEACHER], ["algorithm=opsd", *TEACHER], {"name"}),
    "opsd": (["algorithm=opsd", *TEACHER], ["algorithm=sdpo", *TEACHER], {"name"}),
    "echo": (["algorithm=echo"], ["algorithm=rl_sft"], {"name", f"{IMITATION}.mask"}),
    "rl_sft": (["algorithm=rl_sft", f"~{IMITATION}"], ["algorithm=grpo"], {"name"}),
    "gspo_token": (
        ["algorithm=gspo_token"],
        ["algorithm=gspo"],
        {"name", "algorithm.ratio._target_"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(TWINS, ("forward", "gspo_token")))
def test_twins_have_one_config(name):
    one, other, apart = TWINS[name]
    changed = set(find_differences(compose(one).config, compose(other).config))
    allowed = apart | ({"algorithm.name"} if "name" in apart else set())
    if name == "rl_sft":  # grpo leaves its one stream to the default
        changed = {key for key in changed if not key.startswith("algorithm.streams.reward.")}
    assert changed - allowed == set()


def test_gdpo_as_an_advantage_and_as_an_aggregator():
    """With advantage=raw and normalization=batch, the aggregator gives the advantages of gdpo."""
    generator = torch.Generator().manual_seed(0)
    columns = {name: torch.rand(12, generator=generator, dtype=torch.float64) for name in "ab"}
    weights, group_ids = {"a": 1.0, "b": 0.3}, torch.arange(12) // 4
    rollouts = [
        SimpleNamespace(
            rewards={name: float(column[i]) for name, column in columns.items()}, group=i // 4
        )
        for i in range(12)
    ]
    rewards = torch.tensor(group_normalised(rollouts, weights), dtype=torch.float64)
    advantages = functional.normalize_batch(functional.raw(rewards)[:, None], rewards)[:, 0]
    expected = functional.gdpo(columns, group_ids, weights=weights)
    torch.testing.assert_close(advantages, expected, rtol=1e-12, atol=1e-12)
