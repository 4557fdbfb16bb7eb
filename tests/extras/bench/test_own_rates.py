"""The study of own rates from its first run to its page, with runs that cost nothing."""

from __future__ import annotations

import importlib
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.extras.bench import matrix as bench

ROOT = Path(__file__).resolve().parents[3]
DIVERGED = "exit 1: step 3: 3 updates in a row had a loss (nan) or a gradient (norm nan)"


@pytest.fixture
def recorded(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "bench"))
    return importlib.import_module("recorded")


@pytest.fixture
def study(tmp_path, monkeypatch, recorded) -> Any:
    """The module of the study; it writes to tmp_path, and its runs are functions of their arm and
    rate. `study.made` has the runs."""
    module: Any = importlib.import_module("own_rates")
    made: list[Any] = []
    code = {"code": "a-b", "date": "2026-01-01", "torch": "2"}
    monkeypatch.setattr(module, "made", made, raising=False)
    monkeypatch.setattr(module, "OUT", tmp_path / "own_rates")
    monkeypatch.setattr(module, "measure_samples", lambda folder: {"equal_steps": 40})
    monkeypatch.setattr(recorded, "PAGES", 1)
    monkeypatch.setattr(recorded, "read_code", lambda rows: code)
    monkeypatch.setattr(bench, "read_row", play)

    def run_all(runs, folder, **more):
        made.extend(runs)
        failed = [read_rate(run) > 0.05 for run in runs]
        return [
            SimpleNamespace(status="failed" if bad else "finished", reason=DIVERGED if bad else "")
            for bad in failed
        ], []

    monkeypatch.setattr(bench, "run_all", run_all)
    return module


def read_rate(run: Any) -> float:
    own = [word for word in run.overrides if word.startswith("optimizer.lr=")]
    return float(own[-1].partition("=")[2]) if own else 2e-3


def play(run: Any) -> dict[str, Any] | None:
    """The row of a run. The best rate of grpo is 2e-3, of ppo the highest that ends, and of cispo
    below the grid. Placebos learn nothing."""
    rate = read_rate(run)
    if rate > 0.05:
        return None
    best = {"ppo": 1.0, "cispo": 1e-6}.get(run.arm, 2e-3)
    regret = 1.0 if run.arm.startswith("placebo") else 0.1 * abs(math.log(rate / best)) / 2
    noise = 0.001 * ((7 * run.seed + len(run.arm)) % 10)
    steps = [word for word in run.overrides if word.startswith("trainer.steps=")]
    length = float(steps[-1].partition("=")[2]) if steps else 90.0
    return {
        **{"task": run.task, "arm": run.arm, "seed": run.seed, "reward": 1 - regret},
        **{"regret": round(regret + noise, 5), "random": 0.0, "best": 1.0, "steps": length},
        **{"updates": 2 * length, "samples": 96 * length, "tokens": 1.0, "seconds": 1.0},
        **{"processor_s": 36.0, "overrides": " ".join(run.overrides)},
    }


@pytest.mark.slow
def test_the_study_goes_on_where_it_stopped_and_ends_with_its_page(study, tmp_path):
    assert not study.run_study(tmp_path, 1, 0.0) and not study.made  # its time is over
    assert study.run_study(tmp_path, 1, math.inf)
    first = len(study.made)
    assert study.run_study(tmp_path, 1, math.inf) and len(study.made) == first  # nothing again
    chosen = study.choose("rate")
    assert chosen["needle", "grpo"].rate == "2e-3"
    assert (chosen["needle", "cispo"].rate, chosen["needle", "ppo"].rate) == ("7.44e-5", "1.8e-2")
    beside = {(r["arm"], r["rate"]) for r in study.read_rows() if r["stage"] == "beside"}
    assert beside == {("cispo", "2.48e-5")}
    equal = [r for r in study.read_rows() if r["stage"] == "equal score"]
    assert {(r["arm"], r["rate"], r["steps"]) for r in equal} == {("dapo", "2e-3", "40.0")}
    study.write_page()
    page = (study.OUT / "README.md").read_text()
    assert f"{first} runs, 2026-01-01," in page and " of 24 again**" in page
    assert "| ppo | rate | 5.4e-2" not in page and "| rate | 5.4e-2 | needle | ppo | 100 |" in page
    assert (study.OUT / "comparisons.csv").read_text().count("\n") > 400


def test_a_failure_that_says_nothing_about_the_algorithm_stops_the_study(study, recorded, tmp_path):
    place = ("needle", "ppo")
    run = recorded.plan(tmp_path, "rate", [(place, "5.4e-2")], study.ARMS, [100])[0]
    row = recorded.read_result(run, DIVERGED, dict)
    assert row["regret"] == 1.0 and row["failed"] == DIVERGED
    for reason in (
        "exit 2: algorithm=ppo: the dry run's gradient is zero or not finite; choose another",
        "exit 1: the disk is full",
    ):
        assert recorded.read_result(run, reason, dict) is None


def test_one_more_rate_is_tried_beyond_the_outermost(study):
    place = ("needle", "dapo")
    steps = {(place, rate): 10 + i for i, rate in enumerate(("2e-3", "6e-3", "1.8e-2"))}

    def beyond(rate: str) -> dict[Any, int]:
        return study.extend_equal_steps(steps, {place: SimpleNamespace(rate=rate)})

    assert beyond("6e-3") == {}
    assert beyond("1.8e-2") == {(place, "5.4e-2"): 12}
    assert beyond("2e-3") == {(place, "6.67e-4"): 10}


def test_rows_of_other_code_are_refused(tmp_path, monkeypatch, recorded):
    monkeypatch.setattr(recorded, "HERE", tmp_path)

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("rlkit", "conf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    git("add", ".")
    git("commit", "-m", "first")
    code = recorded.read_code([])
    assert recorded.read_code([code]) == code
    with pytest.raises(SystemExit, match="runs of other code"):
        recorded.read_code([code | {"code": "other"}])
    (tmp_path / "rlkit" / "file").write_text("changed")
    with pytest.raises(SystemExit, match="not committed"):
        recorded.read_code([code])
