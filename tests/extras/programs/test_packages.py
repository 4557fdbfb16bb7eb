"""Agents of foreign packages are trained token by token, as they are. CI installs three of the
packages of experiments/programs/packages.py."""

from __future__ import annotations

import importlib.util
import math
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from parametrise import each
from rlkit.extras.programs import program

FILE = Path(__file__).resolve().parents[3] / "experiments" / "programs" / "packages.py"
spec = importlib.util.spec_from_file_location("packages", FILE)
assert spec and spec.loader
packages = sys.modules["packages"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)


@each("name", ["openai_chat", "openai_responses", "anthropic_messages", "smolagents_tools"])
def test_an_agent_of_a_package_is_trained_token_by_token(name):
    requirements = packages.PACKAGES[name].requirements
    missing = [word for word in requirements if importlib.util.find_spec(word) is None]
    if missing:
        pytest.skip(f"needs the package {missing[0]}")
    row = packages.check(name, sys.executable, confined="auto")
    assert row["exact"] and row["scored"], row
    assert packages.is_unchanged(distribution(requirements[0]))


def test_a_reply_that_is_lost_or_changed_is_found(tiny):
    heard: list = []
    environment = program(function=lambda task, client: client.chat(task.messages) and None)
    rollout = packages.play_script(tiny, "openai_chat", environment, heard)
    assert packages.largest_difference(tiny, [rollout], heard) < packages.TOLERANCE
    assert packages.largest_difference(tiny, [rollout], heard * 2) == math.inf
    assert packages.largest_difference(tiny, [rollout] * 2, heard) == math.inf
    assert packages.largest_difference(tiny, [], []) == math.inf
    (step,) = rollout.steps
    other = tuple(p - 1 for p in step.logprobs)
    assert packages.largest_difference(
        tiny,
        [rollout._replace(steps=(step._replace(logprobs=other),))],
        [heard[0]._replace(logprobs=other)],
    ) == pytest.approx(1, abs=packages.TOLERANCE)
    moved = step._replace(prompt_ids=step.prompt_ids[1:])
    changed = rollout._replace(steps=(moved,))
    assert packages.largest_difference(tiny, [changed], heard) == math.inf
