"""Extension from outside: the wheel of rlkit and that of a user's own package, installed where
neither's source is, train together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CHOICES = [
    "algorithm=mine",
    "reward=mine",
    "kl=squared",
    "reference=every_other",
    "task=doubles",
    "environment=workshop",
    "schedule=sawtooth",
]
PARTS = {"algorithm", "reward", "kl", "reference", "task", "environment", "parser", "schedule"}
# The tool is called as the environment would: the embedded model has never seen calls in brackets.
PROGRAM = """
import asyncio
import sys
from rlkit.commands.cli import main
import rlkit
from my_package import parts
from rlkit.environments import execute
assert main(sys.argv[1:]) == 0
_, [call] = parts.brackets("[[double 21]]")
assert asyncio.run(execute(call, {"double": parts.double})).content == "42"
print("CALLED", *sorted(parts.CALLS))
print("FROM", rlkit.__file__)
"""


@pytest.fixture(scope="module", params=["packages lent", "packages installed"])
def environment(request, tmp_path_factory):
    """The python of an environment that was empty before both wheels were installed into it: beside
    the packages of this environment, which come behind its own, or with what they ask for alone."""
    folder = tmp_path_factory.mktemp("installed")
    for source in (ROOT, ROOT / "tests" / "extension"):
        build = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "-w",
            str(folder / "dist"),
            str(source),
        ]
        if subprocess.run(build, capture_output=True, timeout=300).returncode:
            pytest.skip("no wheel can be built here: pip finds no hatchling")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    python = folder / "venv" / "bin" / "python"
    wheels = [str(wheel) for wheel in (folder / "dist").glob("*.whl")]
    if request.param == "packages lent":
        [site] = (folder / "venv").glob("lib/*/site-packages")
        (site / "lent.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        asked = ["--no-deps"]
    else:
        asked = ["-c", str(ROOT / "constraints.txt")]
    install = [str(python), "-m", "pip", "install", "-q", *asked, *wheels]
    done = subprocess.run(install, capture_output=True, text=True, timeout=1800, env=outside())
    if "No matching distribution" in done.stderr or "Connection" in done.stderr:
        pytest.skip(f"no package index here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return python


def outside():
    """The environment variables, without those that would lend another environment's packages."""
    return {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


@pytest.mark.slow
def test_a_package_from_outside_trains_with_parts_of_its_own(environment, tmp_path):
    """Reward, algorithm, KL, reference, task, tool, parser, environment and schedule; rlkit's files
    are the wheel's, untouched."""
    [site] = environment.parents[1].glob("lib/*/site-packages")
    before = {f: f.read_bytes() for f in (site / "rlkit").rglob("*.py")}
    words = [
        "train",
        "hydra.searchpath=[pkg://my_package.conf]",
        *CHOICES,
        "debug=fast",
        "trainer.steps=3",
        "evaluation.n=2",
    ]
    done = subprocess.run(
        [str(environment), "-c", PROGRAM, *words],
        cwd=tmp_path,
        env=outside(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    last = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if line.startswith(("CALLED", "FROM"))
    }
    assert set(last["CALLED"]) == PARTS | {"tool"}
    assert Path(last["FROM"][0]).is_relative_to(site)
    rows = [
        json.loads(line)
        for line in next(tmp_path.glob("outputs/mine/*/metrics.jsonl")).read_text().splitlines()
    ]
    steps = [row for row in rows if "optim/lr" in row]
    assert [row["optim/lr"] for row in steps] == [1e-3, 1e-5, 1e-3] and sum(
        row["optim/updates"] for row in steps
    ) == 3
    assert before == {f: f.read_bytes() for f in (site / "rlkit").rglob("*.py")}


@pytest.mark.slow
def test_options_of_a_package_compose_beside_the_shipped_ones(monkeypatch):
    """hydra.searchpath alone: no --config-dir. An option that neither has is still refused in one
    sentence."""
    from rlkit.config.compose import compose, experiment
    from rlkit.errors import ConfigError

    monkeypatch.syspath_prepend(str(ROOT / "tests" / "extension"))
    x = experiment(
        compose(
            ["hydra.searchpath=[pkg://my_package.conf]", *CHOICES, "algorithm.advantage.scale=3"]
        )
    )
    assert (
        x.algorithm.advantage.keywords == {"scale": 3}
        and x.kl.name == "squared"
        and x.reference.name == "every_other"
    )
    with pytest.raises(ConfigError, match="nothing_of_this"):
        compose(["hydra.searchpath=[pkg://my_package.conf]", "algorithm=nothing_of_this"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loop", "train"])
def test_an_example_runs_as_it_stands(name, tmp_path, capsys, monkeypatch):
    """On the smallest number of steps; nothing is written."""
    import runpy

    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= 120
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EXAMPLE_STEPS", "1")
    assert 0.3 < runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["after"] < 0.7
    assert "calculator(" in capsys.readouterr().out
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.slow
def test_an_example_learns():
    """The one whose loop is its own. The other one trains as `rlkit train` does, which learns."""
    import runpy

    assert runpy.run_path(str(ROOT / "examples" / "loop.py"))["after"] >= 0.95
