"""Held-out accuracy: what is counted, over which denominator, and with which sampling settings."""

from __future__ import annotations

import itertools
import math

import pytest

from rlkit.config.problems.rows import check_verifier
from rlkit.engines import Batched
from rlkit.environments import single_turn
from rlkit.episodes.evaluation import (
    greedy_accuracy,
    is_correct,
    sampled_accuracy,
    summarise_accuracy,
    summarise_curves,
)
from rlkit.errors import DataError
from rlkit.models import decode
from rlkit.models.chat import encode_scaffold
from rlkit.rewards import Reward, Term, numeric, weighted_sum
from rlkit.statistics import mean_interval, share_interval, wilson
from rlkit.types import Generation, Rollout, Task

REWARD = Reward("numeric", {"numeric": Term(1.0, numeric)}, weighted_sum)
TASKS = [
    Task(f"row/{i}", ({"role": "user", "content": f"question {i}."},), answer=str(i))
    for i in range(4)
]
RIGHT = {0: 4, 1: 3, 2: 1, 3: 0}  # question → how many of four samples are right


class Engine:
    """Answers right for the first `RIGHT[i]` samples of question i; greedy replies are right where
    any sample is."""

    def __init__(self):
        self.settings, self.counts = [], dict.fromkeys(RIGHT, 0)

    def __call__(self, policy, contexts, seeds, params):
        self.settings.append((params.temperature, params.max_new_tokens))
        out = []
        for context in contexts:
            text = decode(policy.renderer, context)
            number = next(i for i in RIGHT if f"question {i}." in text)
            right = self.counts[number] < RIGHT[number]
            self.counts[number] += 1
            ids = tuple(
                encode_scaffold(policy.renderer, f"#### {number if right else 99}<|im_end|>")
            )
            out.append(Generation(ids, (-1.0,) * len(ids), "stop"))
        return out


def collecting(**more):
    engine = Engine()
    return engine, {
        "reward": REWARD,
        "engine": Batched(engine),
        "environment": single_turn(),
        "max_new_tokens": 5,
        **more,
    }


def test_greedy_counts_full_marks_over_all_tasks(tiny):
    engine, settings = collecting()
    result, rollouts = greedy_accuracy(tiny, TASKS, **settings)
    assert list(result.pop("reward_interval")) == list(share_interval(3, 4)), (
        "rewards of 0 and 1 have an interval within 0 and 1"
    )
    assert result == {
        "accuracy": 3 / 4,
        "interval": list(share_interval(3, 4)),
        "n": 4,
        "distinct": 4,
        "truncated": 0.0,
        "reward": 3 / 4,
        "temperature": 0.0,
    }
    assert [r.reward for r in rollouts] == [1.0, 1.0, 1.0, 0.0] and [
        r.task.id for r in rollouts
    ] == [t.id for t in TASKS]
    assert engine.settings == [(0.0, 5)]


def test_graded_rewards_have_the_interval_of_a_mean():
    rewards = (0.0, 0.5, 0.5, 2.0)
    result = summarise_accuracy(
        [
            Rollout(task, (), reward=r, rewards={"task": r})
            for task, r in zip(TASKS, rewards, strict=True)
        ]
    )
    assert (result["reward"], *result["reward_interval"]) == pytest.approx(
        mean_interval(rewards), abs=1e-12
    )
    low, high = result["reward_interval"]
    assert 0 < low < 0.2 and 1.6 < high < 2, "a mean of four rewards between 0 and 2"


def test_rows_that_repeat_a_problem_are_no_new_evidence():
    """294 rows of 42 distinct questions have the interval of 42, for the accuracy, the reward and
    every pass@k."""
    tasks = [
        Task(f"row/{i}", ({"role": "user", "content": f"question {i % 42}"},), answer="4")
        for i in range(294)
    ]
    rollouts = [
        Rollout(task, (), reward=float(i % 42 < 21), rewards={"task": 1.0})
        for i, task in enumerate(tasks)
    ]
    result = summarise_accuracy(rollouts)
    assert (result["n"], result["distinct"], result["accuracy"]) == (294, 42, 0.5)
    assert result["interval"] == pytest.approx(wilson(21, 42)) == result["reward_interval"]
    once, often = (
        summarise_curves(own, samples=1, k=[1])["pass@1"] for own in (rollouts[:42], rollouts)
    )
    assert often["value"] == once["value"] and often["interval"] == pytest.approx(once["interval"])
    solved = [
        Rollout(TASKS[i], (), reward=1.0)
        for i, times in enumerate((3, 7, 11, 2))
        for _ in range(times)
    ]
    assert summarise_accuracy(solved)["interval"][1] == 1.0, (
        "all right: no rounding beyond the number of problems"
    )
    skewed = summarise_accuracy([*rollouts[:42], *[rollouts[0]] * 252])
    assert skewed["interval"][0] < 0.25 and skewed["distinct"] == 42, (
        "one question in 253 of 294 rows is nearly all there is"
    )


