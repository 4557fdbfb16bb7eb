"""Schedules: the functions of the step, conditions, numbers that follow measurements, and the
phases of a run."""

from __future__ import annotations

import itertools
import json
import math
import re
from functools import partial

import pytest

from parametrise import cases, each, presets
from rlkit.config.compose import compose, conf_dir, find_length_keys
from rlkit.config.compose import experiment as experiment_of
from rlkit.config.problems.schedules import schedule_problems, schedule_warnings
from rlkit.training.schedules import (
    Condition,
    Phase,
    Progress,
    Schedule,
    adaptive,
    adaptive_entropy,
    advance,
    constant,
    cosine,
    count_streak,
    decay,
    explain_new_length,
    find_unmeasured,
    linear,
    list_phases,
    list_values,
    read_condition,
    resolve_schedules,
    start,
)
from rlkit.types import Controller

NAN = float("nan")


# ---------------------------------------------------------------------------- functions of the step


@pytest.mark.parametrize("shape", [linear, cosine])
@pytest.mark.parametrize("ends", [(2.0, 1.0), (1e-6, 3.0), (-1.0, -2.0)])
def test_ends_and_beyond_and_one_direction(shape, ends):
    found = [shape(s, start=ends[0], end=ends[1], steps=10) for s in (*range(11), 99)]
    assert found[0] == pytest.approx(ends[0], rel=1e-12) and found[10] == found[
        11
    ] == pytest.approx(ends[1], rel=1e-12)
    assert (
        found[:11] == sorted(found[:11], reverse=ends[1] < ends[0]) and len(set(found[:11])) == 11
    )


@pytest.mark.parametrize(
    "function, expected",
    [
        (partial(constant, value=3.0), [3.0, 3.0, 3.0]),
        (partial(linear, start=1.0, end=0.0, steps=4), [1.0, 0.75, 0.5]),
        (partial(cosine, start=1.0, end=0.0, steps=4), [1.0, (1 + math.sqrt(0.5)) / 2, 0.5]),
    ],
)
def test_values_by_hand(function, expected):
    assert [function(step) for step in range(3)] == pytest.approx(expected)


@each(
    "call, words",
    [
        (lambda: linear(0, start=0.0, end=1.0, steps=0), "steps=0"),
        (lambda: adaptive(start=0.0, target=0.1), "start=0"),
        (lambda: adaptive(start=0.1, target=-0.1), "target=-0.1"),
        (lambda: adaptive(start=0.1, target=NAN), "target=nan"),
        (lambda: adaptive(start=0.1, target=0.1, horizon=0), "horizon=0"),
        (lambda: adaptive(start=0.1, target=0.1, horizon=10_000), "horizon=10000.*share"),
        (
            lambda: adaptive(start=0.1, target=0.1).update({"value": 0.1}, {"kl/ref_k3": 0.1}),
            "steps=None",
        ),
        (lambda: linear(0, start=0.0, end=1.0), "steps=None"),
        (lambda: adaptive(start=0.1, target=0.1, limit=1.0), "limit=1"),
        (lambda: adaptive_entropy(step=0.0), "step=0"),
        (lambda: adaptive_entropy(start=2.0), "start=2.0.*ascend"),
    ],
)
def test_numbers_out_of_range_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# --------------------------------------------------------------------------------------- conditions


@pytest.mark.parametrize(
    "text, expected",
    [
        ("reward/mean > 0.8 for 5", Condition("reward/mean", ">", 0.8, 5)),
        ("reward/mean>=.8", Condition("reward/mean", ">=", 0.8)),
        (" kl/ref_k3 <= -1e-3  for 2 ", Condition("kl/ref_k3", "<=", -1e-3, 2)),
        ("eval/pass@8 < 3", Condition("eval/pass@8", "<", 3.0)),
    ],
)
def test_conditions_are_read(text, expected):
    assert read_condition(text) == expected


@each(
    "text",
    [
        "",
        "reward/mean",
        "reward/mean > ",
        "> 1",
        "a = 1",
        "a == 1",
        "a > b",
        "a > nan",
        "a > 1 for",
        "a > 1 for 0",
        "a > 1 for 1.5",
        "a>1 b>2",
    ],
)
def test_what_is_no_condition_is_answered_with_the_grammar(text):
    with pytest.raises(ValueError, match=r"METRIC > NUMBER for N"):
        read_condition(text)


