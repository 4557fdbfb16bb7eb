"""Scheduled numbers: values at the ends, and the experiment of a step."""

from __future__ import annotations

import pytest

from rlkit.schedules import Schedule, at, cosine, decay, linear


@pytest.mark.parametrize("shape", [linear, cosine])
def test_ends_and_beyond(shape):
    assert shape(0, start=2.0, end=1.0, steps=10) == pytest.approx(2.0)
    assert shape(10, start=2.0, end=1.0, steps=10) == pytest.approx(1.0)
    assert shape(99, start=2.0, end=1.0, steps=10) == pytest.approx(1.0)
    assert 1.0 < shape(5, start=2.0, end=1.0, steps=10) < 2.0


@pytest.mark.parametrize(
    "path, read",
    [
        ("kl.coef", lambda x: x.kl.coef),
        ("optimizer.lr", lambda x: x.optimizer.keywords["lr"]),
        ("algorithm.policy_loss.clip_high", lambda x: x.algorithm.policy_loss.keywords["clip_high"]),
        ("reward.terms.task.weight", lambda x: x.reward.terms["task"].weight),
        ("generation.temperature", lambda x: x.generation.temperature),
    ],
)
def test_any_number_of_any_part_follows_its_schedule(experiment, path, read):
    moving = experiment._replace(schedule=Schedule({path: lambda step: 0.25 + step}))
    assert read(at(moving, 0)) == 0.25
    assert read(at(moving, 1)) == 1.25
    assert read(moving) == read(experiment)  # the experiment itself is never edited


def test_whole_numbers_stay_whole(experiment):
    moving = experiment._replace(schedule=Schedule({"batch.group_size": lambda step: 4.0}))
    assert at(moving, 0).batch.group_size == 4 and isinstance(at(moving, 0).batch.group_size, int)


@pytest.mark.parametrize("path", ["kl.cof", "nothing", "kl.name", "kl.coef.deeper"])
def test_a_path_that_binds_no_number_is_refused(experiment, path):
    with pytest.raises(KeyError, match=path):
        at(experiment._replace(schedule=Schedule({path: lambda step: 1.0})), 0)


def test_decay_starts_from_the_configured_number(experiment):
    """An override of optimizer.lr moves the whole schedule."""
    from functools import partial

    lr = experiment.optimizer.keywords["lr"]
    moving = experiment._replace(schedule=Schedule({"optimizer.lr": partial(decay, to=0.1, steps=10)}))
    assert [at(moving, s).optimizer.keywords["lr"] for s in (0, 10, 99)] == pytest.approx([lr, 0.1 * lr, 0.1 * lr])


def test_the_command_line_reaches_into_a_schedule():
    """A dotted key cannot be named in an override; the shipped options nest."""
    from rlkit.compose import compose, experiment

    x = experiment(compose(["schedule.numbers.optimizer.lr.to=0.5", "schedule.numbers.optimizer.lr.steps=2"]))
    lr = x.optimizer.keywords["lr"]
    assert at(x, 2).optimizer.keywords["lr"] == pytest.approx(0.5 * lr)


def test_dotted_and_nested_paths_are_the_same():
    f = lambda step: 1.0  # noqa: E731
    assert Schedule({"kl.coef": f, "optimizer": {"lr": f}}).paths == {"kl.coef": f, "optimizer.lr": f}
