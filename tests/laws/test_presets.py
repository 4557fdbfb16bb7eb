"""Every preset takes a real step on the embedded model; where it names a large one or a data set of
the hub, that alone is replaced."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from parametrise import cases, presets
from rlkit.commands import check
from rlkit.config.compose import compose, experiment
from rlkit.config.problems.rows import load_tasks
from rlkit.config.problems.schedules import build_first_steps

CHEAP = ("tool_tracking",)  # the others take a minute together


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(presets(), CHEAP))
def test_a_preset_takes_a_step(name, tmp_path):
    path = tmp_path / "talk.jsonl"
    row = {
        "messages": [
            {"role": "user", "content": "How are you?"},
            {"role": "assistant", "content": "#### 7"},
        ]
    }
    path.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, row["messages"][1]]})
            + "\n"
            for i in range(9)
        )
    )
    overrides = [
        f"experiment={name}",
        "evaluation.n=0",
        "evaluation.every=0",
        "evaluation.stop_at=null",
        "logger=none",
    ]
    config = compose([*overrides, *([f"task.path={path}"] if name == "sft" else [])]).config
    overrides += [f"task.path={path}"] if name == "sft" else []
    large = re.search("Qwen|^get:", config["model"]["path"])
    overrides += ["model=tiny"] if large else []
    overrides += (
        ["task=arithmetic"]
        if config["task"]["_target_"] in ("rlkit.tasks.gsm8k", "rlkit.tasks.mbpp")
        else []
    )
    overrides += ["batch.group_size=4"] if config["batch"]["group_size"] > 8 else []
    x = experiment(compose(overrides))
    report = check.run(next(iter(build_first_steps(x).values())), load_tasks(x))
    assert report.metrics["optim/updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    sorted(Path(__file__).parents[2].glob("experiments/**/study.yaml")),
    ids=lambda path: path.parent.name,
)
def test_a_study_can_run(path, monkeypatch):
    study = yaml.safe_load(path.read_text())
    assert set(study) <= {"title", "variants", "common", "once", "seeds", "path", "warm_up"}
    if "path" in study:
        monkeypatch.syspath_prepend(str((path.parent / study["path"]).resolve()))
    assert set(study.get("once", ())) < set(study["variants"])
    monkeypatch.setenv("GSM8K", "rows")  # the folder that one study reads
    for overrides in [*study["variants"].values(), study.get("warm_up", [])]:
        experiment(compose([*study.get("common", ()), *overrides]))
