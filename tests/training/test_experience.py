"""The data of a step with refills: its problems and the numbers of its groups, what the sampler
learns of them, and the draws of each round."""

from __future__ import annotations

import random

import pytest

from rlkit.config.compose import compose, experiment
from rlkit.episodes.samplers import ASKED, LAST
from rlkit.episodes.stream import StreamState
from rlkit.training import groups
from rlkit.training.groups import experience
from rlkit.types import Rollout, Step, Task

TASKS = [Task(f"t/{i}", ({"role": "user", "content": "?"},)) for i in range(8)]
WORDS = [
    "batch.prompts=3",
    "batch.group_size=2",
    "algorithm/group_filter=mixed",
    "algorithm.max_refills=2",
    "evaluation.n=0",
    "logger=none",
    "seed=5",
]


@pytest.fixture
def played(monkeypatch):
    """Episodes without a model: problems of an odd number have rewards that differ, others have
    none that does. Gives what each round was asked for."""
    rounds = []

    def collect(policy, tasks, *, group_size, first, step, version, seed, **_):
        rounds.append({"first": first, "step": step, "version": version, "tasks": list(tasks)})
        reply = Step((), (1,), (2, 3), (-0.5, -0.5), "stop", versions=((0, version),))
        return [
            Rollout(task, (reply,), group=first + i, sample=j)
            for i, task in enumerate(tasks)
            for j in range(group_size)
        ]

    def score(rollouts, reward):
        rounds[-1]["drawn"] = random.random()
        scored = []
        for rollout in rollouts:
            odd = int(rollout.task.id[2:]) % 2
            scored.append(rollout._replace(reward=float(odd and rollout.sample)))
        return scored

    monkeypatch.setattr(groups, "collect", collect)
    monkeypatch.setattr(groups, "score_spread", score)
    return rounds


def stepped(tiny, *words: str, step: int = 0, **own):
    x = experiment(compose([*WORDS, *words]))
    x = x._replace(algorithm=x.algorithm._replace(**own))
    return experience(x, tiny, TASKS, StreamState(), step=step, version=step)


def test_refills_go_on_with_the_numbers_of_the_groups_and_ask_for_what_is_missing(tiny, played):
    sampled, trained, stream = stepped(tiny, step=4)
    asked = [len(own["tasks"]) for own in played]
    assert len(played) > 1 and stream.position == sum(asked)
    assert [own["first"] for own in played] == [sum(asked[:i]) for i in range(len(asked))]
    assert {(own["step"], own["version"]) for own in played} == {(4, 4)}
    assert sorted({r.group for r in sampled}) == list(range(sum(asked)))
    accepted = [own["tasks"] for own in played]
    good = [task for tasks in accepted for task in tasks if int(task.id[2:]) % 2]
    assert [r.task.id for r in trained[::2]] == [task.id for task in good]
    missing = 3
    for tasks in accepted:
        assert len(tasks) == missing
        missing -= sum(int(task.id[2:]) % 2 for task in tasks)


def test_a_refill_without_any_reply_accepts_no_group(tiny, played, monkeypatch):
    """It ended the run, although the step had other rollouts."""
    whole = groups.collect

    def collect(*given, **own):
        return [r if int(r.task.id[2:]) % 2 else r._replace(steps=()) for r in whole(*given, **own)]

    monkeypatch.setattr(groups, "collect", collect)
    _, trained, _ = stepped(tiny, "batch.prompts=1", "algorithm.max_refills=8", "seed=0")
    first = [int(task.id[2:]) % 2 for task in played[0]["tasks"]]
    assert first == [0] and len(played) > 1, "the first round has no reply"
    assert {int(r.task.id[2:]) % 2 for r in trained} == {1}


def test_the_sampler_learns_from_every_group_of_a_step_also_from_those_that_were_refused(
    tiny, played
):
    sampled, trained, stream = stepped(tiny, "task/sampler=variance")
    places = [TASKS.index(task) for own in played for task in own["tasks"]]
    assert len(played) > 1 and len(set(places)) == len(places) == len(sampled) // 2
    table = stream.sampler["table"]
    assert stream.sampler["asked"] == places and stream.sampler["step"] == []
    assert table[places, ASKED].tolist() == [1 + i for i in range(len(places))]
    assert table[places, LAST].tolist() == [0.5 * (place % 2) for place in places]
    assert len(trained) < len(sampled)  # some were refused, or this shows nothing


@pytest.mark.slow
def test_every_round_of_refills_has_draws_of_its_own_which_are_the_same_each_time(tiny, played):
    """The rewards draw once a round, and so does the filter."""
    found = []

    def filtered(rewards, group_ids):
        found.append(random.random())
        return rewards > rewards + 1  # none: all rounds are played

    for start in (1, 2):
        random.seed(start)
        stepped(tiny, group_filter=filtered)
    stepped(tiny, step=1, group_filter=filtered)
    for draws in ([own["drawn"] for own in played], found):
        first, second, other = draws[:3], draws[3:6], draws[6:]
        assert len(played) == 9 and first == second
        assert len({*first, *other}) == 6
