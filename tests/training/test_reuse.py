"""task.reuse: which groups are learned from again, how old they may be, and that a bound of 0 is
off, bit for bit."""

from __future__ import annotations

import math

import pytest

import rlkit
from rlkit.config.compose import compose, experiment
from rlkit.episodes.samplers import variance_sampler
from rlkit.errors import ConfigError, DataError
from rlkit.training.ahead.flight import pack_rollouts
from rlkit.training.experiment import Reuse
from rlkit.training.reuse import compute_age, score_group, unpack_kept, with_reused
from rlkit.types import Rollout, Step, Task

FALLING = "{_target_: rlkit.training.schedules.linear, _partial_: true, start: 1.0, end: 0.5}"
TASKS = [Task(f"t/{i}", ({"role": "user", "content": "?"},)) for i in range(9)]


def group(number, *rewards, version=0):
    step = Step((), (1,), (2, 3), (-0.5, -0.5), "stop", versions=((0, version),))
    return [
        Rollout(TASKS[number], (step,), group=number, sample=i, reward=reward)
        for i, reward in enumerate(rewards)
    ]


def test_a_group_without_spread_is_replaced_by_a_kept_one_with_its_tokens_and_versions():
    first = with_reused(Reuse(2, 3), (), [*group(0, 0.0, 1.0), *group(1, 1.0, 1.0)], step=0, seed=0)
    assert (
        first.trained[2].task.id == "t/1"
        and len(first.kept) == 1
        and first.metrics["reuse/groups"] == 0
    )  # nothing was kept yet
    new = [*group(2, 0.0, 0.0, version=2), *group(3, 0.0, 1.0, version=2)]
    then = with_reused(Reuse(2, 3), first.kept, new, step=2, seed=0)
    assert [(r.task.id, r.group, r.sample) for r in then.trained] == [
        ("t/0", 2, 0),
        ("t/0", 2, 1),
        ("t/3", 3, 0),
        ("t/3", 3, 1),
    ]
    assert then.trained[0].steps == first.trained[0].steps and compute_age(then.trained[:2], 2) == 2
    assert then.metrics == {"reuse/groups": 1, "reuse/staleness": 2.0, "reuse/kept": 2}


def test_no_group_is_older_than_the_bound_and_none_is_used_twice_in_a_step():
    kept = with_reused(Reuse(9, 2), (), group(0, 0.0, 1.0), step=0, seed=0).kept
    flat = [*group(1, 0.0, 0.0, version=2), *group(2, 0.0, 0.0, version=2)]
    used = with_reused(Reuse(9, 2), kept, flat, step=2, seed=0)
    assert [r.task.id for r in used.trained] == [
        "t/0",
        "t/0",
        "t/2",
        "t/2",
    ] and used.kept == ()  # too old for the next step
    late = with_reused(Reuse(9, 2), kept, flat, step=3, seed=0)
    assert (
        late.trained == flat
        and late.metrics["reuse/groups"] == 0
        and math.isnan(late.metrics["reuse/staleness"])
    )
    other = with_reused(Reuse(9, 2), kept, group(1, 0.0, 0.0, 0.0), step=1, seed=0)
    assert len(other.trained) == 3 and other.metrics["reuse/groups"] == 0  # it has another size


def test_the_best_groups_are_kept_and_a_score_is_the_sum_of_deviations_times_their_spread():
    assert (
        score_group(group(0, 0.0, 1.0, 1.0, 0.0)) == pytest.approx(2.0 * 0.5)
        and score_group(group(0, 1.0, None, 1.0)) == 0.0
    )
    trained = [*group(0, 0.0, 0.1), *group(1, 0.0, 1.0), *group(2, 0.0, 0.5)]
    assert [
        own[0].task.id for own in with_reused(Reuse(2, 1), (), trained, step=0, seed=0).kept
    ] == ["t/1", "t/2"]


