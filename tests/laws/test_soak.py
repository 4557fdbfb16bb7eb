"""A run holds no more memory, files and processes at its end than in its middle. The long version:
experiments/soak/run.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "experiments" / "soak" / "run.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def grown(**by: float) -> list[dict]:
    """1,000 steps in which something grew evenly by a share."""
    flat = {"rss": 400.0, "handles": 40.0, "children": 2.0, "yardstick": 0.01}
    return [
        {"step": i, "seconds": i + by.get("seconds", 0) * i * i / 1000}
        | {k: v * (1 + by.get(k, 0) * i / 1000) for k, v in flat.items()}
        for i in range(1, 1001)
    ]


@pytest.mark.parametrize("what", ["rss", "handles", "children", "seconds"])
def test_what_grows_is_found(soak, what):
    assert soak.broken(grown(), settled=300, timed=True) == []
    (problem,) = soak.broken(grown(**{what: 0.3}), settled=300, timed=True)
    assert {"rss": "resident memory", "seconds": "a step took"}.get(what, what) in problem


def test_a_machine_that_slows_down_slows_no_run(soak):
    assert (
        soak.broken(grown(seconds=0.3, yardstick=0.6), settled=300, timed=True) == []
    )  # a sum of seconds grows by twice the share


@pytest.mark.slow
def test_nothing_grows_in_150_steps(tmp_path):
    command = [sys.executable, str(RUN), "--steps", "150", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
