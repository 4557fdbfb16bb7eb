"""The prompt stream: each task once an epoch, resumable by two numbers, the same however it is
drawn."""

from __future__ import annotations

import pytest

from rlkit.episodes.stream import StreamState, order, take
from rlkit.errors import DataError
from rlkit.types import Task

TASKS = [Task(f"t/{i}", ()) for i in range(7)]

START = StreamState()


START = StreamState()


def drawn(
    sizes: list[int], seed: int = 0, state: StreamState = START
) -> tuple[list[str], StreamState]:
    ids: list[str] = []
    for size in sizes:
        tasks, state = take(TASKS, state, size, seed=seed)
        ids += [t.id for t in tasks]
    return ids, state


def test_order_is_a_permutation_that_seed_and_epoch_fix():
    assert list(order(0, 0, 7)) == [
        0,
        6,
        2,
        3,
        4,
        5,
        1,
    ]  # pinned: a resumed run must see the same order on every machine
    assert sorted(order(3, 4, 100)) == list(range(100))
    assert len({tuple(order(seed, epoch, 20)) for seed in range(4) for epoch in range(4)}) == 16


def test_every_task_is_drawn_once_in_each_epoch_also_where_a_draw_crosses_the_border():
    ids, state = drawn([3, 3, 3, 3, 2])
    assert sorted(ids[:7]) == sorted(ids[7:]) == [t.id for t in TASKS]
    assert ids[:7] != ids[7:]
    assert state == StreamState(epoch=1, position=7)


def test_draws_add_up():
    assert drawn([5, 0, 6, 9]) == drawn([20]) == drawn([1] * 20)


def test_a_draw_may_exceed_the_tasks():
    ids, state = drawn([16])
    assert [ids.count(t.id) >= 2 for t in TASKS] == [True] * 7 and state == StreamState(2, 2)


def test_a_saved_state_goes_on_where_it_stood():
    whole, _ = drawn([4, 4, 4])
    first, state = drawn([4])
    assert first + drawn([4, 4], state=StreamState(*tuple(state)))[0] == whole


def test_seeds_differ():
    assert drawn([7], seed=0)[0] != drawn([7], seed=1)[0]


def test_no_tasks_and_a_state_beyond_them_are_refused():
    with pytest.raises(DataError, match="no tasks"):
        take([], StreamState(), 1, seed=0)
    with pytest.raises(DataError, match=r"stands at 9 of 7 tasks.*changed"):
        take(TASKS, StreamState(0, 9), 1, seed=0)
