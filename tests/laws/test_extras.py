"""Extras are behind the doors that strangers use: each can be deleted, and nothing else changes.

.ci/without_extras deletes them for real, and runs these tests among others on what is left.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import sys
from importlib.metadata import EntryPoint

import pytest

from laws.test_layers import MODULES, imports, tree_of
from parametrise import available, each
from rlkit.commands.cli import main
from rlkit.config.compose import compose, conf_dir
from rlkit.system import extras

# Extras that import another one, which .ci/without_extras deletes together with it.
TOGETHER: dict[str, set[str]] = {}
FORWARDING = "rlkit.notebook"  # the only module of the core that names an extra


def extra_modules(*, inside: bool) -> list[str]:
    return [name for name in MODULES if (extras.find_extra(name) is not None) == inside]


def names_imported(module: str) -> set[str]:
    """Every module and name that a module imports from rlkit, inside functions too."""
    names = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlkit"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("rlkit")}
    return names


SCRIPTS = [name for name in MODULES if name.endswith(("_child", "__main__"))]  # run when imported


@each("module", sorted({*MODULES} - {*SCRIPTS}))
def test_every_module_can_be_imported(module):
    importlib.import_module(module)


def test_the_core_names_no_extra():
    """Neither by an import nor in a string, except for the messages about extras as such."""
    for module in extra_modules(inside=False):
        if module in (FORWARDING, "rlkit.system.extras"):
            continue
        if "rlkit.extras" not in MODULES[module].read_text():  # most files, unparsed
            continue
        assert not [name for name in imports(module, lazy=True) if name.startswith("rlkit.extras")]
        texts = [
            node.value
            for node in ast.walk(tree_of(module))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not [text for text in texts if "rlkit.extras." in text], module


def test_an_extra_uses_what_a_stranger_may_use():
    for module in extra_modules(inside=True):
        own = extras.find_extra(module)
        for name in names_imported(module):
            if extras.find_extra(name) != own:
                assert not any(part.startswith("_") for part in name.split(".")), (module, name)


def test_extras_know_one_another_only_by_the_table():
    for module in extra_modules(inside=True):
        own = extras.find_extra(module)
        used = {extras.find_extra(name) for name in names_imported(module)} - {None, own}
        assert used <= TOGETHER.get(own, set()), (module, used)


def test_a_config_that_needs_a_missing_extra_is_refused_in_one_sentence(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "environment._target_=rlkit.extras.absent.play"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "'rlkit.extras.absent.play' needs the extra 'absent'" in said


def test_a_command_of_a_missing_extra_is_refused_with_the_extras_that_are_there(
    monkeypatch, capsys
):
    monkeypatch.setattr(extras, "FOLDER", extras.FOLDER / "nowhere")
    assert main(["report", "run"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "no command 'report'" in said and "Extras bring others (this copy has: none)" in said


def test_options_whose_extra_is_missing_are_left_out(monkeypatch):
    options = [
        f"{file.parent.relative_to(conf_dir())}={file.stem}"
        for file in sorted(conf_dir().glob("*/*.yaml"))
    ]
    there = {option for option in options if available(option)}
    monkeypatch.setattr(extras, "FOLDER", extras.FOLDER / "nowhere")
    without = {option for option in options if available(option)}
    named = {option for option in options if "rlkit.extras." in text_of(option)}
    named.remove("reward=by_task")  # composed with the rewards that the task declares
    assert without <= there - named
    assert {"algorithm=grpo", "task=arithmetic", "environment=by_task"} <= without


def text_of(option: str) -> str:
    group, _, name = option.partition("=")
    return (conf_dir() / group / f"{name}.yaml").read_text()


def test_a_command_of_another_package_is_called(monkeypatch, capsys):
    module = type(sys)("my_commands")

    def command(arguments):
        print("called with", *arguments.overrides)
        return 7

    module.command = command
    command.__module__ = "my_commands"
    monkeypatch.setitem(sys.modules, "my_commands", module)
    point = EntryPoint("mine", "my_commands:command", extras.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    assert main(["mine", "a=1"]) == 7
    assert capsys.readouterr().out == "called with a=1\n"
    assert main(["--help"]) == 0
    assert "rlkit mine" in capsys.readouterr().out


def test_another_package_takes_no_command_of_the_core(monkeypatch, capsys):
    point = EntryPoint("metrics", "nowhere:command", extras.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    assert main(["metrics", "kl/ref_k3"]) == 0


@pytest.mark.parametrize("name", extras.list_extras())
def test_an_extra_has_a_page(name):
    page = (extras.FOLDER / name / "README.md").read_text()
    assert page.startswith(f"# {name}\n") and 10 <= page.count("\n") <= 90


def test_the_default_run_needs_no_extra():
    config = compose([]).config

    def targets(node):
        if isinstance(node, dict):
            yield from [node["_target_"]] if "_target_" in node else []
            node = list(node.values())
        if isinstance(node, list):
            for value in node:
                yield from targets(value)

    assert [name for name in targets(config) if extras.find_extra(name)] == []
