"""Loggers: several at once, what each is told, and a missing package."""

from __future__ import annotations

import re

import pytest

from laws import cases
from rlkit.commands.cli import main
from rlkit.config.compose import compose
from rlkit.errors import ConfigError, install
from rlkit.training import loggers

WANDB = {"_target_": "rlkit.training.loggers.wandb", "_partial_": True, "project": "rlkit", "entity": None, "mode": "offline"}


def test_several_at_once():
    assert list(compose(["logger=[tensorboard,mlflow,wandb]"]).config["logger"]) == ["tensorboard", "mlflow", "wandb"]
    assert compose(["logger=wandb"]).config["logger"] == {"wandb": WANDB}
    assert not compose(["logger=none"]).config.get("logger")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_refused_with_what_to_install(name, monkeypatch, tmp_path):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=re.escape(install(name))):
        getattr(loggers, name)(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    cases(
        [
            ["train", "logger=wandb"],
            ["train", "logger=[tensorboard,mlflow]"],
            ["check", "logger=wandb"],
            ["train", "-m", "logger=mlflow,none"],
        ],
        2,
    ),
    ids=" ".join,
)
def test_a_missing_package_is_refused_before_data_and_model_are_loaded(words, monkeypatch, tmp_path, capsys):
    """It was refused by the logger itself, which is made when a large model has been loaded for minutes."""
    found = loggers.importlib.util.find_spec
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name, *a: None if name in ("wandb", "mlflow") else found(name, *a))
    monkeypatch.setattr("rlkit.config.problems.rows.load_tasks", lambda x: pytest.fail("the data is loaded"))
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert install("wandb" if "wandb" in words[-1] else "mlflow") in said and list(tmp_path.iterdir()) == []


def test_a_mode_that_wandb_does_not_know_is_refused():
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode: 'quiet' is not one of offline, online, disabled"):
        compose(["logger=wandb", "logger.wandb.mode=quiet"])


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """What TensorBoard reads back of a real run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path_factory.mktemp("run")
    words = ["debug=fast", "evaluation.n=2", "trainer.accelerator=cpu", "generation.max_new_tokens=32", "task.max_samples=32"]
    assert main(["train", *words, "batch.group_size=4", f"hydra.run.dir={folder / 'x'}"]) == 0
    events = EventAccumulator(str(folder / "x" / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_has_scalars_in_groups_histograms_and_texts(events):
    tags = events.Tags()
    assert {"reward/mean", "kl/ref_k3", "test/accuracy", "perf/step_s"} <= set(tags["scalars"])
    assert {"reward/histogram", "adv/histogram"} == set(tags["histograms"])
    assert sum(bucket for bucket in events.Histograms("reward/histogram")[-1].histogram_value.bucket) == 8, "every rollout of the step"
    assert "samples/0/text_summary" in tags["tensors"]


def test_tensorboard_compares_runs_by_settings_and_final_figures(events):
    """Without both the HPARAMS tab stays empty."""
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    start = parse_session_start_info_plugin_data(events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content)
    assert start.hparams["batch.group_size"].number_value == 4 and start.hparams["algorithm.name"].string_value == "grpo"
    assert {"final/test/accuracy", "final/reward/mean"} <= set(events.Tags()["scalars"])
    assert events.Scalars("final/reward/mean")[-1].value == events.Scalars("reward/mean")[-1].value
