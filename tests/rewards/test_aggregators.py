"""From a vector to one number: worked values, and laws that every aggregator keeps."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from rlkit.config.compose import conf_dir
from rlkit.config.schema import resolve
from rlkit.functional import normalize_group
from rlkit.functional.advantages import group_mean
from rlkit.rewards import (
    Reward,
    RewardError,
    Term,
    batched,
    group_normalised,
    largest,
    mean,
    product,
    score,
    smallest,
    weighted_sum,
)
from rlkit.types import Rollout, Task

SCORES, WEIGHTS = {"a": 0.5, "b": 1.0, "c": 0.25}, {"a": 2.0, "b": 0.5, "c": 1.0}
BY_HAND = {  # 2 · 0.5 = 1, 0.5 · 1 = 0.5, 1 · 0.25 = 0.25
    weighted_sum: 1.75,
    smallest: 0.25,
    largest: 1.0,
    mean: 1.75 / 3.5,
    product: 0.125,
}
each = pytest.mark.parametrize("aggregator", BY_HAND, ids=lambda f: f.__name__)


def names(vector, groups=None, weight=1.0) -> list[Rollout]:
    """Rollouts that carry their components in the metadata."""
    return [
        Rollout(Task(f"t/{i}", ()), (), group=groups[i] if groups else 0, metadata=row)
        for i, row in enumerate(vector)
    ]


def reward_of(aggregator, weights) -> Reward:
    return Reward(
        "test", {n: Term(w, lambda r, n=n: r.metadata[n]) for n, w in weights.items()}, aggregator
    )


def test_every_option_is_tested():
    import yaml

    options = {
        resolve(yaml.safe_load(f.read_text())["_target_"])
        for f in (conf_dir() / "reward" / "aggregator").glob("*.yaml")
    }
    assert options == {*BY_HAND, group_normalised}


@each
def test_by_hand(aggregator):
    assert aggregator(SCORES, WEIGHTS) == pytest.approx(BY_HAND[aggregator])


@each
def test_the_order_of_the_components_does_not_matter(aggregator):
    for order in itertools.permutations(SCORES):
        assert aggregator({n: SCORES[n] for n in order}, WEIGHTS) == pytest.approx(
            BY_HAND[aggregator]
        )


@each
def test_one_component_of_weight_one_is_itself(aggregator):
    for value in (-0.5, 0.0, 0.75):
        assert aggregator({"a": value}, {"a": 1.0}) == value


@each
def test_none_is_kept_out_and_a_shadow_component_changes_nothing(aggregator):
    """The slip: what cannot be scored counted as 0."""
    rollouts = names([{"a": 1.0, "b": None, "s": 1.0}, {"a": 1.0, "b": 0.5, "s": None}])
    scored = score(rollouts, reward_of(aggregator, {"a": 1.0, "b": 1.0, "s": 0.0}))
    assert scored[0].reward is None and scored[0].rewards == {"a": 1.0, "b": None, "s": 1.0}
    assert (
        scored[1].reward == pytest.approx(aggregator({"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 1.0}))
        and scored[1].rewards["s"] is None
    )


@pytest.mark.parametrize("aggregator", [smallest, largest, mean], ids=lambda f: f.__name__)
def test_between_the_smallest_and_the_largest_component(aggregator):
    ones = dict.fromkeys(SCORES, 1.0)
    assert min(SCORES.values()) <= aggregator(SCORES, ones) <= max(SCORES.values())
    assert min(SCORES.values()) <= mean(SCORES, WEIGHTS) <= max(SCORES.values())


def test_a_wrong_form_takes_everything_in_a_product_and_a_penalty_stays_one():
    assert product({"a": 1.0, "format": 0.0}, {"a": 1.0, "format": 1.0}) == 0.0
    assert smallest({"a": 1.0, "length": 0.5}, {"a": 1.0, "length": -1.0}) == -0.5


# ------------------------------------------------------------------------------------------- groups

VECTOR = [
    {"a": 1.0, "b": 100.0},
    {"a": 0.0, "b": 300.0},
    {"a": 1.0, "b": 200.0},
    {"a": 1.0, "b": 10.0},
    {"a": 1.0, "b": 20.0},
    {"a": None, "b": 1e6},
]
GROUPS = [4, 4, 4, 7, 7, 7]


def test_each_component_is_normalised_in_its_group():
    """By hand with statistics.stdev; the rollout that cannot be scored is in no mean; a has no
    spread in the second group."""
    weights = {"a": 1.0, "b": -0.5}
    found = [r.reward for r in score(names(VECTOR, GROUPS), reward_of(group_normalised, weights))]
    z = lambda x, column: (x - statistics.fmean(column)) / (statistics.stdev(column) + 1e-4)  # noqa: E731
    first = [
        z(a, [1, 0, 1]) - 0.5 * z(b, [100, 300, 200]) for a, b in ((1, 100), (0, 300), (1, 200))
    ]
    assert (
        found[:5] == pytest.approx([*first, -0.5 * z(10, [10, 20]), -0.5 * z(20, [10, 20])])
        and found[5] is None
    )


def test_it_is_the_sum_of_grpo_advantages_of_the_components():
    """Against the tensors: group_mean under `normalize_group`, component by component."""
    vector, groups = VECTOR[:5], torch.tensor(GROUPS[:5])
    found = torch.tensor(
        [
            r.reward
            for r in score(names(vector, GROUPS), reward_of(group_normalised, {"a": 0.3, "b": 0.7}))
        ]
    )
    expected = torch.zeros(5)
    for name, weight in (("a", 0.3), ("b", 0.7)):
        rewards = torch.tensor([row[name] for row in vector])
        expected += (
            weight
            * normalize_group(
                group_mean(rewards, groups)[:, None], rewards, groups, torch.arange(5)
            )[:, 0]
        )
    torch.testing.assert_close(found, expected)


def test_rewards_of_a_group_sum_to_zero_whatever_the_scale_of_a_component():
    found = [
        r.reward
        for r in score(names(VECTOR[:5], GROUPS), reward_of(group_normalised, {"a": 1.0, "b": 1.0}))
    ]
    larger = [row | {"b": 1000 * row["b"] + 5} for row in VECTOR[:5]]
    scaled = [
        r.reward
        for r in score(names(larger, GROUPS), reward_of(group_normalised, {"a": 1.0, "b": 1.0}))
    ]
    assert sum(found[:3]) == pytest.approx(0) and sum(found[3:]) == pytest.approx(0)
    assert scaled == pytest.approx(found, abs=1e-4)  # eps is in the component's unit


def test_no_spread_is_exactly_zero():
    for rows in ([{"a": 0.1}] * 3, [{"a": 5.0}]):
        assert [r.reward for r in score(names(rows), reward_of(group_normalised, {"a": 1.0}))] == [
            0.0
        ] * len(rows)


@pytest.mark.parametrize("values", [[1.0], 1.0, [math.nan, 1.0], ["a", 1.0]])
def test_an_aggregator_of_the_batch_gives_one_number_for_each_rollout(values):
    with pytest.raises(RewardError, match="aggregator"):
        score(
            names([{"a": 1.0}, {"a": 2.0}]),
            reward_of(batched(lambda rollouts, weights: values), {"a": 1.0}),
        )
