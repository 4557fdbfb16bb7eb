"""Running moments of rewards: the same in one go and in parts, and rewards on their scale."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlkit.episodes import assemble
from rlkit.rewards import Moments, update_moments
from rlkit.training.update.sampled import normalise_rewards
from rlkit.types import Rollout, Step, Task


def rollout(reward, *steps) -> Rollout:
    """An episode of replies of one token."""
    made, seen = [], ()
    for earned in steps:
        made.append(Step((), seen, (7,), (-0.5,), "stop", reward=earned))
        seen = (*seen, 7)
    return Rollout(Task("t", ()), tuple(made), reward=reward)


numbers = st.floats(-1e3, 1e3)


@pytest.mark.slow
@given(st.lists(st.lists(st.one_of(st.none(), numbers), max_size=6), max_size=6))
def test_moments_of_parts_are_those_of_the_whole(parts):
    """Against the textbook over all rewards at once; episodes without a score count nowhere."""
    moments = Moments()
    for part in parts:
        moments = update_moments(moments, [rollout(r) for r in part])
    rewards = [r for part in parts for r in part if r is not None]
    assert moments.n == len(rewards)
    if rewards:
        assert moments.mean == pytest.approx(statistics.fmean(rewards), rel=1e-9, abs=1e-9)
        assert moments.std == pytest.approx(
            statistics.pstdev(rewards), rel=1e-6, abs=1e-6
        )  # cancellation at 1e3


def batch_of(rollouts):
    return assemble(rollouts, pad_token_id=0)


def test_totals_come_out_standardised_with_rewards_of_steps_where_they_were():
    rollouts = [rollout(1.0, None, 0.5), rollout(0.0, 2.0), rollout(None, 1.0), rollout(-1.0, None)]
    batch = batch_of(rollouts)
    found = normalise_rewards(batch, update_moments(Moments(), rollouts))
    mean, std = statistics.fmean([1.5, 2.0, -1.0]), statistics.pstdev([1.5, 2.0, -1.0])
    expected = [(total - mean) / std for total in (1.5, 2.0, math.nan, -1.0)]
    # float32 has seven digits
    assert found.rewards.tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert found.token_rewards.sum(1)[[0, 1, 3]].tolist() == pytest.approx(
        [expected[0], expected[1], expected[3]], rel=1e-6
    )
    first = rollout(0.0, 0.5, None)
    (row,) = normalise_rewards(batch_of([first]), Moments(1.0, 3.0, 4.0)).token_rewards.tolist()
    assert row == pytest.approx([0.25, 0.0 - 3.0 / 2.0])
    assert torch.equal(found.token_rewards[2], batch.token_rewards[2])  # unscored


def test_equal_rewards_are_zero_and_finite():
    rollouts = [rollout(3.0, None), rollout(3.0, None)]
    batch = batch_of(rollouts)
    assert normalise_rewards(batch, update_moments(Moments(), rollouts)).rewards.tolist() == [0, 0]
    assert normalise_rewards(batch, Moments()).rewards.isfinite().all()


def test_equal_totals_of_unequal_steps_are_not_blown_up():
    """Divided by rounding noise, the rewards of steps were 1e7."""
    rollouts = [rollout(0.0, -0.1, -0.1, -0.1), rollout(-0.3, 0.0)]
    found = normalise_rewards(batch_of(rollouts), update_moments(Moments(), rollouts))
    assert found.token_rewards.abs().max() < 1
