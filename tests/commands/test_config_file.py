"""`--config FILE`: overrides as YAML, and the flat config of the GSM8K/MBPP trainer."""

from __future__ import annotations

import json

import pytest
import yaml

from rlkit.commands.arguments import parse
from rlkit.commands.cli import main
from rlkit.commands.config_file import FLAT
from rlkit.config.compose import compose
from rlkit.errors import ConfigError

FILE = """
model:
  name: tiny
  lora_r: 4
  lora_alpha: 8

data:
  dataset: gsm8k        # gsm8k | mbpp
  max_samples: 8

training:
  lr: 1.0e-5
  batch_size: 2          # tasks per step
  group_size: 2          # episodes per task
  kl_coef: 0.1
  num_iterations: 1
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes my_config.yaml, in the folder that the test works in, and gives its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "my_config.yaml").write_text(text)
        return "my_config.yaml"

    return write


@pytest.mark.slow
def test_the_flat_config_trains(write, tmp_path, capfd):
    rows = [
        {"question": f"Kim has {i} toys and buys 2. How many?", "answer": f"#### {i + 2}"}
        for i in range(30)
    ]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [
        "task.path=gsm8k.jsonl",
        "evaluation.n=0",
        "generation.max_new_tokens=8",
        "batch.group_size=3",
        "hydra.run.dir=run",
    ]
    assert main(["train", "--config", write(FILE), *own]) == 0
    said = capfd.readouterr().out
    assert (
        said.count("my_config.yaml: experiment=gsm8k_tools model.path=tiny model.lora.rank=4") == 1
    )
    assert (
        "batch: 2 prompts × 3 samples" in said and "finished after 1 steps" in said
    )  # what stands behind the file wins
    (row,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["kl/coef"] == 0.1
    rate = yaml.safe_load((tmp_path / "run" / ".hydra" / "config.yaml").read_text())["optimizer"][
        "lr"
    ]
    assert rate == 1e-5  # not of the row: replies of 8 tokens earn nothing, so no update is taken


@pytest.mark.slow
def test_every_key_of_the_flat_config_is_read(write):
    config = compose(parse(["--config", write(FILE.replace("gsm8k ", "mbpp "))]).overrides).config
    expected = {
        "model.path": "tiny",
        "model.lora.rank": 4,
        "model.lora.alpha": 8,
        "task.max_samples": 8,
        "optimizer.lr": 1e-5,
    }
    expected |= {
        "batch.prompts": 2,
        "batch.group_size": 2,
        "kl.coef": 0.1,
        "trainer.steps": 1,
        "task._target_": "rlkit.tasks.mbpp",
    }
    for key, value in expected.items():
        found = config
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    assert set(FLAT.values()) <= {*expected, "task"}


def test_a_date_is_a_text(write):
    """YAML reads it as a date, and writing that as JSON was a TypeError."""
    assert parse(["--config", write("hydra.run.dir: 2026-01-31")]).overrides == [
        "hydra.run.dir='2026-01-31'"
    ]


def test_a_text_stays_a_text(write):
    """Hydra would read 1e-3 as a number, and null as None."""
    text = "name: '1e-3'\nenvironment.system_prompt: 'null'\na: [{b c: 'true', d: yes}, k1]\nkl: k3"
    assert parse(["--config", write(text)]).overrides == [
        "name='1e-3'",
        "environment.system_prompt='null'",
        "a=[{b c:'true',d:true},k1]",
        "kl=k3",
    ]


def test_a_coefficient_of_zero_needs_no_reference(write):
    assert parse(["--config=" + write("training: {kl_coef: 0}")]).overrides == [
        "experiment=gsm8k_tools",
        "kl=none",
        "reference=none",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "training: {batchsize: 4}",
            (
                "my_config.yaml:training.batchsize: there is no such key. Did you mean"
                " 'training.batch_size'"
            ),
        ),
        (
            "model: {name: tiny}\nlr: 0.1",
            "my_config.yaml:lr: there is no such key. Did you mean 'training.lr'",
        ),
        (
            "data: {dataset: math}",
            "my_config.yaml:data.dataset: there is no 'math'; write gsm8k or mbpp",
        ),
        ("just a text", "write overrides as KEY: VALUE lines"),
        ("a: [", "my_config.yaml:1: this is not YAML"),
    ],
)
def test_what_a_file_cannot_say_is_refused(write, text, message):
    with pytest.raises(ConfigError) as error:
        parse(["--config", write(text)])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: dapo\ntrainer: {steps: 7}\nname: my run\noptimizer.lr: 0.5\n",
        "[algorithm=dapo, trainer.steps=7, name='my run', optimizer.lr=0.5]",
    ],
    ids=["mapping", "list"],
)
def test_overrides_as_yaml(write, text):
    arguments = parse(["trainer.steps=3", "--config", write(text)])
    config = compose(arguments.overrides).config
    assert (config["algorithm"]["name"], config["trainer"]["steps"], config["name"]) == (
        "dapo",
        3,
        "my run",
    )
    assert config["optimizer"]["lr"] == 0.5


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"--config nowhere\.yaml: .*No such file"):
        parse(["--config", "nowhere.yaml"])