@pytest.mark.parametrize(
    "sign, held", [(">", [0, 0, 1]), (">=", [0, 1, 1]), ("<", [1, 0, 0]), ("<=", [1, 1, 0])]
)
def test_every_operator(sign, held):
    assert [
        count_streak(read_condition(f"a {sign} 2"), 0, {"a": a}) for a in (1.0, 2.0, 3.0)
    ] == held


def test_nan_breaks_a_row_and_a_step_without_the_metric_does_not():
    seen, row = [{"a": 2.0}, {}, {"a": 2.0}, {"a": NAN}, {}, {"a": 2.0}, {"a": 0.0}], []
    for metrics in seen:
        row.append(count_streak(read_condition("a > 1 for 3"), row[-1] if row else 0, metrics))
    assert row == [1, 1, 2, 0, 0, 1, 0]


# ----------------------------------------------------------------- numbers that follow measurements


def follow(controller: Controller, measured: list[dict[str, float]]) -> list[float]:
    """The value of the first step, and of each after it."""
    states = [controller.init()]
    for metrics in measured:
        states.append(controller.update(states[-1], metrics))
    return [state["value"] for state in states]


def test_adaptive_by_hand():
    """Ziegler et al.: the error is cut to ±0.2; one step of a horizon of ten moves a tenth of
    it."""
    made = adaptive(start=1.0, target=0.1, horizon=0.1, steps=100)
    found = follow(made, [{"kl/ref_k3": kl} for kl in (0.1, 0.11, 5.0, 0.0, NAN)] + [{}])
    assert found == pytest.approx(
        [1.0, 1.0, 1.01, 1.01 * 1.02, 1.01 * 1.02 * 0.98, 1.01 * 1.02 * 0.98, 1.01 * 1.02 * 0.98]
    )
    short = adaptive(
        start=1.0, target=0.1, steps=5
    )  # a horizon of half a step: never more than the whole limit
    assert follow(short, [{"kl/ref_k3": 0.0}] * 99)[-1] == pytest.approx(
        0.8**99
    )  # never 0 or negative


def test_adaptive_entropy_by_hand():
    made = adaptive_entropy(start=0.0, target=0.2, step=0.3, high=0.5)
    found = follow(made, [{"policy/entropy": e} for e in (0.3, 0.1, 0.1, 0.2, NAN, 0.3)] + [{}])
    assert found == pytest.approx([0.0, 0.0, 0.3, 0.5, 0.5, 0.5, 0.2, 0.2])


# -------------------------------------------------------------------------------- numbers of a step


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, read",
    [
        ("kl.coef", lambda x: x.kl.coef),
        ("optimizer.lr", lambda x: x.optimizer.keywords["lr"]),
        (
            "algorithm.policy_loss.clip_high",
            lambda x: x.algorithm.policy_loss.keywords["clip_high"],
        ),
        ("reward.terms.task.weight", lambda x: x.reward.terms["task"].weight),
        ("generation.temperature", lambda x: x.generation.temperature),
        (
            "optimizer.eps",
            lambda x: x.optimizer.keywords["eps"],
        ),  # in no YAML: a default of AdamW's
    ],
)
def test_any_number_of_any_part_follows_its_schedule(experiment, path, read):
    moving = experiment._replace(schedule=Schedule({path: lambda step: 0.25 + step}))
    assert read(resolve_schedules(moving, Progress(0))) == 0.25
    assert read(resolve_schedules(moving, Progress(1))) == 1.25
    assert list_values(moving, Progress(1)) == {path: 1.25}
    if path != "optimizer.eps":
        assert read(moving) == read(experiment)  # the experiment itself is never edited


def test_numbers_of_a_reference_follow_too(experiment):
    from rlkit.training.references import ema

    moving = experiment._replace(
        reference=ema(decay=0.9),
        schedule=Schedule({"reference.update.decay": lambda step: step / 10}),
    )
    assert resolve_schedules(moving, Progress(5)).reference.update.keywords == {"decay": 0.5}


