"""What is said of two lines of runs: only what their seeds allow."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from laws import each
from rlkit.commands.cli import main
from rlkit.errors import ConfigError
from rlkit.runs.comparing import Difference
from rlkit.runs.report.read import group_runs, read_run
from rlkit.runs.report.verdicts import EFFECT, Figure, budget, notes, sentence, shared_figure, verdicts


@pytest.fixture
def arms(make_run):
    """(accuracies of grpo, of dapo, …) → lines, one seed after the other; the runs of an arm are below runs/NAME."""

    def make(*columns, **changes):
        names = ("grpo", "dapo", "gspo")
        for name, values in zip(names, columns, strict=False):
            for seed, after in enumerate(values):
                folder = make_run(f"{name}/{seed}", seed=seed, title=name, after=after, **changes.get(name, {}))
        return group_runs([read_run(folder.parent.parent / name / str(seed)) for name, own in zip(names, columns, strict=False)
                           for seed in range(len(own))])  # fmt: skip

    return make


def said(groups, **options):
    return [v.sentence for v in verdicts(groups, shared_figure(groups), **options)]


def test_a_difference_is_said_with_its_interval(arms):
    """+0.02, 0.03, 0.02, 0.03 with t₃ = 3.182: 0.025 ± 3.182 · 0.005774/2."""
    groups = arms([0.5, 0.6, 0.7, 0.8], [0.52, 0.63, 0.72, 0.83])
    assert said(groups) == ["dapo is better than grpo by 0.025 (0.016 to 0.034), 4 seeds."]
    (found,) = verdicts(groups[::-1], shared_figure(groups[::-1]))
    assert found.claim == "worse" and found.sentence == "grpo is worse than dapo by 0.025 (0.016 to 0.034), 4 seeds."


def test_what_cannot_be_told_apart_is_said_with_the_seeds_that_it_takes(arms):
    """Differences 0.02, -0.02, 0.01: s = 0.0208; for 0.01 7.849 · 4.33 + 1.92 = 35.9 seeds."""
    (text,) = said(arms([0.5, 0.6, 0.7], [0.52, 0.58, 0.71]))
    assert "no difference can be claimed" in text and "to see 0.01 you need 36 seeds" in text
    d = Difference(0.001, -0.004, 0.006, 0.6, 0.007, 10)
    assert "10 seeds are enough to see 0.02" in sentence("a", "b", d, "open", effect=0.02, comparisons=1)


def test_two_seeds_never_decide(arms):
    """Student's t of one degree of freedom; 0.1 → 0.9 on both."""
    (found,) = verdicts(groups := arms([0.1, 0.1], [0.9, 0.9]), shared_figure(groups))
    assert (found.claim, math.isnan(found.p), math.isnan(found.found.low)) == ("open", True, True)
    assert "they share 2 seeds, and fewer than 3 say nothing" in found.sentence


def test_only_common_seeds_are_pairs_and_no_common_seed_is_said(arms, make_run):
    groups = arms([0.5, 0.6, 0.7, 0.9], [0.52, 0.63, 0.72])
    assert verdicts(groups, shared_figure(groups))[0].found.n == 3
    apart = Figure("x", [{0: 0.5}, {1: 0.6}])
    assert "they share no seeds" in verdicts(groups, apart)[0].sentence


def test_more_comparisons_need_more_evidence(arms):
    """p = 0.035 alone; of two comparisons it is no claim."""
    groups = arms([0.5, 0.6, 0.7, 0.8], [0.52, 0.64, 0.72, 0.86], [0.5, 0.61, 0.69, 0.8])
    alone, both = verdicts(groups[:2], shared_figure(groups[:2])), verdicts(groups, shared_figure(groups))
    assert alone[0].claim == "better" and both[0].claim == "open" and both[0].found.low < 0 < alone[0].found.low
    assert len(verdicts(groups, shared_figure(groups), every_pair=True)) == 3


