"""Scoring a batch: components by name, shadow terms, None, errors that name their place, and rewards chosen by row."""

from __future__ import annotations

from functools import partial

import pytest

from rlkit.errors import ConfigError
from rlkit.rewards import Reward, RewardError, Term, batched, by_task, exact_match, numeric, score, weighted_sum
from rlkit.types import Rollout, Task

ROLLOUTS = [Rollout(Task(f"t/{i}", (), reward=name), ()) for i, name in enumerate(["a", "b"])]


def index(rollout: Rollout) -> float:
    return float(rollout.task.id[-1])


def reward(**terms: Term) -> Reward:
    return Reward("test", terms, weighted_sum)


def test_reward_is_the_weighted_sum_of_its_terms_and_shadow_terms_are_only_logged():
    scored = score(ROLLOUTS, reward(one=Term(0.5, lambda r: 1.0), index=Term(-2.0, index), shadow=Term(0.0, lambda r: 9.0)))
    assert [r.reward for r in scored] == [0.5, -1.5]  # 0.5 * 1 - 2 * 0 and 0.5 * 1 - 2 * 1
    assert scored[1].rewards == {"one": 1.0, "index": 1.0, "shadow": 9.0}
    assert ROLLOUTS[0].reward is None and ROLLOUTS[0].rewards == {}


def test_none_of_a_weighted_term_makes_the_reward_none_and_of_a_shadow_term_does_not():
    assert score(ROLLOUTS, reward(one=Term(1.0, lambda r: 1.0), none=Term(0.0, lambda r: None)))[0].reward == 1.0
    scored = score(ROLLOUTS, reward(one=Term(1.0, lambda r: 1.0), none=Term(1.0, lambda r: None)))
    assert scored[0].reward is None and scored[0].rewards == {"one": 1.0, "none": None}


def centred(rollouts: list[Rollout], *, scale: float = 1.0) -> list[float]:
    mean = sum(map(index, rollouts)) / len(rollouts)
    return [scale * (index(r) - mean) for r in rollouts]


@pytest.mark.parametrize(
    "term",
    [Term(1.0, centred, batched=True), Term(1.0, batched(partial(centred))), Term(1.0, partial(batched(centred)))],
)
def test_a_batched_term_sees_all_rollouts_at_once(term):
    assert [r.reward for r in score(ROLLOUTS, reward(centred=term))] == [-0.5, 0.5]


def boom(rollout: Rollout) -> float:
    raise KeyError("answer")


def test_a_reward_that_raises_names_the_term_and_the_task():
    with pytest.raises(RewardError, match=r"'bad'.*'t/0'.*KeyError.*answer") as caught:
        score(ROLLOUTS, reward(good=Term(1.0, index), bad=Term(0.0, boom)))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0], object(), 1j])
def test_a_value_that_is_no_reward_is_an_error_and_not_zero(value):
    with pytest.raises(RewardError, match=r"'odd'.*'t/0'"):
        score(ROLLOUTS, reward(odd=Term(1.0, lambda r: value)))


@pytest.mark.parametrize("values", [[1.0], 1.0, None, "ab", [1.0, 2.0, 3.0]])
def test_a_batched_reward_gives_one_score_for_each_rollout(values):
    with pytest.raises(RewardError, match="batched"):
        score(ROLLOUTS, reward(odd=Term(1.0, lambda rollouts: values, batched=True)))


def test_an_aggregate_that_is_not_finite_is_an_error():
    with pytest.raises(RewardError, match="aggregator"):
        score(ROLLOUTS, reward(big=Term(1e308, lambda r: 1e308)))


def test_true_and_false_are_one_and_zero():
    assert score(ROLLOUTS, reward(yes=Term(1.0, lambda r: True)))[0].reward == 1.0


def test_all_weights_zero_is_refused():
    with pytest.raises(ConfigError, match="weight"):
        score(ROLLOUTS, reward(shadow=Term(0.0, index)))


def test_no_rollouts_give_no_rollouts():
    assert score([], reward(index=Term(1.0, index), centred=Term(1.0, lambda rollouts: [], batched=True))) == []


def test_by_task_scores_each_row_with_its_own_reward():
    fn = partial(by_task, rewards={"a": lambda r: 1.0, "b": lambda r: None})
    assert [r.reward for r in score(ROLLOUTS, reward(by_task=Term(1.0, fn)))] == [1.0, None]


def test_by_task_names_the_row_and_the_known_rewards():
    fn = partial(by_task, rewards={"numeric": numeric, "exact_match": exact_match})
    with pytest.raises(ConfigError, match=r"'t/0'.*'a'.*exact_match, numeric"):
        score(ROLLOUTS, reward(by_task=Term(1.0, fn)))


def test_by_task_gives_a_batched_reward_all_rows_that_name_it():
    rows = [*ROLLOUTS, Rollout(Task("t/4", (), reward="a"), ())]
    fn = partial(by_task, rewards={"a": partial(batched(centred), scale=2.0), "b": index})
    assert [r.reward for r in score(rows, reward(by_task=Term(1.0, fn)))] == [-4.0, 1.0, 4.0]  # mean of 0 and 4 is 2


def test_by_task_names_the_reward_and_the_row_that_raise():
    fn = partial(by_task, rewards={"a": index, "b": boom})
    with pytest.raises(RewardError, match=r"'b' raised on task 't/1'"):
        score(ROLLOUTS, reward(by_task=Term(1.0, fn)))
