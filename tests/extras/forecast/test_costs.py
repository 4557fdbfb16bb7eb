"""What a run costs here: the arithmetic on synthetic timings, and the lines of `rlkit check`."""

from __future__ import annotations

import re

import pytest

from rlkit.commands.cli import main
from rlkit.extras.forecast.costs import (
    Counts,
    Passes,
    Room,
    Timed,
    count,
    count_evaluations,
    expect_drawn,
    extend_line,
    forecast_peak,
    scale_passes,
    size_room,
)
from rlkit.extras.forecast.timing import lengthen_rollouts
from rlkit.types import Rollout, Step, Task

STEP = Counts(groups=4, size=8, prompt=100, later=10, drawn=50)


def step(prompt, reply, kept=0):
    ids = tuple(range(reply))
    return Step((), (7,) * prompt, ids, (-1.0,) * reply, "stop", kept=kept)


def rollout(group, sample, *steps, truncation=""):
    return Rollout(Task("t", ()), steps, group=group, sample=sample, truncation=truncation)


def sampling_s(of):
    """3 ms a token read, 10 a token drawn behind the first of each rollout."""
    return 0.003 * of.read + 0.010 * of.rollouts * (of.drawn - 1)


def test_a_prompt_counts_once_a_group_and_later_turns_once_a_rollout():
    own = [
        rollout(0, 0, step(100, 20), step(10, 4)),
        rollout(0, 1, step(100, 30)),
        rollout(1, 0, step(60, 6)),
        rollout(1, 1, step(60, 8), step(14, 2)),
    ]
    assert count(own) == Counts(2, 2, 80, 6, 17.5)
    assert count(own).read == 160 + 24 and count(own).packed == 160 + 24 + 70


@pytest.mark.parametrize(
    "truncation, share, expected",
    [("", None, 20), ("length", None, 100), ("length", 0.1, 20), ("context", None, 20)],
    ids=str,
)
def test_a_reply_that_was_cut_counts_as_half_of_the_limit(truncation, share, expected):
    own = [rollout(0, 0, step(9, 20), truncation=truncation)]
    assert expect_drawn(own, 200, share) == expected


def test_a_reply_cut_at_the_limit_of_the_run_keeps_its_length():
    assert expect_drawn([rollout(0, 0, step(9, 20), truncation="length")], 20) == 20


def test_linear_costs_are_found_again():
    """Timed with two of four prompts, and with 1 and 5 tokens a reply of 50."""
    few = STEP._replace(groups=2, later=0)
    short, long = (Timed(of, sampling_s(of)) for of in (few._replace(drawn=n) for n in (1, 5)))
    updates = tuple(Timed(of, 0.5 + 0.002 * of.packed) for of in (STEP._replace(groups=1), few))
    scoring = tuple(Timed(of, 0.001 * of.packed) for of, _ in updates)
    evaluation = Timed(Counts(10, 1, 100, 0, 5), 4.0)
    evaluated = Counts(200, 1, 100, 0, 50)
    passes = Passes((short, long), scoring, updates, evaluation)
    costs = scale_passes(passes, STEP, evaluated, steps=100)
    assert costs.sampling == pytest.approx(sampling_s(STEP))
    assert costs.prefill == pytest.approx(0.003 * STEP.read)
    assert costs.scoring == pytest.approx(0.001 * STEP.packed)
    assert costs.scoring + costs.update == pytest.approx(0.5 + 0.002 * STEP.packed)
    assert costs.evaluation == pytest.approx(200 * (0.4 + 0.010 * 45))
    assert costs.run == pytest.approx(100 * costs.step + costs.evaluation)


def test_a_step_that_was_timed_whole_costs_what_it_took():
    """Whatever the shorter passes say: here they are slower than the whole step."""
    whole = tuple(Timed(STEP._replace(groups=n), seconds) for n, seconds in ((1, 9.0), (4, 5.0)))
    short = Timed(STEP._replace(drawn=1, later=0), 7.0)
    costs = scale_passes(
        Passes((short, Timed(STEP, 6.0)), (Timed(STEP, 0.0),) * 2, whole, None), STEP, STEP, 1
    )
    assert (costs.sampling, costs.update, costs.evaluation) == (6.0, 5.0, 0.0)


