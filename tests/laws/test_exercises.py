"""Exercises that users solved with the docs alone (tests/extension/exercises), each in an empty
folder with its own files: as a script, and by its command."""

from __future__ import annotations

import json
import runpy
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import rlkit
from rlkit.commands.cli import main

EXERCISES = Path(__file__).resolve().parents[1] / "extension" / "exercises"


@pytest.fixture
def exercise(tmp_path, monkeypatch, capsys):
    """name → (the script's variables, the rows of its command's run); modules of the folder are
    forgotten afterwards."""
    known = dict(sys.modules)

    def run(name):
        shutil.copytree(EXERCISES / name, tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        found = runpy.run_path("run.py")
        rows = []
        if Path("run.sh").exists():
            _, _, *words = shlex.split(Path("run.sh").read_text())
            assert main([*words, "logger=none"]) == 0
            [metrics] = tmp_path.glob("outputs/mine/*/metrics.jsonl")
            rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        return found, rows

    yield run
    for name in set(sys.modules) - set(known):
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def weights(of):
    policy = of.policy if isinstance(of, rlkit.Run) else of
    return torch.cat([value.flatten() for value in policy.model.state_dict().values()])


@pytest.mark.slow
def test_an_advantage(exercise):
    """In the command losers count for nothing, so that no advantage is negative."""
    script, rows = exercise("advantage")
    assert 0 < script["mine"].metrics[0]["advantage/below"] < 1
    assert not torch.equal(weights(script["mine"]), weights(script["usual"]))
    [row] = rows
    assert row["advantage/below"] == script["mine"].metrics[0]["advantage/below"]
    assert row["adv/min"] == 0 < row["adv/max"]


@pytest.mark.slow
def test_a_tool(exercise):
    """Each episode counts from the beginning; from 3, as the option has it, nobody counts one."""
    script, [row] = exercise("tool")
    for played, scored in zip(script["collected"], script["scored"], strict=True):
        calls = played.state["counting"]["calls"]
        assert calls == sum(len(step.tool_calls) for step in played.steps)
        assert scored.reward == (calls == 1)
    assert sum(rollout.reward for rollout in script["scored"]) > 0 == row["reward/mean"]
    assert script["x"].config["environment"]["tools"]["counting"]["_partial_"]


@pytest.mark.slow
def test_a_policy_loss(exercise):
    script, _ = exercise("policy_loss")
    by_file, by_function = script["by_file"], script["by_function"]
    assert torch.equal(weights(by_file), weights(by_function))
    assert not torch.equal(weights(by_file), weights(script["blunt"]))
    assert by_file.metrics[0]["policy_loss/off_policy"] > 0


@pytest.mark.slow
def test_an_engine(exercise):
    """Its figures count up from the self-check before the first step."""
    script, [row] = exercise("engine")
    mine = script["mine"]
    assert torch.equal(weights(mine), weights(script["usual"]))
    first, last = (step["engine/replies"] for step in mine.metrics)
    assert last - first == sum(len(rollout.steps) for rollout in mine.rollouts)
    tokens = [step["engine/tokens"] for step in mine.metrics]
    assert tokens[1] - tokens[0] == sum(rollout.response_length for rollout in mine.rollouts)
    assert row["engine/replies"] == first


@pytest.mark.slow
def test_a_loop(exercise):
    script, _ = exercise("loop")
    assert script["counts"] == [(32, 24)] * 2
    assert torch.equal(weights(script["plain"]), weights(script["usual"]))
    assert not torch.equal(weights(script["mine"]), weights(script["usual"]))


@pytest.mark.slow
def test_a_schedule(exercise):
    script, rows = exercise("schedule")
    steps = [row for row in rows if "schedule/phase" in row]
    for found in (script["rows"], steps):
        assert [row["schedule/kl.coef"] for row in found] == [0.1, 0.02, 0.1]
        assert [row["schedule/phase"] for row in found] == [0, 0, 1]
    [switch] = [row for row in rows if "schedule/switch" in row]
    assert switch["step"] == 2 and set(switch) == {"step", "schedule/switch"}


@pytest.mark.parametrize("name", ["my_schedule.py", "my_conf/schedule/zigzag.yaml"])
def test_the_page_shows_the_files_of_the_schedule(name):
    """Whoever copies them from the page has what runs here."""
    page = (EXERCISES.parents[2] / "docs" / "own_parts.md").read_text()
    own = (EXERCISES / "schedule" / name).read_text()
    assert f"    # {name}\n{textwrap.indent(own, '    ')}" in page
