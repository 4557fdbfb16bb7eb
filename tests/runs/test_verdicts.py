"""What is said of two lines of runs: only what their seeds allow."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from parametrise import each
from rlkit.commands.cli import main
from rlkit.errors import ConfigError
from rlkit.runs.comparing import Difference
from rlkit.runs.reading import group_runs, read_run
from rlkit.runs.verdicts import (
    EFFECT,
    Figure,
    find_falls,
    find_shared_figure,
    judge_lines,
    list_notes,
    phrase_verdict,
    read_budget,
)


@pytest.fixture
def arms(make_run):
    """(accuracies of grpo, of dapo, …) → lines, one seed after the other; the runs of an arm are
    below runs/NAME."""

    def make(*columns, **changes):
        names = ("grpo", "dapo", "gspo")
        for name, values in zip(names, columns, strict=False):
            for seed, after in enumerate(values):
                folder = make_run(
                    f"{name}/{seed}", seed=seed, title=name, after=after, **changes.get(name, {})
                )
        return group_runs(
            [
                read_run(folder.parent.parent / name / str(seed))
                for name, own in zip(names, columns, strict=False)
                for seed in range(len(own))
            ]
        )

    return make


def said(groups, **options):
    return [v.sentence for v in judge_lines(groups, find_shared_figure(groups), **options)]


BASE = [0.5, 0.6, 0.7, 0.8] * 3
BETTER = [0.52, 0.63, 0.72, 0.83] * 3


def test_a_difference_is_said_with_its_interval(arms):
    """+0.02 and +0.03, six times each, with t₁₁ = 2.201: 0.025 ± 2.201 · 0.005222/√12."""
    groups = arms(BASE, BETTER)
    assert said(groups) == ["dapo is better than grpo by 0.025 (0.022 to 0.028), 12 seeds."]
    (found,) = judge_lines(groups[::-1], find_shared_figure(groups[::-1]))
    assert (
        found.claim == "worse"
        and found.sentence == "grpo is worse than dapo by 0.025 (0.022 to 0.028), 12 seeds."
    )


def test_what_cannot_be_told_apart_is_said_with_the_seeds_that_it_takes(arms):
    """Differences 0.02, -0.02, 0.01, four times each: s = 0.0178, and it may be 1.27 times as
    much."""
    (text,) = said(arms([0.5, 0.6, 0.7] * 4, [0.52, 0.58, 0.71] * 4))
    assert (
        "no difference can be claimed (+0.003, " in text
        and "to see 0.01 you need 41 seeds; these 12 seeds see 0.020." in text
    )
    d = Difference(0.001, -0.004, 0.006, 0.6, 0.007, 12)
    assert "12 seeds are enough to see 0.02" in phrase_verdict(
        "a", "b", d, "open", effect=0.02, comparisons=1
    )


def test_fewer_than_ten_seeds_are_shown_and_claim_nothing(arms):
    (text,) = said(arms(BASE[:9], BETTER[:9]))
    assert text.startswith(
        "dapo against grpo: no difference can be claimed (+0.024, +0.020 to +0.028), since 9 seeds"
        " claim nothing; "
    )
    assert text.endswith("to see 0.01 you need 10 seeds.")


def test_a_coarse_score_that_differs_by_the_same_step_is_not_called_enough(arms):
    """ "3 seeds are enough to see 0.01" stood beside ±0.018: the floor of the interval was not in
    the spread of the sentence."""
    (text,) = said(arms([0.5] * 3, [0.51] * 3))
    assert "enough" not in text and "(+0.010, +0.003 to +0.017)" in text


def test_two_seeds_never_decide(arms):
    """Student's t of one degree of freedom; 0.1 → 0.9 on both."""
    (found,) = judge_lines(groups := arms([0.1, 0.1], [0.9, 0.9]), find_shared_figure(groups))
    assert (found.claim, math.isnan(found.p), math.isnan(found.found.low)) == ("open", True, True)
    assert "they share 2 seeds, and fewer than 10 claim nothing" in found.sentence


@pytest.mark.slow
def test_a_line_that_ends_below_its_start_is_named(arms):
    """The runs start at 0.5."""
    groups = arms([0.4, 0.42, 0.41] * 4, [0.5, 0.48, 0.51] * 4, [0.9] * 12)
    lost, chance = find_falls(groups)
    assert lost.claim and not chance.claim and chance.sentence.endswith("this may be chance.")
    assert (
        lost.sentence
        == "grpo ends below its start: accuracy 0.500 before, 0.410 after (-0.090, -0.096 to"
        " -0.084), 12 seeds."
    )
    assert chance.sentence.startswith(
        "dapo ends below its start: accuracy 0.500 before, 0.497 after (-0.003, "
    )
    few = find_falls(
        [groups[0]._replace(runs=groups[0].runs[:n]) for n in (1,)]
        + [groups[1]._replace(runs=groups[1].runs[:3])]
    )
    assert [fall.sentence.split("after")[1] for fall in few] == [
        ", 1 seed; fewer than 10 claim nothing.",
        " (-0.003, -0.041 to +0.035), 3 seeds; fewer than 10 claim nothing.",
    ]