def test_what_cannot_be_scored_counts_against_accuracy_but_not_in_the_mean_reward(tiny):
    """Leaving such rows out of the denominator would raise the accuracy of a verifier that gives
    up."""
    tasks = [*TASKS[:1], TASKS[1]._replace(answer="no number")]
    result, _ = greedy_accuracy(tiny, tasks, **collecting()[1])
    assert (result["accuracy"], result["n"], result["reward"]) == (0.5, 2, 1.0)
    nothing, _ = greedy_accuracy(tiny, tasks[1:], **collecting()[1])
    assert nothing["accuracy"] == 0 and math.isnan(nothing["reward"])


@pytest.mark.parametrize(
    "reward, right", [(1.0, True), (1.5, True), (0.999, False), (0.0, False), (None, False)]
)
def test_only_full_marks_are_right(reward, right):
    assert is_correct(Rollout(TASKS[0], (), reward=reward)) is right


def test_a_task_may_count_less_than_full_marks_as_right():
    half = TASKS[0]._replace(metadata={"correct_from": 0.5})
    assert [is_correct(Rollout(half, (), reward=r)) for r in (0.49, 0.5, None)] == [
        False,
        True,
        False,
    ]
    unset = TASKS[0]._replace(metadata={"correct_from": None})
    assert [is_correct(Rollout(unset, (), reward=r)) for r in (0.5, 1.0)] == [False, True]


@pytest.mark.parametrize(
    "metadata, said",
    [
        ({"correct_from": "0.5"}, "its correct_from is '0.5'; give a number"),
        ({"tests": "assert f(1) == 2"}, "its tests are 'assert f"),
        ({"tests": [1]}, r"its tests are \[1\]"),
        ({"tests": ["assert f(1) == 2"], "setup": 1}, "its setup is 1"),
    ],
)
def test_metadata_of_another_type_is_refused(metadata, said):
    task = Task("a", (), "1", reward="code_exec", metadata=metadata)
    with pytest.raises(DataError, match=f"row a: .*{said}"):
        check_verifier([task], REWARD)


def test_one_reply_may_be_sampled_instead_of_greedy(tiny):
    engine, settings = collecting()
    result, _ = greedy_accuracy(tiny, TASKS, temperature=0.7, **settings)
    assert engine.settings == [(0.7, 5)] and result["temperature"] == 0.7


def test_sampled_is_the_mean_over_tasks_of_each_tasks_own_estimate(tiny):
    engine, settings = collecting()
    result, rollouts = sampled_accuracy(
        tiny, TASKS, samples=4, k=[1, 2, 4], temperature=0.8, **settings
    )
    assert len(rollouts) == 16 and engine.settings == [(0.8, 5)]
    assert result["avg@4"]["value"] == (4 + 3 + 1 + 0) / 16
    for k in (1, 2, 4):
        per_task = []
        for right in RIGHT.values():  # by enumeration of every way to pick k of the four samples
            picks = list(itertools.combinations([True] * right + [False] * (4 - right), k))
            per_task.append(sum(any(p) for p in picks) / len(picks))
        assert result[f"pass@{k}"]["value"] == pytest.approx(
            sum(per_task) / 4, abs=1e-12
        )  # rounding of a few ratios
    assert list(result) == ["avg@4", "pass@1", "pass@2", "pass@4", "reward"]
    assert result["reward"]["value"] == result["avg@4"]["value"]  # scores of 0 and 1


def test_intervals_are_over_tasks_and_stay_within_zero_and_one(tiny):
    """Samples of one task are not independent trials: 16 replies to 4 tasks have the interval of
    4."""
    result, _ = sampled_accuracy(tiny, TASKS, samples=4, k=[4], temperature=1.0, **collecting()[1])
    assert result["avg@4"]["interval"] == pytest.approx(
        mean_interval([1.0, 0.75, 0.25, 0.0])[1:], abs=1e-12
    )
    assert 0 < result["pass@4"]["interval"][0] < 0.75 < result["pass@4"]["interval"][1] < 1.0


def test_more_draws_than_samples_are_refused_before_sampling(tiny):
    engine, settings = collecting()
    with pytest.raises(
        ValueError, match=r"pass@8 needs at least 8 samples.*evaluation.samples is 4"
    ):
        sampled_accuracy(tiny, TASKS, samples=4, k=[1, 8], temperature=1.0, **settings)
    assert engine.settings == []


def test_held_out_replies_have_a_limit_of_their_own_and_the_rest_of_training(experiment):
    """The thinking budget too, and when answers join."""
    generation = experiment.generation._replace(max_thinking_tokens=3, admission="free")
    x = experiment._replace(
        generation=generation, evaluation=experiment.evaluation._replace(max_new_tokens=9)
    )
    params = {
        "reward": x.evaluation.reward,
        "engine": x.generation.engine,
        "environment": x.environment,
    } | generation.params
    assert x.held_out(0.5) == params | {"temperature": 0.5, "max_new_tokens": 9}
    assert experiment.held_out(0.0)["max_new_tokens"] == experiment.generation.max_new_tokens