@pytest.mark.parametrize("reuse", [Reuse(), Reuse(0, 5), Reuse(5, 0)])
def test_a_bound_of_zero_is_off(reuse):
    trained = [*group(0, 0.0, 1.0), *group(1, 1.0, 1.0)]
    assert with_reused(reuse, (tuple(group(2, 0.0, 1.0)),), trained, step=0, seed=0) == (
        trained,
        (),
        {},
    )


def test_kept_groups_survive_a_checkpoint_without_the_rows_of_their_tasks():
    kept = with_reused(
        Reuse(9, 2), (), [*group(0, 0.0, 1.0), *group(1, 0.5, 1.0)], step=0, seed=0
    ).kept
    saved = [pack_rollouts(group) for group in kept]
    assert unpack_kept(saved, TASKS) == kept
    with pytest.raises(DataError, match=r"'t/0'.*restore task.path"):
        unpack_kept(saved, TASKS[1:])


@pytest.mark.slow
def test_what_has_nothing_to_use_again_is_refused():
    for words, said in (
        (["task/reuse=replay", "algorithm=opd", "teacher=start"], "lost to the streams"),
        (
            ["task/reuse=replay", "algorithm=sft", "batch.group_size=1", "kl=none"],
            "task/reuse: algorithm=sft samples nothing",
        ),
        (
            ["task/sampler=pools", "algorithm=sft", "batch.group_size=1", "kl=none"],
            "task/sampler=pools: algorithm=sft scores nothing",
        ),
        (["task/sampler=pools", "task.sampler.hard=0"], "task.sampler.hard=0: must be"),
        (["task/reuse=replay", "algorithm=dapo"], "max_refills=4 every group .* has different"),
        (
            ["task/reuse=replay", "asynchrony=lag", "asynchrony.staleness=8"],
            "task.reuse.staleness=8: groups are 8 steps old",
        ),
        (
            [
                "task/reuse=replay",
                "schedule=on_reward",
                "+reward@schedule.phases.refine.reward=format",
            ],
            "task/reuse: schedule.phases changes how groups are sampled or scored",
        ),
        (
            ["task/reuse=replay", f"+schedule.numbers.reward.terms.task.weight={FALLING}"],
            "task/reuse: reward.terms.task.weight changes",
        ),
        (["task/sampler=pools", "task.sampler.hrd=1"], "task.sampler.hrd"),
    ):
        with pytest.raises(ConfigError, match=said):
            experiment(compose(words))


@pytest.mark.slow
def test_sampler_and_reuse_are_the_runs_whatever_gives_the_tasks():
    """Python objects in place of options, tasks as a list, and a mixture, whose factory is no
    partial."""
    own = [*TASKS[:1], TASKS[1]._replace(answer="4", reward="numeric")]
    x = rlkit.experiment(
        "task/reuse=replay", "evaluation.n=0", task=own, task__sampler=variance_sampler(explore=0.3)
    )
    assert (x.sampler.explore, x.reuse.groups, x.staleness, list(x.task(split="train"))) == (
        0.3,
        64,
        8,
        own,
    )
    assert x.overrides is None and x.config["task"]["sampler"]["explore"] == 0.3
    mixed = experiment(compose(["task=mixture", "task/sampler=pools", "task.sampler.hard=0.5"]))
    assert (
        mixed.sampler.name == "pools"
        and mixed.sampler.weigh.keywords["hard"] == 0.5
        and not mixed.reuse.active
    )


def test_kept_groups_are_drawn_in_proportion_to_their_scores():
    """The scores are 0.0002 and 0.5, so the second is drawn in each of twenty steps."""
    kept = with_reused(
        Reuse(9, 99), (), [*group(0, 0.0, 0.02), *group(1, 0.0, 1.0)], step=0, seed=0
    ).kept
    for step in range(1, 21):
        used = with_reused(Reuse(9, 99), kept, group(2, 0.0, 0.0), step=step, seed=0)
        assert used.trained[0].task.id == "t/1"
