"""Every option names its shelf, everyday options use everyday ones, no composed config has the
key."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from parametrise import cases
from rlkit.commands.cli import main
from rlkit.commands.help import list_groups
from rlkit.config.changes import identify
from rlkit.config.compose import _load, compose, conf_dir
from rlkit.config.options import SHELVES, find_shelf, group_options_by_shelf, read_shelf
from rlkit.errors import ConfigError
from rlkit.runs.sweeps.plan import compose_sweep

CONF = conf_dir()
ENTRIES = [CONF / f"{name}.yaml" for name in ("train", "evaluate", "rollout", "serve", "agent")]
OPTIONS = [file for file in sorted(CONF.rglob("*.yaml")) if file not in ENTRIES]
EVERYDAY = [file for file in OPTIONS if read_shelf(file) == "everyday"]


def named(file: Path) -> str:
    """How an option is chosen on the command line."""
    group, _, option = file.relative_to(CONF).with_suffix("").as_posix().rpartition("/")
    top, _, folder = group.partition("/")
    return f"{top}={folder}/{option}" if top == "experiment" and folder else f"{group}={option}"


def used_by(file: Path) -> Iterator[Path]:
    """The files of the options in a defaults list."""
    for entry in yaml.safe_load(file.read_text()).get("defaults", []):
        choices = {"": entry} if isinstance(entry, str) else entry
        for key, names in choices.items():
            group = key.removeprefix("override ").partition("@")[0]
            folder = CONF / group[1:] if group.startswith("/") else file.parent / group
            for name in names if isinstance(names, list) else [names]:
                if name not in (None, "_self_") and not group.lstrip("/").startswith("hydra/"):
                    yield folder / f"{name}.yaml"


@pytest.mark.slow
def test_every_option_is_on_one_shelf():
    found = {file: yaml.safe_load(file.read_text()).get("shelf") for file in OPTIONS}
    assert {named(file): shelf for file, shelf in found.items() if shelf not in SHELVES} == {}
    assert {file: read_shelf(file) for file in OPTIONS} == found
    assert (
        find_shelf("algorithm/ratio", "token")
        == find_shelf("experiment", "quickstart")
        == "everyday"
    )
    assert (
        find_shelf("experiment", "recipe/grpo") == "catalogue"
        and find_shelf("algorithm", "nonsense") == ""
    )


def test_the_everyday_algorithms():
    known = ["cispo", "dapo", "dr_grpo", "grpo", "max_rl", "opd", "ppo", "rloo", "sdpo", "sft"]
    assert group_options_by_shelf("algorithm")["everyday"] == known


def test_everyday_options_and_defaults_use_everyday_options_only():
    """The parts of the everyday algorithms among them."""
    users = [*ENTRIES, *EVERYDAY]
    pairs = [(user, part) for user in users for part in used_by(user) if part not in ENTRIES]
    assert [pair for pair in pairs if read_shelf(pair[1]) != "everyday"] == []
    assert len(pairs) > 100


def test_options_of_the_readme_are_everyday():
    """Except algorithms, of which the README sweeps one more."""
    found = []
    for command in re.findall(r"(rlkit [a-z][^`\n]*)", (CONF.parent / "README.md").read_text()):
        for word in shlex.split(command.partition(",")[0], posix=False):
            group, _, option = word.partition("=")
            if group != "algorithm" and (CONF / group / f"{option}.yaml").is_file():
                found.append((find_shelf(group, option), word))
    assert found and {word for shelf, word in found if shelf != "everyday"} == set()


# The key is taken out of the whole composed config, so one option of each folder shows it.
FIRST = {file.parent: file for file in reversed(OPTIONS)}
WORDS = [
    ["schedule=grpo_to_dapo", "reward=[numeric,length]", "logger=none"],
    *([named(file)] for file in FIRST.values()),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", cases(WORDS, 1), ids=" ".join)
def test_no_composed_config_holds_the_key(words):
    """Neither Hydra's own node, nor phases, nor parts of parts."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        try:
            full, _ = _load("train", [], words)
        except ConfigError:  # the defaults have no such group
            full, _ = _load("train", [], [f"+{word}" for word in words])
    assert "shelf:" not in OmegaConf.to_yaml(full, resolve=False)


def test_a_sweep_does_not_hold_the_key():
    assert "shelf:" not in OmegaConf.to_yaml(
        compose_sweep(["algorithm=grpo,dapo"], None), resolve=False
    )


@pytest.mark.slow
def test_nothing_that_is_printed_holds_the_key(capsys):
    assert main(["train", "schedule=grpo_to_dapo", "experiment=quickstart", "--cfg", "all"]) == 0
    assert "shelf:" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"algorithm.shelf"):
        compose(["algorithm.shelf=everyday"])


@pytest.mark.slow
def test_the_key_is_no_part_of_a_runs_identity(tmp_path):
    """Also in options of the user's own, which may have it."""
    written = {
        "algorithm": "defaults: [grpo, _self_]\nepochs: 2\n",
        "experiment": "# @package _global_\nseed: 3\n",
    }
    made = []
    for shelf in ("", "shelf: everyday\n"):
        folder = tmp_path / (shelf[:5] or "none")
        for group, text in written.items():
            (folder / group).mkdir(parents=True)
            (folder / group / "mine.yaml").write_text(text + shelf)
        made.append(compose(["algorithm=mine", "experiment=mine"], config_dir=str(folder)).config)
        own = folder / "algorithm" / "mine.yaml"
        assert read_shelf(own) == shelf.partition(": ")[2].strip()
    assert made[0] == made[1] and made[0]["algorithm"]["epochs"] == 2
    assert identify(made[0]) == identify({**made[0], "shelf": "catalogue"})


def test_help_lists_everyday_options_first():
    lines = list_groups().splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[0] == "algorithm")
    assert "grpo" in lines[at].split()[1:][3] and lines[at + 1].split()[0] == "catalogue:"
    listed = {word.strip(",") for line in lines for word in line.split()}
    assert {file.stem for file in OPTIONS if len(file.relative_to(CONF).parts) == 2} <= listed
    assert "recipe/grpo" in listed
