"""The study of staleness and rates: its figures on scores that are known, and its page."""

from __future__ import annotations

import csv
import importlib
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlkit.extras.bench import matrix as bench

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def study(tmp_path, monkeypatch) -> Any:
    """The module of the study, with runs that cost nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments" / "bench"))
    module: Any = importlib.import_module("stale_rates")
    recorded: Any = importlib.import_module("recorded")
    code = {"code": "a-b", "date": "2026-01-01", "torch": "2"}
    monkeypatch.setattr(module, "OUT", tmp_path / "stale_rates")
    monkeypatch.setattr(module, "DRAWS", 20)
    monkeypatch.setattr(recorded, "PAGES", 1)
    monkeypatch.setattr(recorded, "read_code", lambda rows: code)
    monkeypatch.setattr(bench, "read_row", lambda run: play(module, run))
    finished = SimpleNamespace(status="finished", reason="")
    monkeypatch.setattr(bench, "run_all", lambda runs, *_, **__: ([finished] * len(runs), []))
    return module


def play(study: Any, run: Any) -> dict[str, Any]:
    """A run whose best rate is halved by each doubling of 1 + lag. A lag of 16 without a correction
    learns nothing."""
    words = dict(word.split("=", 1) for word in run.overrides)
    lag, rate = int(words["asynchrony.staleness"]), float(words["optimizer.lr"])
    away = math.log(rate * (1 + lag) / study.CENTRE, study.FACTOR)
    regret = 0.2 + 0.05 * away**2 + 0.001 * ((7 * run.seed + lag) % 10)
    lost = run.arm == "lag 16, none"
    row = {"task": run.task, "arm": run.arm, "seed": run.seed, "processor_s": 36.0}
    return row | {"regret": 1.0 if lost else regret, "overrides": " ".join(run.overrides)}


@pytest.mark.slow
def test_the_study_ends_with_its_page(study, tmp_path):
    assert not study.run_study(tmp_path, 1, 0.0)  # its time is over
    assert study.run_study(tmp_path, 1, math.inf)
    rows = importlib.import_module("recorded").read_rows(study.OUT).values()
    assert len(rows) == 1300
    alone = [row["overrides"] for row in rows if row["arm"] == "lag 0"]
    assert all("correction=none" in words and "algorithm.old" not in words for words in alone)
    study.write_page()
    page = (study.OUT / "README.md").read_text()
    assert "1300 runs, 2026-01-01," in page and "| stale | sampler | 0.5" in page
    with (study.OUT / "comparisons.csv").open() as file:
        pairs = list(csv.DictReader(file))
    assert Counter(pair["between"] for pair in pairs) == {"corrections": 24, "lags": 60}
    claims = [p for p in pairs if p["between"] == "corrections" and float(p["q"]) <= 0.05]
    assert {(pair["task"], pair["first"]) for pair in claims} == {
        ("stale, lag 16", "none"),
        ("scales, lag 16", "none"),
    }
    assert (study.OUT / "scores.png").stat().st_size > 10_000


def test_the_surface_finds_how_the_best_rate_falls(study):
    away = np.array(
        [
            [math.log(float(rate) * (1 + lag) ** 0.5, study.FACTOR) for rate in study.RATES]
            for lag in study.LAGS
        ]
    )
    centre = math.log(study.CENTRE, study.FACTOR)
    found = study.fit_surface(0.9 - 0.05 * (away - centre) ** 2)
    assert found.factor == pytest.approx(0.5**0.5) and found.share == pytest.approx(1.0)
    assert math.isnan(study.fit_surface(0.1 + 0.05 * (away - centre) ** 2).factor)


def test_the_rate_of_a_seed_does_not_depend_on_its_score(study):
    scores = np.random.default_rng(0).random((10, 5))
    chosen = study.choose_for_each_seed(scores)
    for seed in range(10):
        changed = scores.copy()
        changed[seed] = [9.0, -9.0, 3.0, 0.0, 1.0]
        assert study.choose_for_each_seed(changed)[seed] == chosen[seed]
        assert chosen[seed] == np.delete(scores, seed, 0).mean(0).argmax()
