"""The clock of a step: what counts as work of the model and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import rlkit
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
    with clock.measure_sampling(engine):
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
    assert clock.make_following(evaluated=0.0).between == 0.0  # no step has ended yet
    passing(5)
    clock.end()
    passing(3)
    assert clock.make_following(evaluated=2.0).between == 1.0


class Counting:
    """An engine that wraps another one, with the methods of the contract and a figure of its
    own."""

    def __init__(self, inner):
        self.inner = inner
        self.asked = 0

    @property
    def busy_s(self):
        return self.inner.busy_s

    async def generate(self, key, prompt_ids, seed, params):
        self.asked += 1
        return await self.inner.generate(key, prompt_ids, seed, params)

    def release(self, key):
        self.inner.release(key)

    async def load(self, weights, version):
        await self.inner.load(weights, version)

    def metrics(self):
        return {**self.inner.metrics(), "asked": self.asked}


@pytest.mark.slow
def test_an_engine_that_wraps_another_logs_figures_of_its_own():
    """A step's row has the engine's own figures, and those of perf/ under their names alone."""
    x = rlkit.experiment(
        generation__engine=Counting(rlkit.engines.Cached()),
        generation__max_new_tokens=4,
        batch__prompts=2,
        batch__group_size=2,
        trainer__steps=2,
        trainer__threads=1,
        evaluation__n=0,
        logger="none",
    )
    rows = rlkit.train(x).metrics
    assert rows[1]["engine/asked"] - rows[0]["engine/asked"] == 4
    assert [name for name in rows[-1] if name.startswith("engine/")] == ["engine/asked"]
    assert rows[-1]["perf/model_s"] > 0 == rows[-1]["perf/captured_shapes"]
    assert rows[-1]["perf/late_s"] >= 0


@pytest.mark.parametrize("given", [None, {"asked": "four"}, [1]])
def test_figures_of_an_engine_that_are_no_numbers_are_refused(given):
    engine = SimpleNamespace(metrics=lambda: given)
    with (
        pytest.raises(rlkit.errors.EngineError, match=r"metrics\(\) of generation\.engine"),
        monitor.Clock().measure_sampling(engine),
    ):
        pass
