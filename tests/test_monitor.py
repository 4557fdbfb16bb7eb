"""The clock of a step: what counts as work of the model and what does not."""

from __future__ import annotations

import inspect

import pytest

from rlkit.training import metrics as monitor


@pytest.fixture
def passing(monkeypatch):
    """Time passes only where a test says so: a function of seconds."""
    now = [100.0]
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


def test_what_environments_do_between_replies_is_not_the_engines(passing):
    def generate(policy, contexts, seeds, /, *, follow=None):
        passing(3)
        follow(0, "a reply")
        passing(2)
        return [follow(0, "another")]

    def follow(index, reply):
        passing(0.5)
        return index, reply

    clock = monitor.Clock()
    engine = clock.engine(generate)
    assert "follow" in inspect.signature(engine).parameters  # the loop asks for it
    with clock.part("generate"):
        assert engine(None, [()], [0], follow=follow) == [(0, "another")]
    assert clock.parts == {"generate": 6.0, "environment": 1.0, "reward": 0.0, "update": 0.0, "model": 5.0}


def test_an_engine_without_turns_of_its_own_is_called_without(passing):
    def generate(policy, contexts, seeds, /, *, temperature):
        passing(temperature)
        return contexts

    clock = monitor.Clock()
    assert clock.engine(generate)(None, [1, 2], [0, 0], temperature=4) == [1, 2]
    assert clock.parts["model"] == 4.0 and "follow" not in inspect.signature(clock.engine(generate)).parameters


def test_the_time_between_steps_is_that_of_callbacks_without_evaluations(passing):
    clock = monitor.Clock()
    assert clock.following(evaluated=0.0).between == 0.0  # no step has ended yet
    passing(5)
    clock.end()
    passing(3)
    assert clock.following(evaluated=2.0).between == 1.0