def test_whole_numbers_stay_whole(experiment):
    moving = experiment._replace(
        schedule=Schedule({"batch.group_size": partial(linear, start=3, end=10, steps=4)})
    )
    found = [resolve_schedules(moving, Progress(step)).batch.group_size for step in range(5)]
    assert found == [3, 5, 6, 8, 10] and {type(n) for n in found} == {int}


@pytest.mark.parametrize("first", [1, 1.0])
def test_a_number_declared_as_float_is_not_rounded(experiment, first):
    """kl.coef=1 on the command line is a whole number, and its schedule is not."""
    decay = partial(linear, start=1.0, end=0.0, steps=4)
    moving = experiment._replace(
        kl=experiment.kl._replace(coef=first),
        algorithm=experiment.algorithm._replace(
            policy_loss=partial(experiment.algorithm.policy_loss, clip_high=first)
        ),
        schedule=Schedule({"kl.coef": decay, "algorithm.policy_loss.clip_high": decay}),
    )
    now = resolve_schedules(moving, Progress(1))
    assert now.kl.coef == now.algorithm.policy_loss.keywords["clip_high"] == 0.75


@pytest.mark.parametrize(
    "path",
    [
        "kl.cof",
        "nothing",
        "kl.name",
        "kl.coef.deeper",
        "kl.importance_weight",
        "algorithm.target_kl",
    ],
)
def test_a_path_that_binds_no_number_is_refused(experiment, path):
    with pytest.raises(KeyError, match=path):
        resolve_schedules(
            experiment._replace(schedule=Schedule({path: lambda step: 1.0})), Progress()
        )


def test_decay_starts_from_the_configured_number(experiment):
    """An override of optimizer.lr moves the whole schedule."""
    lr = experiment.optimizer.keywords["lr"]
    moving = experiment._replace(
        schedule=Schedule({"optimizer.lr": partial(decay, to=0.1, steps=10)})
    )
    assert [
        resolve_schedules(moving, Progress(s)).optimizer.keywords["lr"] for s in (0, 10, 99)
    ] == pytest.approx([lr, 0.1 * lr, 0.1 * lr])


def test_the_command_line_reaches_into_a_schedule():
    """A dotted key cannot be named in an override; the shipped options nest."""
    from rlkit.config.compose import compose, experiment

    x = experiment(
        compose(["schedule.numbers.optimizer.lr.to=0.5", "schedule.numbers.optimizer.lr.steps=2"])
    )
    lr = x.optimizer.keywords["lr"]
    assert resolve_schedules(x, Progress(2)).optimizer.keywords["lr"] == pytest.approx(0.5 * lr)


def test_dotted_and_nested_paths_are_the_same():
    f = lambda step: 1.0  # noqa: E731
    assert Schedule({"kl.coef": f, "optimizer": {"lr": f}}).paths == {
        "kl.coef": f,
        "optimizer.lr": f,
    }


def switch(metric: str, before: float, after: float) -> Controller:
    """`before` until the metric is above 0, then `after` for good."""
    return Controller(
        init=partial(dict, value=before), update=partial(_switched, metric=metric, after=after)
    )


def _switched(state, metrics, *, metric, after):
    return {"value": after} if metrics.get(metric, NAN) > 0 else dict(state)


@pytest.mark.parametrize(
    "place",
    [
        lambda x, c: x._replace(kl=x.kl._replace(coef=c), schedule=Schedule()),
        lambda x, c: x._replace(schedule=Schedule({"kl": {"coef": c}})),
    ],
)
def test_a_controller_in_place_of_a_number_or_in_the_schedule(experiment, place):
    x = place(experiment, switch("a", 0.5, 0.25))
    progress = start(x)
    assert resolve_schedules(x, progress).kl.coef == 0.5 and list_values(x, progress) == {
        "kl.coef": 0.5
    }
    progress = advance(x, progress, {"a": 1.0})
    assert (
        progress.step == 1
        and resolve_schedules(x, progress).kl.coef == 0.25
        and list_values(x, progress) == {"kl.coef": 0.25}
    )


