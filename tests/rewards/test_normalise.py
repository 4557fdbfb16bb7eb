"""Running moments of rewards: the same in one go and in parts, and rewards on their scale."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.rewards import Moments, normalise, update_moments
from rlkit.types import Rollout, Step, Task


def rollout(reward, *steps) -> Rollout:
    return Rollout(
        Task("t", ()), tuple(Step((), (), (), (), "stop", reward=s) for s in steps), reward=reward
    )


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


def test_totals_come_out_standardised_with_rewards_of_steps_where_they_were():
    rollouts = [rollout(1.0, None, 0.5), rollout(0.0, 2.0), rollout(None, 1.0), rollout(-1.0)]
    found = normalise(rollouts, update_moments(Moments(), rollouts))
    totals = [r.total_reward for r in found if r.total_reward is not None]
    assert statistics.fmean(totals) == pytest.approx(0.0, abs=1e-12) and statistics.pstdev(
        totals
    ) == pytest.approx(1.0)
    std = statistics.pstdev([1.5, 2.0, -1.0])
    assert found[0].steps[0].reward is None and found[0].steps[1].reward == pytest.approx(0.5 / std)
    assert found[2] == rollouts[2]


def test_equal_rewards_are_zero_and_finite():
    rollouts = [rollout(3.0), rollout(3.0)]
    assert [r.reward for r in normalise(rollouts, update_moments(Moments(), rollouts))] == [
        0.0,
        0.0,
    ]
    assert math.isfinite(normalise([rollout(3.0)], Moments())[0].reward)
