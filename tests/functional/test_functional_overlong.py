"""What becomes of rollouts that are too long."""

import math

import pytest
import torch

from parametrise import each
from rlkit.config.compose import compose, experiment
from rlkit.functional import keep_overlong, mask_truncated, soft_penalty


def test_soft_penalty_by_hand() -> None:
    """The paper's numbers: 20480 tokens, of which the last 4096 are the buffer."""
    lengths = torch.tensor([0, 16384, 16385, 18432, 20480, 20481, 99999])
    rewards, trained = soft_penalty(
        torch.full((7,), 2.0, dtype=torch.float64), lengths, limit=20480
    )
    assert rewards.tolist() == pytest.approx(
        [2.0, 2.0, 2 - 1 / 4096, 1.5, 1.0, 1.0, 1.0], abs=1e-12
    )  # float64 rounding
    assert trained.dtype == torch.bool and trained.all()


@each("buffer", [0.05, 0.2, 0.7, 1.0])
@each("limit", [1, 64, 1000])
def test_soft_penalty_never_rises_with_the_length(limit: int, buffer: float) -> None:
    lengths = torch.arange(2 * limit + 1)
    penalty = soft_penalty(torch.zeros(len(lengths)), lengths, limit=limit, buffer=buffer)[0]
    assert (
        (penalty.diff() <= 0).all() and penalty[0] == 0 and (penalty[lengths >= limit] == -1).all()
    )


def test_soft_penalty_leaves_the_unscored_unscored() -> None:
    assert soft_penalty(torch.tensor([math.nan]), torch.tensor([5]), limit=5)[0].isnan().all()


@pytest.mark.parametrize(
    "given",
    [
        {"limit": 0},
        {"limit": math.inf},
        {"limit": math.nan},
        {"limit": 8, "buffer": 0.0},
        {"limit": 8, "buffer": 1.5},
    ],
)
def test_soft_penalty_checks_its_hyperparameters(given: dict) -> None:
    name = list(given)[-1]
    with pytest.raises(ValueError, match=rf"{name} is {given[name]}; allowed: "):
        soft_penalty(torch.zeros(1), torch.zeros(1, dtype=torch.int64), **given)


def test_mask_truncated_changes_who_trains_and_no_reward() -> None:
    rewards = torch.tensor([1.0, math.nan, 0.0])
    got, trained = mask_truncated(rewards, torch.tensor([False, True, True]))
    assert torch.equal(got.isnan(), rewards.isnan()) and torch.equal(got[::2], rewards[::2])
    assert trained.tolist() == [True, False, False]
    assert keep_overlong(rewards)[1].all()


@pytest.mark.slow
def test_the_limit_follows_the_generation() -> None:
    x = experiment(compose(["algorithm/overlong=penalty", "generation.max_new_tokens=100"]))
    assert x.algorithm.overlong.keywords == {"limit": 100, "buffer": 0.2}