def test_a_controller_is_found_in_any_part_and_keeps_whole_numbers_whole(experiment):
    loss = partial(experiment.algorithm.policy_loss, clip_high=switch("a", 0.2, 0.3))
    algorithm = experiment.algorithm._replace(entropy_coef=switch("a", 0.0, 0.1), policy_loss=loss)
    x = experiment._replace(
        algorithm=algorithm,
        generation=experiment.generation._replace(max_new_tokens=switch("a", 8, 16)),
        schedule=Schedule(),
    )
    now = resolve_schedules(x, advance(x, start(x), {"a": 1.0}))
    assert (
        now.algorithm.entropy_coef == 0.1 and now.algorithm.policy_loss.keywords["clip_high"] == 0.3
    )
    assert now.generation.max_new_tokens == 16 and type(now.generation.max_new_tokens) is int


# ------------------------------------------------------------------------------------------- phases


@pytest.fixture
def three(experiment):
    """10 steps; then until the reward is high thrice; then for good, with a KL of its own."""
    shared, other = experiment.algorithm, experiment.algorithm._replace(name="other")
    return experiment._replace(
        kl=experiment.kl._replace(coef=switch("go", 0.5, 0.25)),
        schedule=Schedule(
            numbers={
                "optimizer.lr": partial(linear, start=0.0, end=1.0, steps=100),
                "generation.temperature": switch("go", 1.0, 2.0),
            },
            phases={
                "a": Phase(shared, until=2, numbers={"batch.prompts": lambda step: 10 + step}),
                "b": Phase(
                    other,
                    until="reward/mean > 0.8 for 2",
                    numbers={"optimizer": {"lr": lambda step: step}},
                ),
                "c": Phase(
                    shared,
                    kl=experiment.kl._replace(name="own", coef=switch("go", 7.0, 8.0)),
                    numbers={"generation.temperature": switch("go", 3.0, 4.0)},
                ),
            },
        ),
    )


METRICS = [
    {"reward/mean": r, "go": g}
    for r, g in [(1, 0), (1, 1), (1, 0), (NAN, 0), (1, 0), (0.9, 0), (0, 0), (0, 1), (0, 0)]
]


def test_a_run_through_its_phases(three):
    progress, seen = start(three), []
    for metrics in [*METRICS, {}]:
        x = resolve_schedules(three, progress)
        seen.append(
            (
                progress.phase,
                x.algorithm.name,
                x.kl.name,
                x.batch.prompts,
                x.optimizer.keywords["lr"],
                x.kl.coef,
                x.generation.temperature,
            )
        )
        progress = advance(three, progress, metrics)
    assert progress.step == 10 and progress.since == 6
    assert seen == [
        (0, "grpo", "k3", 10, 0.0, 0.5, 1.0),
        (0, "grpo", "k3", 11, 0.01, 0.5, 1.0),
        (
            1,
            "other",
            "k3",
            16,
            0.0,
            0.25,
            2.0,
        ),  # shared controllers go on; the phase's own steps count from its start
        (1, "other", "k3", 16, 1.0, 0.25, 2.0),
        (1, "other", "k3", 16, 2.0, 0.25, 2.0),  # nan broke the row
        (1, "other", "k3", 16, 3.0, 0.25, 2.0),
        (
            2,
            "grpo",
            "own",
            16,
            0.06,
            7.0,
            3.0,
        ),  # shared functions count over the whole run; what the phase brings starts anew
        (2, "grpo", "own", 16, 0.07, 7.0, 3.0),
        (2, "grpo", "own", 16, 0.08, 8.0, 4.0),
        (2, "grpo", "own", 16, 0.09, 8.0, 4.0),
    ]


@pytest.mark.parametrize("stop", range(len(METRICS)))
def test_a_saved_progress_has_the_same_future(three, stop):
    progress = start(three)
    for i, metrics in enumerate(METRICS):
        if i == stop:
            again = Progress(**json.loads(json.dumps(progress._asdict())))
            assert again == progress
        progress = advance(three, progress, metrics)
        if i >= stop:
            again = advance(three, again, metrics)
            assert again == progress and list_values(three, again) == list_values(three, progress)


