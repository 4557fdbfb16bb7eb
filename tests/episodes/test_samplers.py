"""Samplers of problems: what they prefer, that none is frozen, and that a state gives the same
draws whenever it is taken up."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from parametrise import each
from rlkit.episodes.samplers import (
    ASKED,
    FAILURES,
    LAST,
    SUCCESSES,
    TaskSampler,
    compute_chances,
    measure_sampler,
    pool_sampler,
    prioritised_sampler,
    uniform_sampler,
    unsolved_sampler,
    variance_sampler,
    with_outcomes,
)
from rlkit.episodes.stream import StreamState, take, take_again
from rlkit.errors import ConfigError, DataError
from rlkit.types import Rollout, Task

TASKS = [Task(f"t/{i}", ()) for i in range(20)]
MIXED = [Task(f"{'ab'[i % 2]}/{i // 2}", (), part="ab"[i % 2]) for i in range(20)]
SAMPLERS = [pool_sampler(), variance_sampler(), prioritised_sampler(retest=3), unsolved_sampler()]


def rows(*groups):
    """A table of problems with these (successes, failures, last mean)."""
    table = torch.zeros(len(groups), 4, dtype=torch.float64)
    for row, (successes, failures, last) in zip(table, groups, strict=True):
        row[SUCCESSES], row[FAILURES], row[LAST] = successes, failures, last
    return table


def step(sampler, tasks, state, n, rates, seed=0):
    """The tasks of one step, and the state after groups of four, of which so many succeed as
    `rates` says of the task."""
    drawn, state = take(tasks, state, n, seed=seed, sampler=sampler)
    played = [
        Rollout(task, (), group=k, reward=float(j < rates[task.id]))
        for k, task in enumerate(drawn)
        for j in range(4)
    ]
    return drawn, state._replace(sampler=with_outcomes(sampler, state.sampler, played))


def run(sampler, steps, n, rates, tasks=TASKS):
    counts, state = Counter(), StreamState()
    for _ in range(steps):
        drawn, state = step(sampler, tasks, state, n, rates)
        assert len({task.id for task in drawn}) == n  # no problem twice in a step
        counts.update(task.id for task in drawn)
    return counts, state


def test_weights_are_those_of_the_sources():
    known = rows((0, 0, -1.0), (0, 8, 0.0), (4, 4, 0.5), (6, 2, 0.75), (8, 0, 1.0))
    assert pool_sampler().weigh(known).tolist() == [1.0, 0.2, 1.0, 1.0, 0.2]
    # Beta(0.5, 0.5), Beta(0.5, 8.5), Beta(4.5, 4.5): E[p(1-p)] = ab / ((a+b)(a+b+1))
    assert variance_sampler().weigh(known)[:3].tolist() == pytest.approx([0.125, 4.25 / 90, 0.225])
    assert prioritised_sampler().weigh(known).tolist() == [0.1, 0.0, 0.25, 0.1875, 0.0]
    assert unsolved_sampler().weigh(known).tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


@each(
    "sampler",
    [
        pool_sampler(),
        variance_sampler(),
        variance_sampler(explore=1.0),
        TaskSampler("own", lambda r: r[:, LAST], explore=0.2),
    ],
)
def test_every_problem_has_a_positive_probability_whatever_was_scored(sampler):
    """P(i) ≥ explore / n, and > 0; pools have a smallest weight instead."""
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 50):
        counts = torch.randint(0, 40, (n, 2), generator=generator).tolist()
        found = compute_chances(
            sampler, rows(*((a, b, a / (a + b) if a + b else 0.0) for a, b in counts))
        )
        assert float(found.sum()) == pytest.approx(1) and bool((found > 0).all())
        assert bool((found >= sampler.explore / n - 1e-12).all())


def test_retests_ask_every_problem_in_time_though_one_is_always_preferred():
    """n problems, a retest every third draw: whatever 3n further draws are, each problem is among
    them."""
    rates = {task.id: 2 if task.id == "t/7" else 0 for task in TASKS}
    sampler, state, last = prioritised_sampler(retest=3), StreamState(), dict.fromkeys(rates, 0)
    for now in range(1, 200):
        drawn, state = step(sampler, TASKS, state, 1, rates)
        last[drawn[0].id] = now
        assert max(now - before for before in last.values()) <= 3 * len(TASKS) + len(TASKS)
    counts, _ = run(sampler, 100, 2, rates)
    assert counts["t/7"] > 60 and min(counts.values()) >= 2


def test_problems_with_signal_are_asked_more_often_and_a_solved_one_no_more():
    rates = {task.id: 2 if int(task.id[2:]) < 2 else 0 for task in TASKS}
    for sampler, least in (
        (pool_sampler(), 1.5),
        (variance_sampler(), 1.5),
        (prioritised_sampler(), 4),
    ):
        counts, _ = run(sampler, 100, 1, rates)
        assert counts["t/0"] + counts["t/1"] > least * 10, sampler.name  # uniform: 10
    counts, state = run(
        unsolved_sampler(), 100, 1, {task.id: 4 if task.id != "t/3" else 0 for task in TASKS}
    )
    assert (
        all(counts[task.id] == 1 for task in TASKS if task.id != "t/3")
        and measure_sampler(state.sampler)["sampler/seen"] == 1.0
    )


@each("sampler", SAMPLERS)
def test_draws_add_up_and_a_mixture_keeps_its_turns(sampler):
    _, state = step(sampler, MIXED, StreamState(), 6, dict.fromkeys([task.id for task in MIXED], 1))
    whole, end = take(MIXED, state, 7, seed=0, sampler=sampler)
    first, between = take(MIXED, state, 3, seed=0, sampler=sampler)
    rest, again = take(MIXED, between, 4, seed=0, sampler=sampler)
    assert (
        first + rest == whole
        and again.sampler["step"] == end.sampler["step"]
        and again[:2] == end[:2]
    )
    turns, _ = take(MIXED, state._replace(sampler=None), 7, seed=0, sampler=uniform_sampler())
    assert [task.part for task in whole] == [task.part for task in turns]


def test_a_problem_that_a_mixture_repeats_is_one_problem():
    doubled = MIXED + [MIXED[1]] * 10
    rates = dict.fromkeys([task.id for task in MIXED], 2)
    for sampler in SAMPLERS:
        state = StreamState()
        for _ in range(5):
            drawn, state = step(sampler, doubled, state, 4, rates)
            assert len({task.id for task in drawn}) == 4
        assert not state.sampler["table"][20:, ASKED].any()


def test_a_state_is_that_of_its_tasks_and_gives_the_tasks_of_its_step_again():
    rates = dict.fromkeys([task.id for task in TASKS], 2)
    _, before = step(variance_sampler(), TASKS, StreamState(), 3, rates)
    drawn, after = step(variance_sampler(), TASKS, before, 3, rates)
    assert take_again(TASKS, before, after, 3, seed=0) == drawn
    with pytest.raises(DataError, match="there are 19"):
        take(TASKS[1:], after, 1, seed=0, sampler=variance_sampler())
    with pytest.raises(DataError, match="no longer in"):
        take_again(TASKS[1:], before, after, 3, seed=0)
    assert take(TASKS, after, 9, seed=0)[1] == StreamState(0, 15)  # back to the order of the epochs


def test_rewards_of_any_scale_count_as_successes_between_0_and_1_and_unscored_ones_not_at_all():
    sampler = variance_sampler(memory=0.5)
    drawn, state = take(TASKS, StreamState(), 1, seed=0, sampler=sampler)
    for rewards, wanted in (
        ((-1.0, 3.0, 0.25, None), (1.25, 1.75, 1.25 / 3)),
        ((1.0,), (1.625, 0.875, 1.0)),
        ((None,), (1.625, 0.875, 1.0)),
    ):
        played = [Rollout(drawn[0], (), reward=reward) for reward in rewards]
        known = with_outcomes(sampler, {**state.sampler, "step": [TASKS.index(drawn[0])]}, played)
        assert known["table"][TASKS.index(drawn[0]), :3].tolist() == pytest.approx(wanted)
        state = state._replace(sampler=known)


def test_weights_that_are_none_are_refused():
    with pytest.raises(
        ConfigError, match=r"task\.sampler=own: its weights must be 20 numbers of at least 0"
    ):
        take(
            TASKS, StreamState(), 1, seed=0, sampler=TaskSampler("own", lambda rows: rows[:, LAST])
        )
