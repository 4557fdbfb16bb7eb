"""Checks of a whole run: each sees its pathology in simulated curves, none speaks of a healthy run
or of noise."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from parametrise import each
from rlkit.commands.train import format_closing_lines
from rlkit.runs.reading import ReadRun, read_run
from rlkit.runs.trends import (
    TRENDS,
    average_thirds,
    entropy_collapse,
    find_shadow_rewards,
    find_symptoms,
    kl_growth,
)

STEPS = 60
HEALTHY = {  # metric → its value at a share of the run
    "reward/mean": lambda t: 0.2 + 0.6 * t,
    "policy/entropy": lambda t: 0.5 - 0.2 * t,
    "kl/ref_k3": lambda t: 0.02 * t,
    "len/mean": lambda t: 100 + 80 * t,
    "reward/true/mean": lambda t: 0.2 + 0.5 * t,
    "eval/accuracy": lambda t: 0.3 + 0.4 * t,
    "group/frac_all_good": lambda t: 0.1,
}
FLAT = {"reward/mean": lambda t: 0.4}
SICK = {
    "reward_loss": {"reward/mean": lambda t: 0.8 - 0.6 * t},
    "entropy_collapse": {"policy/entropy": lambda t: 0.5 * math.exp(-6 * t)},
    "kl_growth": {**FLAT, "kl/ref_k3": lambda t: 0.3 * t**4},
    "length_growth": {**FLAT, "len/mean": lambda t: 100 + 200 * t},
    "training_up_validation_down": {"eval/accuracy": lambda t: 0.6 - 0.4 * abs(t - 0.3)},
    "reward_hacking": {"reward/true/mean": lambda t: 0.6 - 0.4 * t},
}


def run(curves, *, seed=0, noise=0.03):
    """A run with these curves and noise in proportion; the reward `true` is a shadow."""
    rng = random.Random(seed)
    rows = []
    for step in range(1, STEPS + 1):
        row = {name: at(step / STEPS) * (1 + rng.gauss(0, noise)) for name, at in curves.items()}
        row |= {"eval/accuracy_low": row["eval/accuracy"] * (1 - 2 * noise)}
        rows.append({"step": step, **row})
    settings = {"reward.terms.true.weight": 0.0, "reward.terms.proxy.weight": 1.0}
    return ReadRun(Path("run"), "grpo", 0, settings, {}, rows, ())


@each("name", SICK)
def test_each_check_sees_its_pathology_and_no_other(name):
    found = {check.__name__ for check in TRENDS if check(run(HEALTHY | SICK[name]))}
    assert found == {name}
    assert {s.check for s in find_symptoms(run(HEALTHY | SICK[name])) if not s.steps} == {
        name.replace("_", " ")
    }


@pytest.mark.slow
def test_a_healthy_run_and_noise_are_no_pathology():
    """Constant curves with ten percent of noise: of 200 runs none is reported."""
    constant = {name: lambda t, at=at: at(0.5) for name, at in HEALTHY.items()}
    for seed in range(200):
        assert not [
            check.__name__ for check in TRENDS if check(run(constant, seed=seed, noise=0.1))
        ], seed
    assert not [check.__name__ for check in TRENDS if check(run(HEALTHY))]


def test_entropy_that_falls_since_the_problems_are_solved_is_no_collapse():
    solved = {"group/frac_all_good": lambda t: t}
    assert not any(check(run(HEALTHY | SICK["entropy_collapse"] | solved)) for check in TRENDS)


def test_a_short_run_says_nothing():
    assert average_thirds({step: float(step) for step in range(11)}) is None
    assert average_thirds({step: float(step) for step in range(12)}).rose(0.0)


def test_a_term_with_a_weight_in_some_phase_is_no_shadow():
    own = run(HEALTHY)
    phase = {"schedule.phases.late.reward.terms.true.weight": 0.5}
    assert (
        find_shadow_rewards(own) == ["true"]
        and find_shadow_rewards(own._replace(settings={**own.settings, **phase})) == []
    )


def test_a_remedy_is_a_setting_that_has_an_effect():
    """kl.coef has none without a KL, and the loss of reinforce has no clip."""
    grown = run(HEALTHY | SICK["kl_growth"])
    none = grown._replace(settings={"kl.name": "none"})
    assert "raise kl.coef" in kl_growth(grown)
    assert "kl=k3 reference=frozen" in kl_growth(none) and "kl.coef" not in kl_growth(none)
    fallen = run(HEALTHY | SICK["entropy_collapse"])
    clip = "algorithm.policy_loss.clip_high"
    assert clip not in entropy_collapse(fallen)
    assert clip in entropy_collapse(fallen._replace(settings={clip: 0.2}))


def test_the_end_of_a_run_says_what_drifted(tmp_path):
    """Only the report did, which is read by those who suspect something."""
    sick = run(HEALTHY | SICK["entropy_collapse"]).rows
    last = sick[-1]["step"]
    # what the last third does not show again is over
    rows = [
        {
            **row,
            "stop_reason/error": 0.25 * (row["step"] in (3, last)),
            "parse_fail_frac": 0.5 * (row["step"] in (1, 2)),
        }
        for row in sick
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = format_closing_lines(
        {"ended": "finished", "steps": len(rows), "wall_seconds": 1.0, "tokens": 1}, tmp_path
    ).splitlines()
    warnings = [line for line in said if line.startswith("warning: ")]
    assert len(warnings) == 2 and "entropy fell" in warnings[0]
    assert (
        warnings[1].startswith("warning: the environment failed in 25% of the episodes")
        and "(step 3, the first of 2)" in warnings[1]
    )
    (tmp_path / "metrics.jsonl").unlink()
    assert "warning" not in "\n".join(
        format_closing_lines(
            {"ended": "finished", "steps": 0, "wall_seconds": 1.0, "tokens": 1}, tmp_path
        )
    )


def test_a_check_that_spoke_names_its_steps(make_run):
    run = read_run(make_run("a", change={"len/truncated_frac": 1.0}))
    (found,) = find_symptoms(run)
    assert (found.check, found.steps) == (
        "most truncated",
        [1, 2, 3, 4],
    ) and "truncated" in found.text
    older = run._replace(
        rows=[{k: v for k, v in row.items() if k != "len/truncated_frac"} for row in run.rows]
    )
    assert find_symptoms(older) == [], "rows that lack a number say nothing"


def test_what_was_not_measured_does_not_speak(make_run):
    """null in metrics.jsonl is nan to a check."""
    run = read_run(make_run("a", change={"ratio/first_mean": None}))
    assert find_symptoms(run) == []