def test_a_metric_that_is_never_measured_is_named(three):
    """A condition on a misspelt metric would never hold, and nobody would know. Only what is in
    force is asked."""
    measured = {"reward/mean": 1.0, "go": 0.0}
    assert not find_unmeasured(three, Progress(phase=1), measured)
    (text,) = find_unmeasured(three, Progress(phase=1), {"reward/means": 1.0, "go": 0.0})
    assert (
        text.startswith("schedule.phases.b.until: waits for 'reward/mean'")
        and "Did you mean 'reward/means'?" in text
    )
    assert [
        t.partition(":")[0] for t in find_unmeasured(three, Progress(phase=2), {"reward/mean": 1.0})
    ] == [
        "kl.coef",
        "generation.temperature",
    ]
    adapted = three._replace(
        kl=three.kl._replace(coef=adaptive(start=0.1, target=0.1, metric="kl/ref_k33"))
    )
    assert find_unmeasured(adapted, Progress(), {"kl/ref_k3": 0.1, "go": 0.0})[0].startswith(
        "kl.coef: waits for 'kl/ref_k33'"
    )


def test_a_held_out_metric_needs_evaluations_on_the_way(three):
    waits = three._replace(
        kl=three.kl._replace(coef=0.5),
        schedule=Schedule({"kl.coef": switch("eval/accuracy", 1, 0)}),
    )
    often = waits._replace(evaluation=waits.evaluation._replace(n=4, every=2))
    assert not schedule_problems(often) and not find_unmeasured(
        often, Progress(), {"reward/mean": 1.0}
    )
    for evaluation in (often.evaluation._replace(every=0), often.evaluation._replace(n=0)):
        (problem,) = schedule_problems(often._replace(evaluation=evaluation))
        assert (
            problem.startswith("kl.coef: waits for 'eval/accuracy'")
            and "evaluation.every" in problem
        )


def test_each_phase_is_an_experiment(three, experiment):
    found = list_phases(three)
    assert list(found) == ["a", "b", "c"] and [x.kl.name for x in found.values()] == [
        "k3",
        "k3",
        "own",
    ]
    assert (
        set(found["a"].schedule.paths)
        == {"optimizer.lr", "generation.temperature", "batch.prompts"}
        and not found["a"].schedule.phases
    )
    assert found["c"].reward is three.reward
    assert list_phases(experiment) == {"": experiment}


@pytest.mark.parametrize(
    "until",
    [lambda metrics: metrics["go"] > 0, lambda metrics, steps: steps == 2, 2, 0.1, "go > 0"],
)
def test_every_kind_of_end(experiment, until):
    algorithm = experiment.algorithm
    x = experiment._replace(
        schedule=Schedule(phases={"a": Phase(algorithm, until=until), "b": Phase(algorithm)})
    )
    progress, seen = start(x), []
    for go in (0, 1, 0, 0):
        progress = advance(x, progress, {"go": go})
        seen.append((progress.phase, progress.since))
    assert seen == [(0, 0), (1, 2), (1, 2), (1, 2)]


def test_two_evaluations_in_a_row_end_a_phase(experiment):
    x = experiment._replace(
        schedule=Schedule(
            phases={
                "a": Phase(experiment.algorithm, until="eval/accuracy > 0.9 for 2"),
                "b": Phase(experiment.algorithm),
            }
        )
    )
    progress = start(x)
    for step in range(1, 11):
        progress = advance(
            x, progress, {"reward/mean": 0.0} | ({"eval/accuracy": 0.95} if step % 5 == 0 else {})
        )
    assert (progress.phase, progress.since) == (1, 10)


def problems_of(experiment, numbers=None, **phases):
    return schedule_problems(experiment._replace(schedule=Schedule(numbers or {}, phases)))


