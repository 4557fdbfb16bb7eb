"""Loggers: several at once, what each is told, metrics of one's own, and a missing package."""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.config.compose import compose
from rlkit.errors import ConfigError, install
from rlkit.system.rows import read_rows
from rlkit.training import loggers

WANDB = {
    "_target_": "rlkit.training.loggers.wandb",
    "_partial_": True,
    "project": "rlkit",
    "entity": None,
    "mode": "offline",
}
WANDB |= {"group": None, "tags": [], "job_type": "train"}


@pytest.mark.slow
def test_several_at_once():
    assert list(compose(["logger=[tensorboard,mlflow,wandb]"]).config["logger"]) == [
        "tensorboard",
        "mlflow",
        "wandb",
    ]
    assert compose(["logger=wandb"]).config["logger"] == {"wandb": WANDB}
    assert not compose(["logger=none"]).config.get("logger")


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_refused_with_what_to_install(name, monkeypatch, tmp_path):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=re.escape(install(name))):
        getattr(loggers, name)(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
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
def test_a_missing_package_is_refused_before_data_and_model_are_loaded(
    words, monkeypatch, tmp_path, capsys
):
    """It was refused by the logger itself, which is made when a large model has been loaded for
    minutes."""
    found = loggers.importlib.util.find_spec
    monkeypatch.setattr(
        loggers.importlib.util,
        "find_spec",
        lambda name, *a: None if name in ("wandb", "mlflow") else found(name, *a),
    )
    monkeypatch.setattr(
        "rlkit.config.problems.rows.load_tasks", lambda x: pytest.fail("the data is loaded")
    )
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert (
        install("wandb" if "wandb" in words[-1] else "mlflow") in said
        and list(tmp_path.iterdir()) == []
    )


@pytest.mark.parametrize(
    "given", [{"mean": 1.0}, {"x_frac": 1.0}, {"x": "text"}, {"x": float("nan")}]
)
def test_a_rewards_metric_that_cannot_be_kept_is_refused(given):
    """Beside rlkit's own figures of the term it would be one of the two."""
    from rlkit.rewards import Reward, RewardError, Term, score
    from rlkit.types import Rollout, Task

    with pytest.raises(RewardError, match=r"rlkit uses this name itself|finite number"):
        score(
            [Rollout(Task("row/0", ()), ())],
            Reward("r", {"own": Term(1.0, lambda rollout: (1.0, given))}),
        )


def test_a_callbacks_metric_that_cannot_be_kept_is_refused():
    from rlkit.errors import PartError
    from rlkit.training.metrics import convert_to_number, with_own

    assert with_own({"a": torch.tensor(2.0)}, {"b": [1.0, 2.0]}) == {"a": 2.0, "b": 1.5}
    with pytest.raises(PartError, match="logged a, a metric of rlkit"):
        with_own({"a": 1.0}, {"a": [2.0]})
    with pytest.raises(PartError, match="the metric 'x' is Tensor, not a number"):
        convert_to_number("x", torch.zeros(2))


def test_a_mode_that_wandb_does_not_know_is_refused():
    with pytest.raises(
        ConfigError, match=r"logger\.wandb\.mode: 'quiet' is not one of offline, online, disabled"
    ):
        compose(["logger=wandb", "logger.wandb.mode=quiet"])


def package(monkeypatch, name, **parts):
    """A package that is not installed here, with these parts."""
    own = ModuleType(name)
    own.__spec__ = ModuleSpec(name, None)
    vars(own).update(parts)
    monkeypatch.setitem(sys.modules, name, own)
    return own


class Recorded:
    """A run of a tracker that keeps what it was told."""

    def __init__(self, **settings):
        self.settings, self.config, self.said, self.id = settings, {}, [], "x"

    def log(self, metrics, step=None):
        self.said.append((metrics, step))

    def define_metric(self, *_, **__):
        pass

    def finish(self):
        self.said.append(("finished", None))


def a_table(columns=None, data=None, dataframe=None):
    return SimpleNamespace(columns=columns, data=data)


def test_wandb_has_a_table_with_typed_columns_and_runs_that_can_be_filtered(monkeypatch, tmp_path):
    """A table of one text a row could be neither sorted by reward nor filtered by problem."""
    from lightning.pytorch.loggers import wandb as lightning_wandb

    package(monkeypatch, "wandb", run=None, init=Recorded, Table=a_table, Histogram=list)
    for name, part in (
        ("wandb.sdk", None),
        ("wandb.sdk.lib", "RunDisabled"),
        ("wandb.wandb_run", "Run"),
    ):
        package(monkeypatch, name, **({part: type(part, (), {})} if part else {}))
    monkeypatch.setattr(lightning_wandb, "_WANDB_AVAILABLE", True)
    folder = tmp_path / "sweep" / "job"
    folder.mkdir(parents=True)
    logger = loggers.make_tolerant(loggers.wandb(folder, 0, tags=["a"]))
    loggers.log_table(logger, "completions", ["prompt", "reward"], [["hi", 0.5]], 3)
    loggers.log_histogram(logger, "h", [1.0], 3)
    run = logger.experiment
    assert {k: run.settings[k] for k in ("group", "tags", "job_type")} == {
        "group": "sweep",
        "tags": ["a"],
        "job_type": "train",
    }
    told, histogram = (metrics for metrics, _ in run.said)
    assert (
        vars(told["completions"]) == {"columns": ["prompt", "reward"], "data": [["hi", 0.5]]}
        and told["trainer/global_step"] == 3
    )
    assert histogram["h"] == [1.0]


def test_trackio_is_told_what_wandb_is_told(monkeypatch, tmp_path):
    begun = []
    package(
        monkeypatch,
        "trackio",
        init=lambda **kw: begun.append(Recorded(**kw)) or begun[-1],
        Table=a_table,
        Histogram=list,
    )
    logger = loggers.make_tolerant(loggers.trackio(tmp_path / "grpo" / "now", 5, project="p"))
    loggers.log_settings(logger, {"seed": 1})
    logger.log_metrics({"reward/mean": 0.5}, step=6)
    loggers.log_text(logger, "word", "said", 6)
    loggers.log_table(logger, "completions", ["reward"], [[1.0]], 6)
    loggers.log_histogram(logger, "h", [1.0], 6)
    logger.finalize("success")
    (run,) = begun
    assert (
        run.config == {"seed": 1}
        and run.settings["resume"] == "allow"
        and run.settings["name"] == "grpo/now"
    )
    assert run.said[0] == ({"reward/mean": 0.5}, 6) and run.said[1][0]["word"].data == [[6, "said"]]
    assert (
        run.said[2][0]["completions"].data == [[1.0]]
        and run.said[3] == ({"h": [1.0]}, 6)
        and run.said[-1][0] == "finished"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a real run, with parts that measure something themselves."""
    folder = tmp_path_factory.mktemp("run") / "x"
    words = [
        "+callbacks.mine={_target_: own_metrics_parts.own, _partial_: true}",
        "algorithm.policy_loss._target_=own_metrics_parts.loss",
    ]
    words += ["~algorithm.policy_loss.clip_low", "~algorithm.policy_loss.clip_high"]
    term = (
        "terms.brief={_target_: rlkit.rewards.Term, weight: 0.0, fn: {_target_:"
        " own_metrics_parts.few_words, _partial_: true}}"
    )
    words += [f"+reward.{term}", f"+evaluation.reward.{term}"]
    words += [
        "debug=fast",
        "evaluation.n=2",
        "trainer.accelerator=cpu",
        "generation.max_new_tokens=32",
        "task.max_samples=32",
    ]
    assert main(["train", *words, "batch.group_size=4", f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def events(folder):
    """What TensorBoard reads back of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


OWN = {
    "mine/half": 0.5,
    "mine/direct": 3.0,
    "mine/step": None,
    "mine/late": 7.0,
    "policy_loss/above": None,
    "reward/brief/words": None,
}
OWN |= {"test/reward/brief/words": None, "test/reward/brief/mean": None}  # of held-out problems too


@pytest.mark.slow
def test_metrics_of_ones_own_reach_the_rows_and_the_loggers(folder, events):
    """A callback's were lost: the row had been written before, and Lightning's log knew of no
    row."""
    row = {
        name: value for row in read_rows(folder / "metrics.jsonl") for name, value in row.items()
    }
    scalars = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    for name, value in OWN.items():
        assert row[name] == pytest.approx(scalars[name]) and value in (None, row[name]), name
    assert (
        row["mine/step"] == row["step"]
        and row["mine/text"] == "a word"
        and "mine/text/text_summary" in events.Tags()["tensors"]
    )


@pytest.mark.slow
def test_nothing_of_a_row_is_dropped_on_the_way_to_a_logger(folder, events):
    """Every finite number of a step's row, from the first to the last, is a point of its curve."""
    steps = [row for row in read_rows(folder / "metrics.jsonl") if row["step"]]
    numbers = {
        (k, row["step"])
        for row in steps
        for k, v in row.items()
        if isinstance(v, int | float) and k != "step"
    }
    told = {(tag, point.step) for tag in events.Tags()["scalars"] for point in events.Scalars(tag)}
    assert numbers <= told


@pytest.mark.slow
def test_the_run_wrote_its_completions_as_a_flat_table(folder):
    import pandas

    table = pandas.read_parquet(folder / "completions")
    assert len(table) == sum(
        row["batch/rollouts"]
        for row in read_rows(folder / "metrics.jsonl")
        if row.get("batch/rollouts")
    )
    assert {
        "prompt",
        "completion",
        "answer",
        "reward",
        "reward_brief",
        "advantage",
        "policy_version",
        "group",
        "step",
    } <= set(table)
    groups = table.groupby(["step", "group"])
    assert (groups["advantage"].sum().abs() < 1e-5).all() and (
        table["policy_version"] == table["step"] - 1
    ).all()


@pytest.mark.slow
def test_tensorboard_has_scalars_in_groups_histograms_and_texts(events):
    tags = events.Tags()
    assert {"reward/mean", "kl/ref_k3", "test/accuracy", "perf/step_s"} <= set(tags["scalars"])
    assert {"reward/histogram", "adv/histogram"} == set(tags["histograms"])
    assert (
        sum(bucket for bucket in events.Histograms("reward/histogram")[-1].histogram_value.bucket)
        == 8
    ), "every rollout of the step"
    assert "samples/0/text_summary" in tags["tensors"]


@pytest.mark.slow
def test_tensorboard_compares_runs_by_settings_and_final_figures(events):
    """Without both the HPARAMS tab stays empty."""
    from tensorboard.plugins.hparams.metadata import (
        SESSION_START_INFO_TAG,
        parse_session_start_info_plugin_data,
    )

    start = parse_session_start_info_plugin_data(
        events.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    )
    assert (
        start.hparams["batch.group_size"].number_value == 4
        and start.hparams["algorithm.name"].string_value == "grpo"
    )
    assert {"final/test/accuracy", "final/reward/mean"} <= set(events.Tags()["scalars"])
    assert events.Scalars("final/reward/mean")[-1].value == events.Scalars("reward/mean")[-1].value
