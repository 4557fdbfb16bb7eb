"""`rlkit show`: each key has the origin that it has, and the default run fits on a screen."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import Phase, assume
from hypothesis import strategies as st

from parametrise import each, examples
from rlkit.commands.cli import main
from rlkit.commands.show import WIDTH, screen
from rlkit.config.compose import compose, conf_dir, read_unresolved
from rlkit.config.origins import COMMAND_LINE, SILENT, explain, find_extras
from rlkit.errors import ConfigError
from rlkit.system.identity import identity_line
from rlkit.training.schedules.paths import flatten_numbers

OPTIONS = [
    "algorithm=dapo",
    "algorithm=ppo",
    "algorithm/policy_loss=dual_clip",
    "kl=none",
    "kl=k2",
    "reference=ema",
    "model=qwen3_0.6b",
    "model=tiny_guess",
    "task=gsm8k",
    "environment=tool_use",
    "generation=transformers",
    "schedule=kl_anneal",
    "schedule=grpo_to_dapo",
    "trainer=gpu",
    "experiment=guess_number_ppo",
    "experiment=bench/lake",
    "reward=[numeric,format]",
    "asynchrony=lag",
    "logger=none",
]
VALUES = {
    "seed": 7,
    "batch.prompts": 4,
    "optimizer.lr": 0.5,
    "model.lora.rank": 4,
    "trainer.steps": 9,
    "model.suggests.lr": 0.25,
    "evaluation.every": 3,
    "generation.temperature": 0.5,
    "callbacks.samples.count": 2,
    "algorithm.epochs": 1,
    "trainer.max_time": 5,
    "evaluation.temperature": 1.0,
}


def chosen_from(table):
    return st.lists(st.sampled_from(table), max_size=3, unique_by=lambda text: text.split("=")[0])


def settings(*overrides):
    return flatten_numbers(compose(overrides).config)


@pytest.mark.slow
@examples(
    chosen_from(OPTIONS), chosen_from(sorted(VALUES)), fast=3, slow=15, phases=[Phase.generate]
)
def test_each_key_has_the_origin_that_it_has(options, keys):
    if any(text.startswith("model=") for text in options) and "model.suggests.lr" in keys:
        keys.remove("model.suggests.lr")
    overrides = [*options, *(f"{key}={VALUES[key]}" for key in keys)]
    default = settings()
    try:
        full = compose(overrides)
    except ConfigError:  # these do not go together
        assume(False)
    now = flatten_numbers(full.config)
    rows = {value.key: value for value in explain(overrides).values}
    for key in keys:
        assert (rows[key].origin, rows[key].value) == (COMMAND_LINE, VALUES[key])
    for key, row in rows.items():
        assert row.value == now[key]
        if key in keys or key == "logger":  # logger=none has no keys of its own
            continue
        own = not SILENT & set(key.split(".")) and not key.startswith("schedule.phases.")
        if own:
            assert row.changed == (key not in default or default[key] != now[key]), row
        group, _, option = row.origin.partition("=")
        if row.origin.startswith(("phase ", "suggested by ", "follows ", "model.suggests.lr")):
            assert (
                isinstance(flatten_numbers(read_unresolved(full.full))[key], str)
                or row.origin[:6] == "phase "
            )
        elif not row.changed:
            assert row.origin == "default"
        else:
            written = flatten_numbers(
                yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text())
            )
            assert any(key == name or key.endswith(f".{name}") for name in written), row
    references = [
        key
        for key, value in flatten_numbers(read_unresolved(full.full)).items()
        if "${" in str(value)
    ]
    missing = [key for key in now if key not in rows]
    assert all(any(key.startswith(f"{name}.") for name in references) for key in missing)


@pytest.mark.slow
def test_options_have_the_origin_that_they_have():
    explained = explain(["experiment=recipe/scalerl", "kl=k3", "algorithm/advantage=opo"])
    origins = {o.place: (o.name, o.origin) for o in explained.options}
    assert origins["experiment"] == ("recipe/scalerl", COMMAND_LINE)
    assert origins["algorithm"] == ("cispo", "experiment=recipe/scalerl")
    assert origins["algorithm.correction"] == ("token_truncate", "experiment=recipe/scalerl")
    assert origins["kl"] == ("k3", COMMAND_LINE)
    assert origins["algorithm.advantage"] == ("opo", COMMAND_LINE)
    assert origins["task"] == ("arithmetic", "default") and origins["algorithm.ratio"][1] == ""


@pytest.mark.slow
def test_keys_of_a_phase_say_so():
    own = "schedule.phases.refine.algorithm.epochs"
    values = {v.key: v for v in explain(["schedule=grpo_to_dapo", f"{own}=2"]).values}
    assert values[own].origin == COMMAND_LINE and values[own].value == 2
    for key, value in values.items():
        if key.startswith("schedule.phases.") and key != own:
            assert value.origin == f"phase {key.split('.')[2]}"
    changed = {key for key, v in values.items() if v.changed and "phases.refine" in key}
    assert "schedule.phases.refine.algorithm.policy_loss.clip_high" in changed
    assert "schedule.phases.refine.algorithm.policy_loss.clip_low" not in changed


@pytest.mark.slow
@each(
    "key, origin",
    [
        ("optimizer.lr", "suggested by model=pretrained"),
        ("generation.max_new_tokens", "suggested by task=gsm8k"),
        ("trainer.steps", "model.suggests.steps, command line"),
        ("evaluation.every", "follows trainer.steps"),
        ("name", "follows algorithm.name"),
        ("batch.group_size", "mine.yaml"),
    ],
)
def test_a_reference_names_what_it_follows(key, origin):
    given = [
        "model=qwen3_0.6b",
        "task=gsm8k",
        "model.suggests.steps=9",
        "batch.group_size=4",
        "evaluation.every=${trainer.steps}",
    ]
    values = {v.key: v for v in explain(given, sources={"batch.group_size": "mine.yaml"}).values}
    assert values[key].origin == (COMMAND_LINE if key == "evaluation.every" else origin)


SCREENS = [
    (),
    ("algorithm=dapo", "kl=none"),
    ("experiment=grpo_to_dapo",),
    ("experiment=recipe/scalerl",),
    ("model=qwen3_0.6b", "model.lora.rank=8", "task=gsm8k"),
]


@pytest.mark.slow
@each("overrides", [pytest.param(words) for words in SCREENS])
def test_what_differs_is_on_the_screen(overrides):
    explained = explain(overrides)
    lines = screen(explained, overrides)
    assert max(map(len, lines)) <= WIDTH and len(lines) <= (80 if overrides else 60)
    assert lines[-1] == "extras: none"
    text = "\n".join(lines)
    for option in explained.options:
        if "." not in option.place:
            assert f" {option.place} = {option.name} " in text
    for value in explained.values:
        if value.changed and not value.key.endswith(".name") and "phases" not in value.key:
            name = value.key.partition(".")[2] or value.key
            name = value.key if value.key.startswith("batch.") else name
            marked = [line for line in lines if line.startswith("*") and f" {name} " in line]
            assert any(line.endswith(value.origin) for line in marked), value


@pytest.mark.slow
def test_the_tools_are_always_on_the_screen():
    """By the key that leaves each of them out."""

    def shown(*overrides):
        lines = [line.split()[:2] for line in screen(explain(overrides), overrides)]
        return [words for words in lines if words and "tools." in words[0]]

    calculator = "rlkit.environments.calculator"
    assert shown() == [["environments.tool_use.tools.calculator", calculator]]
    assert shown("environment=tool_use") == [["tools.calculator", calculator]]
    assert shown("environment=single_turn") == []


@pytest.mark.slow
def test_the_command_prints_files_and_no_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_MINE", "0rigin-of-env")
    (tmp_path / "mine.yaml").write_text("batch: {prompts: 4, group_size: 4}\n")
    given = ["logger=mlflow", "logger.mlflow.tracking_uri=https://jane:p4ssw0rd@host"]
    given += ["batch.group_size=2", "logger.mlflow.experiment=${oc.env:OF_MINE}"]
    assert main(["show", "--config", "mine.yaml", *given, "~callbacks.samples"]) == 0
    said = capsys.readouterr().out
    assert "p4ssw0rd" not in said and "0rigin" not in said and "${oc.env:OF_MINE}" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["*", "batch.prompts", "4", "mine.yaml"] in rows
    assert ["*", "batch.group_size", "2", "command", "line"] in rows
    assert ["*", "samples", "removed", "command", "line"] in rows


@pytest.mark.slow
def test_overrides_of_a_run_folder_say_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_bytes(identity_line("0" * 16))
    (tmp_path / "run" / ".hydra" / "overrides.yaml").write_text("- optimizer.lr=0.5\n- seed=3\n")
    assert main(["show", "run=run", "seed=4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["*", "lr", "0.5", "run=run"] in rows
    assert ["*", "seed", "4", "command", "line"] in rows


def test_extras_are_those_of_the_functions():
    config = {"a": [{"_target_": "rlkit.extras.vllm.Server"}], "b": {"_target_": "rlkit.numeric"}}
    assert find_extras(config | {"c": {"_target_": "rlkit.extras.bench.tasks.make"}}) == [
        "bench",
        "vllm",
    ]