def test_what_cannot_run_is_named(experiment, three):
    a = Phase(experiment.algorithm)
    assert problems_of(experiment, a=a) == schedule_problems(three) == []
    for words, found in {
        "schedule.phases.a: has no end.*schedule.phases.a.until": problems_of(experiment, a=a, b=a),
        "schedule.phases.a.until=0": problems_of(experiment, a=a._replace(until=0), b=a),
        "schedule.phases.a.until=1.5: a share": problems_of(
            experiment, a=a._replace(until=1.5), b=a
        ),
        "schedule.phases.a.until: 'reward' .*METRIC": problems_of(
            experiment, a=a._replace(until="reward"), b=a
        ),
        "schedule.phases.a.reset: 'policy'.*optimizer": problems_of(
            experiment, a=a._replace(reset=["policy"])
        ),
        "schedule.phases.a: is no phase.*~schedule.phases.a": problems_of(experiment, a=None),
        r"schedule.phases.a.kl: must be whole.*\+kl@schedule.phases.a.kl": problems_of(
            experiment, a=a._replace(kl={"coef": 1})
        ),
        "schedule.phases.a.numbers.kl.coef=0.5: is no function": problems_of(
            experiment, a=a._replace(numbers={"kl.coef": 0.5})
        ),
        "schedule.numbers.kl.coef=1: is no function": problems_of(experiment, {"kl": {"coef": 1}}),
        "kl.coef: is set by a controller and by": problems_of(
            experiment._replace(kl=experiment.kl._replace(coef=switch("a", 1, 2))),
            {"kl.coef": lambda step: 1.0},
        ),
    }.items():
        assert len(found) == 1
        assert re.match(words, found[0])


def test_an_end_that_is_never_reached_is_a_warning(experiment):
    a = Phase(experiment.algorithm)
    steps = experiment.trainer.steps
    for until, warned in ((steps - 1, False), (steps, True), ("reward/mean > 1", False)):
        x = experiment._replace(schedule=Schedule(phases={"a": a._replace(until=until), "b": a}))
        assert bool(schedule_warnings(x)) is warned
    last = experiment._replace(
        schedule=Schedule(phases={"a": a._replace(until=1), "b": a._replace(until=3)})
    )
    assert "schedule.phases.b.until=3: has no effect" in schedule_warnings(last)[0]


def test_a_row_of_one_phase_does_not_count_in_the_next_and_the_last_phase_stays(experiment):
    a = Phase(experiment.algorithm, until="go > 0 for 2")
    x = experiment._replace(schedule=Schedule(phases={"a": a, "b": a, "c": a}))
    progress, seen = start(x), []
    for _ in range(8):
        progress = advance(x, progress, {"go": 1.0})
        seen.append(progress.phase)
    assert seen == [0, 1, 1, 2, 2, 2, 2, 2]


# ------------------------------------------------------------------------------------------ lengths

LENGTHS = (20, 200, 2000)
SCHEDULES = sorted(f.stem for f in (conf_dir() / "schedule").glob("*.yaml"))
OWN = {"sft": ["task.path=rows.jsonl"]}  # what a preset does not run without


def curves(x) -> dict[str, list[float]]:
    """Path → value in every step of a run whose reward rises along a line and whose KL is twice the
    target; `phase` is one of them."""
    progress, found = start(x), {}
    for step in range(x.trainer.steps):
        for path, value in (list_values(x, progress) | {"phase": progress.phase}).items():
            found.setdefault(path, []).append(value)
        measured = {
            "reward/mean": 1.25 * step / x.trainer.steps,
            "kl/ref_k3": 0.02,
            "policy/entropy": 1.0,
            "eval/accuracy": 0.0,
        }
        progress = advance(x, progress, measured)
    return found


def check_curves(overrides: list[str], steps: int) -> None:
    """A number that a preset schedules moves over nine tenths of the run, one way, and a phase is a
    tenth of the run at least."""
    x = experiment_of(compose([*overrides, f"trainer.steps={steps}"]))
    for path, curve in curves(x).items():
        if path == "phase":
            assert {
                curve.count(phase) >= steps / 10 for phase in range(len(x.schedule.phases) or 1)
            } == {True}, (overrides, steps, path)
            continue
        moves = [b - a for a, b in itertools.pairwise(curve)]
        assert sum(move != 0 for move in moves) >= 0.9 * len(moves), (overrides, steps, path)
        assert all(move >= 0 for move in moves) or all(move <= 0 for move in moves), (
            overrides,
            steps,
            path,
        )


@pytest.mark.slow
@pytest.mark.parametrize("steps", cases(LENGTHS, 1))
@pytest.mark.parametrize(
    "option", cases([*(f"schedule={name}" for name in SCHEDULES), "kl/coef=adaptive"], 2)
)
def test_the_numbers_of_a_schedule_move_over_the_whole_run_whatever_its_length(option, steps):
    check_curves([option], steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"), list(zip(presets(), itertools.cycle(LENGTHS[:2]), strict=False))
)
def test_the_numbers_of_a_preset_move_over_the_whole_run_whatever_its_length(name, steps):
    """The schedules that they choose are above, at every length."""
    check_curves([f"experiment={name}", *OWN.get(name, [])], steps)