@pytest.mark.parametrize(
    "small, expected",
    [(1.0, 40.0), (15.0, 30.0), (25.0, 20.0)],
    ids=["steeper than a line through zero", "a fixed part", "falling"],
)
def test_a_line_through_noise_stays_between_a_constant_and_a_proportion(small, expected):
    half, whole, double = (STEP._replace(groups=n) for n in (1, 2, 4))
    assert extend_line(Timed(half, small), Timed(whole, 20.0), double.packed) == expected


def test_room_follows_the_limits_of_the_run():
    """32 rollouts of 160 tokens in two minibatches: 2,560 tokens unshared, 1,160 packed."""
    limits = {"micro": 10_000, "vocabulary": 1000, "chunk": 10**9, "rows": 256}
    room = size_room(STEP, minibatches=2, **limits)
    assert room == Room(STEP.packed / 2, 16 * 50 * 1000, STEP.packed)
    group = 100 + 8 * 60 + 7 * 100 / 8  # a shared token counts an eighth
    part = size_room(STEP, minibatches=2, **limits | {"micro": group, "chunk": 5000, "rows": 8})
    assert part == pytest.approx(Room(STEP.packed / 4, 5000, STEP.packed / 4))
    one = size_room(STEP, minibatches=2, **limits | {"micro": 1})  # a rollout is never cut
    assert one.tokens == pytest.approx(STEP.packed / 4 * STEP.row / group)


def test_memory_grows_from_what_was_measured_and_never_shrinks():
    peak = forecast_peak(1000.0, Room(10, 50, 7), Room(30, 20, 8), Room(2.0, 9.0, 5.0))
    assert peak == 1000 + 20 * 2 + 5


@pytest.mark.parametrize("steps, every, validation", [(20, 5, 5), (21, 5, 6), (20, 0, 0)])
def test_evaluations_are_counted_as_a_run_makes_them(steps, every, validation):
    """Before the first step, after every n-th, and after the last; test problems twice."""
    assert count_evaluations(steps, every) == (validation, 2)


def test_longer_replies_of_two_samples_differ():
    """Equal ones would be packed into one, and an update would look cheap."""
    own = [rollout(0, sample, step(9, 3), truncation="length") for sample in range(2)]
    first, second = lengthen_rollouts(own, 8, vocabulary=50)
    assert first.steps[-1].response_ids == (0, 1, 2, 0, 1, 2, 0, 1)
    assert second.steps[-1].response_ids == (0, 1, 2, 1, 2, 3, 1, 2)
    assert len(second.steps[-1].logprobs) == 8
    (ended,) = lengthen_rollouts([rollout(0, 0, step(9, 3))], 8, vocabulary=50)
    assert len(ended.steps[-1].response_ids) == 3


@pytest.mark.slow
def test_check_says_what_the_run_costs(capsys):
    words = [
        "task.max_samples=60",
        "batch.prompts=4",
        "evaluation.every=10",
        "check.reply_share=0.1",
    ]
    assert main(["check", *words]) == 0
    lines = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", capsys.readouterr().out, re.M))
    assert "(given); check.prompt_tokens and check.reply_share change them" in lines["lengths"]
    spent = re.match(
        r"about ([\d.]+) s on 1 thread: sampling .* s, scoring .* s, ", lines["a step"]
    )
    assert spent and 0.01 < float(spent[1]) < 60 and "(32 rollouts, " in lines["a step"]
    assert lines["the run"].startswith("20 steps, about ") and "evaluation" in lines["the run"]
    assert re.match(r"about [\d.]+ [GM]iB at its peak \(weights ", lines["memory"])


def test_turns_are_measured_here(capsys):
    assert main(["check", "check.turns=2"]) == 2
    assert "belongs to check.device" in capsys.readouterr().err
