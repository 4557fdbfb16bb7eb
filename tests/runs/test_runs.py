"""Run folders: which one a command means, what a continued run may change, and that nothing is ever
overwritten."""

from __future__ import annotations

import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from rlkit.commands.cli import main
from rlkit.config.changes import find_differences, refuse_changes
from rlkit.errors import ConfigError
from rlkit.runs import folder as runs
from rlkit.system.identity import read_identity

CONFIG = {
    "name": "grpo",
    "seed": 0,
    "resume": "never",
    "model": {"_target_": "rlkit.models.load_policy", "path": "tiny", "lora": {"rank": 0}},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1.0e-3, "betas": [0.9, 0.99]},
    "task": {"_target_": "rlkit.tasks.arithmetic", "max_samples": 64},
    "trainer": {"steps": 25, "max_time": None, "accelerator": "auto"},
    "schedule": {"numbers": {}},
}


def changed(path: str, value) -> dict:
    """CONFIG with one value changed."""
    config = json.loads(json.dumps(CONFIG))
    *keys, last = path.split(".")
    node = config
    for key in keys:
        node = node[key]
    node[last] = value
    return config


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """An outputs folder of its own."""
    monkeypatch.setattr(runs, "OUTPUTS", tmp_path / "outputs")
    return tmp_path / "outputs"


def make_run(parent: Path, name: str, age: int, config=None, ended: str | None = None) -> Path:
    """A run folder; the higher its age, the older."""
    folder = parent / name
    runs.write_config(folder, config or CONFIG)
    if ended:
        (folder / "summary.json").write_text(
            json.dumps({"ended": ended, "identity": read_identity(folder)})
        )
    os.utime(folder, (10**9 - age, 10**9 - age))
    os.utime(folder / "config.yaml", (10**9 - age, 10**9 - age))
    return folder


# ------------------------------------------------------------------------------------------ folders