@pytest.mark.slow
@pytest.mark.parametrize("steps", cases(LENGTHS, 1))
def test_the_ends_and_the_middle_of_the_shipped_curves(steps):
    """One step after the last the end would be reached; half way along the line stands the mean of
    both ends."""
    x = experiment_of(compose([f"trainer.steps={steps}"]))
    at_step = lambda x, step: list_values(x, Progress(step))  # noqa: E731
    lr = x.optimizer.keywords["lr"]
    assert [at_step(x, s)["optimizer.lr"] for s in (0, steps // 2, steps)] == pytest.approx(
        [lr, 0.55 * lr, 0.1 * lr]
    )
    x = experiment_of(compose(["schedule=kl_anneal", f"trainer.steps={steps}"]))
    assert [at_step(x, s)["kl.coef"] for s in (0, steps // 2, steps)] == pytest.approx(
        [0.1, 0.0505, 0.001]
    )
    coef = curves(experiment_of(compose(["kl/coef=adaptive", f"trainer.steps={steps}"])))["kl.coef"]
    assert 5 < coef[-1] / coef[0] < math.exp(2)  # as far in a long run as in a short one
    halves = curves(experiment_of(compose(["schedule=grpo_to_dapo", f"trainer.steps={steps}"])))[
        "phase"
    ]
    assert halves == [0] * (steps // 2) + [1] * (steps // 2)


def test_a_number_of_a_phase_spans_the_phase(experiment):
    """The first phase lasts a fifth of the run, the second until its condition holds, which nobody
    knows: until the end of the run."""
    falls = {"kl.coef": partial(linear, start=1.0, end=0.0)}
    adapts = experiment.kl._replace(coef=adaptive(start=1.0, target=0.01))
    a = Phase(experiment.algorithm, numbers=falls, until=0.2)
    x = experiment._replace(
        trainer=experiment.trainer._replace(steps=50),
        schedule=Schedule(
            phases={
                "a": a,
                "b": a._replace(until="go > 0"),
                "c": Phase(experiment.algorithm, kl=adapts),
            }
        ),
    )
    seen = [
        list_values(x, Progress(step, phase=phase, since=since))["kl.coef"]
        for phase, since, step in [
            (0, 0, 0),
            (0, 0, 5),
            (0, 0, 10),
            (1, 10, 10),
            (1, 10, 30),
            (1, 10, 50),
        ]
    ]
    assert seen == pytest.approx([1.0, 0.5, 0.0, 1.0, 0.5, 0.0])
    before = Progress(30, phase=2, since=30, controllers={"kl.coef": {"value": 1.0}})
    assert list_values(x, advance(x, before, {"kl/ref_k3": 5.0}))["kl.coef"] == pytest.approx(
        1.1
    )  # a horizon of 0.1 · 20 steps
    fixed = experiment._replace(
        schedule=Schedule({"kl.coef": partial(linear, start=1.0, end=0.0, steps=4)})
    )
    assert list_values(fixed, Progress(2))["kl.coef"] == 0.5  # a length of its own stays


def test_a_longer_run_says_what_it_changes(experiment):
    longer = experiment._replace(trainer=experiment.trainer._replace(steps=200))
    assert explain_new_length(experiment, Progress(10), before=20) == ""
    assert (
        explain_new_length(longer, Progress(10), before=20)
        == "trainer.steps was 20 and is now 200; from step 11 on the new curves apply:"
        " optimizer.lr is 0.0002865 instead of 0.000165"
    )


def test_keys_that_follow_the_length_of_the_run_are_found():
    """Also by way of another key: a run of another length has other values there, and is the same
    run."""
    given = [
        "schedule.numbers.optimizer.lr.steps=${trainer.steps}",
        "evaluation.every=${schedule.numbers.optimizer.lr.steps}",
    ]
    found = find_length_keys(compose([*given, "callbacks.checkpoint.every=20"]))
    assert set(found) == {"schedule.numbers.optimizer.lr.steps", "evaluation.every"}
    assert find_length_keys(compose([])) == ()