def test_arms_that_are_equal_are_told_apart_in_one_of_twenty_pages():
    """Twenty problems' worth of noise shared by the arms, and noise of their own; three comparisons a page."""
    rng, claims = np.random.default_rng(0), 0

    class Line:
        def __init__(self, label):
            self.label = label

    lines = [Line(name) for name in "abcd"]
    for _ in range(600):
        seeds = 0.6 + 0.1 * rng.normal(size=6)
        values = [dict(enumerate(seeds + 0.05 * rng.normal(size=6))) for _ in lines]
        claims += any(v.claim != "open" for v in verdicts(lines, Figure("accuracy", values), effect=EFFECT))
    assert claims / 600 == pytest.approx(0.05, abs=0.03)


def test_unequal_budgets_are_said_and_can_be_made_equal(arms):
    """dapo took two updates a step where grpo took one: at equal updates its validation accuracy is that of half the steps."""
    rows = {"optim/updates": 1, "group/sampled": 4, "tokens/total": 100}
    groups = arms([0.5] * 3, [0.6] * 3, grpo={"change": rows}, dapo={"change": rows | {"optim/updates": 2}})
    assert budget(groups[1].runs[0], "updates") == {1: 2, 2: 4, 3: 6, 4: 8}
    (note,) = notes(groups)
    assert "in optimiser steps: grpo 4, dapo 8" in note and "at=updates" in note
    curves = {0: 0.1, 2: 0.3, 4: 0.5}
    measured = [g._replace(runs=[r._replace(rows=[row | ({"eval/accuracy": curves[row["step"]]} if row["step"] in curves else {})
                                                  for row in r.rows]) for r in g.runs]) for g in groups]  # fmt: skip
    assert [set(own.values()) for own in shared_figure(measured, at="updates").values] == [{0.5}, {0.3}]
    assert shared_figure(measured, at="updates").name == "validation accuracy after 4 optimiser steps"


def test_figures_are_the_best_that_the_runs_have(arms, tmp_path):
    groups = arms([0.5] * 3, [0.6] * 3)
    assert (shared_figure(groups).name, shared_figure(groups).resolution) == ("test accuracy", 0.01)
    bare = [g._replace(runs=[r._replace(summary={}) for r in g.runs]) for g in groups]
    assert shared_figure(bare, "reward").name.startswith("training reward")
    for name, at in (("tset", None), (None, "hours"), ("validation", None)):
        with pytest.raises(ConfigError):
            shared_figure(bare, name, at)


def test_the_commands_say_it(arms, tmp_path, capsys):
    arms([0.5, 0.6, 0.7, 0.8], [0.52, 0.63, 0.72, 0.83])
    folders = [str(tmp_path / "runs" / name) for name in ("grpo", "dapo")]
    assert main(["compare", *folders]) == 0
    out = capsys.readouterr().out
    assert "dapo is better than grpo by 0.025 (0.016 to 0.034), 4 seeds." in out and "test accuracy; pairs of runs of one seed" in out
    assert main(["plan", *folders, "effect=0.01", "seeds=5"]) == 0
    out = capsys.readouterr().out  # s = 0.005774: 7.849 / 3 + 1.92 = 4.5 → 5 seeds of 2 × 300 s
    assert "5 seeds by the spread of the pilot (0.006, 4 seeds)" in out and "50:00" in out and "of the time" in out


@each("words, expected", [
    ([], "no run"), (["{grpo}"], "found one line"), (["{grpo}", "{dapo}", "pairs=some"], "pairs=all"),
    (["{grpo}", "{dapo}", "effect=-1"], "above 0"), (["{grpo}", "{dapo}", "figure=x"], "test_reward"), (["{grpo}", "sed=1"], "sed=1"),
])  # fmt: skip
def test_a_comparison_that_is_none_is_refused(words, expected, make_runs, capsys):
    """compare and plan, alike."""
    places = {}
    for name in ("grpo", "dapo"):
        folder = make_runs(f"refused/{name}-{len(words)}-{expected[:3]}", title=name)
        places[name] = str(folder)
        assert json.loads((folder / "summary.json").read_text())["after"]["accuracy"] == 0.9
    assert main(["compare", *(word.format(**places) for word in words)]) == 2
    assert expected in capsys.readouterr().err