def test_a_fresh_folder_is_never_one_that_exists(tmp_path, monkeypatch):
    """Several runs within one second, the clock standing still: each gets a folder of its own."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(runs, "datetime", Clock)
    folders = []
    for _ in range(4):
        folders.append(runs.make_fresh_folder(tmp_path / "grpo"))
        folders[-1].mkdir(parents=True, exist_ok=True)
    assert [f.name for f in folders] == ["2026-01-02_03-04-05"] + [
        f"2026-01-02_03-04-05_{i}" for i in (2, 3, 4)
    ]
    assert {f.parent for f in folders} == {tmp_path / "grpo"}


def test_names_of_fresh_folders_sort_by_time(tmp_path):
    stamp = runs.make_fresh_folder(tmp_path).name
    assert datetime.strptime(stamp, "%Y-%m-%d_%H-%M-%S")


@pytest.mark.parametrize(
    "ended, finished",
    [("finished", True), ("interrupted", False), ("failed: OSError: x", False), (None, False)],
)
def test_only_a_summary_that_says_so_means_finished(tmp_path, ended, finished):
    assert runs.is_finished(make_run(tmp_path, "run", 0, ended=ended)) is finished


@pytest.mark.parametrize("text", ["", "{", "null"])
def test_a_damaged_summary_is_an_unfinished_run(tmp_path, text):
    """A full disk or an edit by hand must not end `resume=auto` in a traceback."""
    folder = make_run(tmp_path, "run", 0)
    (folder / "summary.json").write_text(text)
    assert runs.is_finished(folder) is False


def test_a_summary_of_another_run_is_none_of_this_one(tmp_path):
    folder = make_run(tmp_path, "run", 0, ended="finished")
    runs.write_config(folder, {**CONFIG, "seed": 7})
    assert runs.read_summary(folder) is None and runs.is_finished(folder) is False


@pytest.mark.parametrize("below", [".", "checkpoints", "checkpoints/step_000010.ckpt"])
def test_a_run_is_found_by_itself_or_by_its_checkpoints(tmp_path, below):
    folder = make_run(tmp_path, "run", 0)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step_000010.ckpt").touch()
    assert runs.find_run(str(folder / below), "run") == folder


def test_what_is_no_run_is_refused_and_the_newest_is_named(outputs):
    make_run(outputs / "a", "old", 50)
    newest = make_run(outputs / "b", "new", 10)
    with pytest.raises(
        ConfigError, match=rf"resume=nowhere: no run folder.*newest run is {newest}"
    ):
        runs.find_run("nowhere", "resume")


def test_a_config_of_other_programs_beside_the_runs_is_no_run(outputs):
    make_run(outputs / "grpo", "old", 50)
    (outputs.parent / "config.yaml").write_text("somebody: else\n")
    with pytest.raises(ConfigError, match=r"run=.*grpo: no run folder"):
        runs.find_run(str(outputs / "grpo"), "run")


def test_a_misspelt_folder_is_answered_with_the_nearest(outputs):
    make_run(outputs / "grpo", "first", 50)
    with pytest.raises(ConfigError, match=r"run folder of rlkit\. Did you mean '.*outputs/grpo"):
        runs.find_run(str(outputs / "grop"), "run")


def test_what_is_no_run_is_refused_where_there_is_none(outputs):
    with pytest.raises(ConfigError, match=r"run=nowhere: no run folder of rlkit\.$"):
        runs.find_run("nowhere", "run")


def test_a_misspelt_name_inside_a_run_is_refused(tmp_path, monkeypatch):
    """`run=typo` from within a run folder, or RUN/typo, must not quietly mean that run: the path
    names nothing."""
    folder = make_run(tmp_path, "run", 0)
    monkeypatch.chdir(folder)
    for text in ("typo", str(folder / "typo")):
        with pytest.raises(ConfigError, match="no run folder"):
            runs.find_run(text, "run")


# ------------------------------------------------------------------------------------------ configs


def test_a_config_reads_back_as_it_was_written(tmp_path):
    runs.write_config(tmp_path / "a" / "run", CONFIG)
    assert runs.read_config(tmp_path / "a" / "run") == CONFIG
    assert find_differences(runs.read_config(tmp_path / "a" / "run"), CONFIG) == {}


DIFFERENCES = {
    "a number": (changed("optimizer.lr", 2e-3), {"optimizer.lr": (1e-3, 2e-3)}),
    "an entry of a list": (
        changed("optimizer.betas", [0.9, 0.95]),
        {"optimizer.betas": ([0.9, 0.99], [0.9, 0.95])},
    ),
    "a new key": (changed("trainer.threads", 2), {"trainer.threads": (None, 2)}),
    "a branch for a value": (changed("model.lora", None), {"model.lora.rank": (0, None)}),
    "an entry of an empty mapping": (
        changed("schedule.numbers", {"kl.coef": 1}),
        {"schedule.numbers": ({}, None), "schedule.numbers.kl.coef": (None, 1)},
    ),
    "nothing": (changed("seed", 0), {}),
    "an equal number of another type": (changed("seed", 0.0), {}),
}


@pytest.mark.parametrize("new, want", DIFFERENCES.values(), ids=DIFFERENCES)
def test_difference_by_dotted_key(new, want):
    assert find_differences(CONFIG, new) == want


@pytest.mark.parametrize(
    "path, value", [("trainer.steps", 50), ("trainer.max_time", 3.0), ("resume", "auto")]
)
def test_the_length_of_a_run_is_no_difference(path, value):
    assert find_differences(CONFIG, changed(path, value)) == {}


def test_a_key_that_went_away_is_a_difference():
    new = changed("seed", 0)
    del new["task"]["max_samples"]
    assert find_differences(CONFIG, new) == {"task.max_samples": (64, None)}


FIXED = [
    ("model.path", "other"),
    ("model.lora.rank", 8),
    ("task.max_samples", 8),
    ("seed", 1),
    ("optimizer._target_", "torch.optim.SGD"),
]


@pytest.mark.parametrize("path, value", FIXED)
def test_a_run_cannot_continue_as_another(path, value):
    with pytest.raises(ConfigError, match=rf"{path} was .* and is now {value}.*resume=never"):
        refuse_changes(Path("run"), find_differences(CONFIG, changed(path, value)))


@pytest.mark.parametrize(
    "path, value", [("optimizer.lr", 1e-4), ("trainer.accelerator", "cpu"), ("name", "model")]
)
def test_other_changes_are_allowed(path, value):
    refuse_changes(Path("run"), find_differences(CONFIG, changed(path, value)))


def test_a_key_that_only_begins_like_a_fixed_one_is_free():
    refuse_changes(Path("run"), {"tasks": (1, 2), "seeds.a": (1, 2), "modelling": (1, 2)})


# -------------------------------------------------------------------------------------- resume=auto


def test_the_newest_unfinished_run_of_this_config_is_continued(outputs):
    make_run(outputs / "grpo", "1", 50, ended="interrupted")
    wanted = make_run(outputs / "grpo", "2", 40, changed("trainer.steps", 99))
    make_run(outputs / "grpo", "3", 30, ended="finished")
    make_run(outputs / "grpo", "4", 20, changed("optimizer.lr", 9.0))
    make_run(outputs / "other", "5", 10)
    (outputs / "grpo" / "no run").mkdir()
    assert runs.find_unfinished_run("grpo", CONFIG) == wanted


def test_a_run_is_continued_on_another_number_of_devices(outputs):
    config = changed("trainer.devices", 4)
    config["trainer"] |= {"strategy": "ddp", "nodes": 2, "timeout": 60}
    wanted = make_run(outputs / "grpo", "1", 50, config)
    assert runs.find_unfinished_run("grpo", CONFIG) == wanted
    assert find_differences(config, CONFIG)["trainer.devices"] == (
        4,
        CONFIG["trainer"].get("devices"),
    )  # it is said


@pytest.mark.parametrize("name", ["grpo", "absent"])
def test_nothing_to_continue(outputs, name):
    make_run(outputs / "grpo", "1", 0, ended="finished")
    assert runs.find_unfinished_run(name, CONFIG) is None


@pytest.mark.parametrize("text", ["", "seed: 0\nmod", "name: 'gr"])
def test_a_run_with_a_damaged_config_is_passed_over(outputs, text):
    """A run killed while its config was being written must not keep `resume=auto` from the one
    before."""
    wanted = make_run(outputs / "grpo", "1", 50)
    damaged = make_run(outputs / "grpo", "2", 10)
    (damaged / "config.yaml").write_text(text)
    assert runs.find_unfinished_run("grpo", CONFIG) == wanted


# ---------------------------------------------------------------------------------------- overrides


def test_saved_overrides_are_those_of_hydra(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(
        # the last two are of one process alone
        "- seed=3\n- algorithm=grpo\n- ++optimizer.lr=1e-4\n- resume=auto\n- +takeover=true\n"
    )
    assert runs.read_overrides(tmp_path) == ["seed=3", "algorithm=grpo", "++optimizer.lr=1e-4"]
    assert runs.read_overrides(tmp_path / "absent") == []


def test_a_run_folder_is_named_by_what_differs_from_the_default():
    given = [
        "algorithm=dapo",
        "++optimizer.lr=3e-4",
        "seed=2",
        "resume=never",
        "logger=none",
        "task.path=/a b/c.jsonl",
        "debug=fast",
    ]
    assert runs.describe_overrides(given, "dapo") == "lr-3e-4_seed-2"
    long = [f"kl.key{i}={'1' * 20}" for i in range(9)]
    assert runs.describe_overrides(long, "grpo") == "_".join(
        f"key{i}-{'1' * 20}" for i in range(2)
    ), "whole parts, at most 60 characters"


@pytest.fixture
def three_runs(tmp_path):
    """Two whole runs and one whose summary was never written."""
    folders = []
    for number, (overrides, accuracy) in enumerate(
        [(["kl=none"], 0.5), (["optimizer.lr=1e-3", "kl=none"], 0.75), (["seed=2"], None)]
    ):
        folder = tmp_path / "outputs" / "grpo" / f"run{number}"
        (folder / ".hydra").mkdir(parents=True)
        lr = 1e-3 if number == 1 else 3e-4
        more = {"betas": [0.9, 1]} if number == 2 else {"schedule": None}
        runs.write_config(folder, {"seed": 2 if number == 2 else 0, "optimizer": {"lr": lr}} | more)
        os.utime(folder / "config.yaml", (1000 + number, 1000 + number))
        (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
        if accuracy is not None:
            summary = {
                "ended": "finished",
                "steps": 3,
                "tokens": 12345,
                "before": {"accuracy": 0.25},
                "after": {"accuracy": accuracy},
            }
            (folder / "summary.json").write_text(
                json.dumps(summary | {"identity": read_identity(folder)})
            )
        folders.append(folder)
    chosen = {"hydra": {"runtime": {"choices": {"task": "arithmetic"}}}}
    (folders[0] / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(chosen))
    return folders


def test_runs_are_listed_newest_first_and_filtered_by_settings(
    three_runs, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    def names(*words):
        assert main(["runs", *words]) == 0
        return [
            found[0]
            for line in capsys.readouterr().out.splitlines()
            if (found := re.findall(r"run\d", line))
        ]

    shutil.copytree(three_runs[2], three_runs[2] / "debug" / "step_000001")
    assert names() == ["run2", "run1", "run0"], "a debug bundle is no run of its own"
    assert names("kl=none") == ["run1", "run0"], "an option, as it was given"
    assert names("optimizer.lr=0.001") == ["run1"], "1e-3 is the same number"
    assert names("optimizer.lr=3e-4", "seed=2") == ["run2"]
    assert names("schedule=null") == ["run1", "run0"] and names("betas=[0.9,1]") == ["run2"]
    assert names("task=arithmetic") == ["run0"], "an option by default"
    assert names("limit=1") == ["run2"] and names("seed=9") == []
    assert main(["runs", "kl=none", "limit=x"]) == 2 == main(["runs", "limit=²"])
    assert main(["runs", "diff", "a", "b"]) == 2
    assert "runs diff a: no run folder" in capsys.readouterr().err


def test_a_misspelt_setting_of_a_list_is_answered_with_the_nearest(
    three_runs, tmp_path, monkeypatch, capsys
):
    """An empty list looked as if no run had it."""
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "optimiser.lr=1e-3"]) == 0
    said = "no run with optimiser.lr=1e-3 below outputs. Did you mean 'optimizer.lr'?"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    "names", [("run0", "run1"), ("algorithm=grpo,epochs=1", "lr=1e-3")], ids=["plain", "of a sweep"]
)
def test_two_runs_are_compared_setting_by_setting(names, three_runs, capsys):
    """A folder that a sweep named after its overrides is a folder, and no override."""
    folders = [
        run.rename(run.with_name(name)) for run, name in zip(three_runs, names, strict=False)
    ]
    assert main(["runs", "diff", *map(str, folders)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"optimizer\.lr +0\.0003 +0\.001\n", said) and re.search(
        r"test accuracy, after +0\.500 +0\.750\n", said
    )
    assert "seed" not in said.partition("whether")[0] and "12,345" in said


def test_a_run_began_with_its_first_process(tmp_path):
    """A resumed run writes config.yaml again at its end."""
    runs.write_config(tmp_path, {"seed": 0}, new=True)
    for _ in range(2):
        runs.write_start(tmp_path, {"seed": 0}, {}, identity="x")
    starts = json.loads((tmp_path / "run.json").read_text())
    starts[0]["started"] = "2026-01-02T03:04:05"
    (tmp_path / "run.json").write_text(json.dumps(starts))
    assert runs.read_begin(tmp_path) == datetime(2026, 1, 2, 3, 4, 5)
    os.utime(tmp_path / "config.yaml", (1000, 1000))
    for damaged in ("{", "[]", json.dumps([starts[0] | {"started": "noon"}])):
        (tmp_path / "run.json").write_text(damaged)
        assert runs.read_begin(tmp_path) == datetime.fromtimestamp(1000)


def test_latest_leads_to_the_newest_run(outputs, tmp_path, monkeypatch):
    """A run that is named by the link goes on in its own folder, wherever the link leads later."""
    first = outputs / "grpo" / "a"
    second = outputs / "grpo" / "b"
    for folder in (first, second):
        folder.mkdir(parents=True)
        config = {"name": folder.name}
        runs.write_config(folder, config, new=True)
        runs.point_latest(outputs, folder)
        assert runs.find_run(str(outputs / "latest"), "run") == folder.resolve()
    assert os.readlink(outputs / "latest") == "grpo/b"
    assert runs.point_latest(outputs, None, instead_of=first) == second
    assert os.readlink(outputs / "latest") == "grpo/b", "a refused run leaves a newer run's link"
    shutil.rmtree(second)
    former = runs.point_latest(outputs, second)
    assert not os.path.lexists(outputs / "latest") and former == second
    assert runs.point_latest(outputs, first) is None
    refused = outputs / "grpo" / "refused"
    refused.mkdir()
    runs.point_latest(outputs, runs.point_latest(outputs, refused))
    assert os.readlink(outputs / "latest") == "grpo/a", "as before the refused run"
    runs.point_latest(outputs, None)
    with pytest.raises(ConfigError, match=r"newest run is .*grpo/a$"):
        runs.find_run("nowhere", "run")