def test_only_common_seeds_are_pairs_and_no_common_seed_is_said(arms, make_run):
    groups = arms([0.5, 0.6, 0.7, 0.9], [0.52, 0.63, 0.72])
    assert judge_lines(groups, find_shared_figure(groups))[0].found.n == 3
    apart = Figure("x", [{0: 0.5}, {1: 0.6}])
    assert "they share no seeds" in judge_lines(groups, apart)[0].sentence


def test_two_runs_of_a_line_with_one_seed_are_said_and_count_once(arms, make_run, tmp_path, capsys):
    """Only the last one was compared, without a word, and both counted for a fall."""
    groups = arms([0.4] * 3, [0.5] * 3)
    assert list_notes(groups, find_shared_figure(groups)) == []
    for seed in (1, 2):
        twin = read_run(make_run(f"grpo/twin_{seed}", seed=seed, title="grpo", after=0.3))
        groups[0].runs.append(twin)
    note = (
        "grpo has several runs of seed 1, 2, and only the last of each seed counts. To choose"
        " another, leave out the folder of the last one."
    )
    assert list_notes(groups, find_shared_figure(groups)) == [note]
    for command in ("compare", "plan"):
        assert main([command, *(str(tmp_path / "runs" / arm) for arm in ("grpo", "dapo"))]) == 0
        assert note in capsys.readouterr().out
    assert find_shared_figure(groups).values[0] == {0: 0.4, 1: 0.3, 2: 0.3}
    fall = find_falls(groups)[0]
    assert fall.found.n == 3 and fall.before + fall.found.mean == pytest.approx(1 / 3)


@pytest.mark.slow
def test_more_comparisons_need_more_evidence(arms):
    """p = 0.031 alone; of two comparisons it is no claim."""
    noise = [0.06, -0.04, 0.05, 0.0, 0.03, -0.01, 0.04, 0.02, -0.02, 0.06, 0.02, 0.01]
    groups = arms(
        BASE,
        [a + d + 0.004 for a, d in zip(BASE, noise, strict=True)],
        [a + 0.01 * (-1) ** i for i, a in enumerate(BASE)],
    )
    alone, both = (
        judge_lines(groups[:2], find_shared_figure(groups[:2])),
        judge_lines(groups, find_shared_figure(groups)),
    )
    assert (
        alone[0].claim == "better"
        and both[0].claim == "open"
        and both[0].found.low < 0 < alone[0].found.low
    )
    assert len(judge_lines(groups, find_shared_figure(groups), every_pair=True)) == 3


@pytest.mark.slow
def test_arms_that_are_equal_are_told_apart_in_one_of_twenty_pages():
    """Twenty problems' worth of noise shared by the arms, and noise of their own; three comparisons
    a page."""
    rng, claims = np.random.default_rng(0), 0

    class Line:
        def __init__(self, label):
            self.label = label

    lines = [Line(name) for name in "abcd"]
    for _ in range(120):
        seeds = 0.6 + 0.1 * rng.normal(size=10)
        values = [dict(enumerate(seeds + 0.05 * rng.normal(size=10))) for _ in lines]
        claims += any(
            v.claim != "open" for v in judge_lines(lines, Figure("accuracy", values), effect=EFFECT)
        )
    assert claims / 120 == pytest.approx(0.05, abs=0.06)


def test_unequal_budgets_are_said_and_can_be_made_equal(arms):
    """dapo took two updates a step where grpo took one: at equal updates its validation accuracy is
    that of half the steps."""
    rows = {"optim/updates": 1, "group/sampled": 4, "tokens/total": 100}
    groups = arms(
        [0.5] * 3, [0.6] * 3, grpo={"change": rows}, dapo={"change": rows | {"optim/updates": 2}}
    )
    assert read_budget(groups[1].runs[0], "updates") == {1: 2, 2: 4, 3: 6, 4: 8}
    (note,) = list_notes(groups, find_shared_figure(groups))
    assert "in optimiser steps: grpo 4, dapo 8" in note
    assert "`rlkit compare` with at=updates" in note
    curves = {0: 0.1, 2: 0.3, 4: 0.5}
    measured = [
        g._replace(
            runs=[
                r._replace(
                    rows=[
                        row
                        | ({"eval/accuracy": curves[row["step"]]} if row["step"] in curves else {})
                        for row in r.rows
                    ]
                )
                for r in g.runs
            ]
        )
        for g in groups
    ]
    assert [set(own.values()) for own in find_shared_figure(measured, at="updates").values] == [
        {0.5},
        {0.3},
    ]
    assert (
        find_shared_figure(measured, at="updates").name
        == "validation accuracy after 4 optimiser steps"
    )


