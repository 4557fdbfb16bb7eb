"""The clock of a step: what counts as work of the model and what does not."""

from __future__ import annotations

from types import SimpleNamespace

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


def test_what_sessions_do_between_replies_is_not_the_models(passing):
    """The engine says how long it was busy, and how long it stood still for an answer; the rest of
    a collect is the environment's."""
    figures = {"late_s": 1.0}
    engine, clock = SimpleNamespace(busy_s=10.0, metrics=lambda: figures), monitor.Clock()
    with clock.sampling(engine):
        passing(6)
        engine.busy_s += 4.5
        figures["late_s"] += 0.5
    assert (
        clock.parts
        == {
            "generate": 6.0,
            "environment": 1.5,
            "reward": 0.0,
            "update": 0.0,
            "model": 4.5,
        }
        and clock.late == 0.5
    )


def test_the_time_between_steps_is_that_of_callbacks_without_evaluations(passing):
    clock = monitor.Clock()
    assert clock.following(evaluated=0.0).between == 0.0  # no step has ended yet
    passing(5)
    clock.end()
    passing(3)
    assert clock.following(evaluated=2.0).between == 1.0