def test_a_step_without_a_scored_reply_spends_its_budget(arms):
    """Its mean reward is null. The step was free, so its evaluation counted within less."""
    groups = arms([0.5] * 3, [0.5] * 3)
    nulls = [{}, {}, {}, {"reward/mean": None, "eval/accuracy": 0.9}]
    first, second = (
        [{"step": i, "reward/mean": 0.5, "eval/accuracy": 0.3} | own[i] for i in range(1, len(own))]
        for own in (nulls[:3], nulls)
    )
    lines = [
        group._replace(runs=[run._replace(rows=rows) for run in group.runs])
        for group, rows in zip(groups, (first, second), strict=True)
    ]
    found = find_shared_figure(lines, at="steps")
    assert found.name == "validation accuracy after 2 RL steps"
    assert [set(own.values()) for own in found.values] == [{0.3}, {0.3}]


def test_runs_without_the_figure_are_named(arms):
    """A line whose bad seeds fail would win in silence."""
    groups = arms([0.5] * 3, [0.6] * 4)
    for seed, summary in ((1, {"ended": "failed: ValueError: x"}), (2, {})):
        groups[1].runs[seed] = groups[1].runs[seed]._replace(summary=summary)
    (note,) = list_notes(groups, find_shared_figure(groups))
    assert "2 of 4 runs of dapo have no test accuracy and are left out (seed 1, 2)." in note


def test_rewards_of_other_terms_are_not_on_one_scale(arms):
    """Ten times the weight was called better by nine times the reward."""
    groups = arms([0.5] * 3, [0.6] * 3)
    key = "schedule.phases.b.reward.terms.task.weight"
    for weight, group in enumerate(groups, 1):
        group.runs[:] = [r._replace(settings={**r.settings, key: weight}) for r in group.runs]
    (note,) = list_notes(groups, find_shared_figure(groups, "reward"))
    assert key in note and note.endswith("different problems or on different scales.")
    assert list_notes(groups, find_shared_figure(groups)) == []


def test_figures_are_the_best_that_the_runs_have(arms, tmp_path):
    groups = arms([0.5] * 3, [0.6] * 3)
    assert (find_shared_figure(groups).name, find_shared_figure(groups).resolution) == (
        "test accuracy",
        0.01,
    )
    bare = [g._replace(runs=[r._replace(summary={}) for r in g.runs]) for g in groups]
    assert find_shared_figure(bare, "reward").name.startswith("training reward")
    for name, at in (("tset", None), (None, "hours"), ("validation", None)):
        with pytest.raises(ConfigError):
            find_shared_figure(bare, name, at)


@pytest.mark.slow
def test_the_commands_say_it(arms, tmp_path, capsys):
    arms(BASE, BETTER)
    folders = [str(tmp_path / "runs" / name) for name in ("grpo", "dapo")]
    assert main(["compare", *folders]) == 0
    out = capsys.readouterr().out
    assert (
        "dapo is better than grpo by 0.025 (0.022 to 0.028), 12 seeds." in out
        and "test accuracy; pairs of runs of one seed" in out
    )
    assert main(["plan", *folders, "effect=0.005", "seeds=12"]) == 0
    lines = (
        capsys.readouterr().out.splitlines()
    )  # s = 0.0052, and it may be 0.0065: 7.849 · 1.71 + 1.92 = 15.3 → 16 seeds of 2 × 300 s
    assert lines[1:3] == [
        "  dapo against grpo: 16 seeds, 2:40:00 of runs, one at a time",
        (
            "    The pilot's spread is 0.0052 (12 seeds), and the true one may be 0.0065; "
            "if it is no larger than the pilot's, 11 seeds are enough."
        ),
    ]
    assert lines[3] == "    With 12 seeds a difference of 0.0058 is found 4 times in 5."
    assert (
        main(["plan", *folders, "seeds=5"]) == 2
        and "10 or more; fewer seeds claim nothing" in capsys.readouterr().err
    )


@each(
    "words, expected",
    [
        ([], "no run"),
        (["{grpo}"], "found one line"),
        (["{grpo}", "{dapo}", "pairs=some"], "pairs=all"),
        (["{grpo}", "{dapo}", "effect=-1"], "above 0"),
        (["{grpo}", "{dapo}", "figure=x"], "test_reward"),
        (["{grpo}", "{dapo}", "figure=reward", "at=tokens"], "Leave out figure=reward"),
        (["{grpo}", "sed=1"], "sed=1"),
    ],
)
def test_a_comparison_that_is_none_is_refused(words, expected, make_runs, capsys):
    """compare and plan, alike."""
    places = {}
    for name in ("grpo", "dapo"):
        folder = make_runs(f"refused/{name}-{len(words)}-{expected[:3]}", title=name)
        places[name] = str(folder)
        assert json.loads((folder / "summary.json").read_text())["after"]["accuracy"] == 0.9
    assert main(["compare", *(word.format(**places) for word in words)]) == 2
    assert expected in capsys.readouterr().err
