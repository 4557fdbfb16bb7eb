"""Who may import whom. Read from the source, so that a forgotten lazy import shows before anything is slow."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlkit.compose import conf_dir

PACKAGE = Path(__file__).resolve().parents[1] / "rlkit"
MODULES = {
    ".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): f for f in sorted(PACKAGE.rglob("*.py"))
}
# Lower lines never import higher ones; the parts of a line are independent of each other but for BESIDE.
LAYERS = (
    ("types", "errors", "processors"),
    ("functional", "sandbox", "deadline", "rng", "ranks", "launch", "digest", "owner", "files", "redaction"),
    ("rewards", "tasks", "environments", "generation", "models"),
    ("rollouts", "algorithm", "reference", "schedules", "settings", "schema", "monitor", "selfcheck", "memory", "assumptions", "drift"),
    ("module", "data", "loggers", "strategies", "validate", "trust", "output"),
    ("compose", "callbacks", "runs"),
    ("report",),
    ("train", "evaluate", "rollout", "agent", "notebook", "doctor", "check", "completion", "export", "replay", "sweeps", "cli", "__main__"),
)
# Within a line, at top level: who uses whom. It has no circle.
BESIDE = {
    "tasks": {"environments"},  # one system prompt for rows and environments
    "generation": {"models"},  # from hidden states to logits there is one way
    "settings": {"algorithm", "schedules"},
    "monitor": {"algorithm", "settings"},
    "selfcheck": {"assumptions", "rollouts", "schedules", "settings"},
    "callbacks": {"runs"},  # the settings of a run, for its loggers
    "memory": {"algorithm", "monitor", "rollouts"},
    "drift": {"algorithm"},
    "__main__": {"cli"},
}
# Tighter than the layers: parts that know the contracts and these only.
ONLY = {
    "types": set(),
    "errors": set(),
    "functional": {"types"},  # for what an advantage with a critic gives
    "sandbox": {"errors", "processors"},
    "processors": set(),
    "digest": set(),
    "owner": {"errors"},
    "deadline": {"errors"},
    "redaction": set(),
    "trust": {"errors", "redaction"},
    "output": {"files", "redaction"},
    "files": {"errors"},
    "ranks": {"errors"},
    "launch": set(),
    "rng": set(),
    "rewards": {"types", "errors", "processors", "sandbox", "deadline", "ranks"},
    "tasks": {"types", "errors", "environments", "sandbox"},
    "environments": {"types", "errors", "sandbox", "deadline"},
    "generation": {"types", "errors", "functional", "models"},
    "models": {"types", "errors", "functional", "digest", "files"},
    "rollouts": {"types", "errors", "functional", "rewards", "environments", "models", "ranks", "files"},
    "algorithm": {"types", "functional"},
    "reference": {"types", "ranks"},
    "schedules": {"types", "errors"},
    "settings": {"types", "functional", "algorithm", "rewards", "sandbox", "schedules"},
    "monitor": {"types", "functional", "models", "algorithm", "settings", "ranks"},
    "data": set(),
    "loggers": {"errors", "files"},
    "schema": {"errors"},  # it walks any function's signature and knows no part
    "assumptions": {"types"},
    "validate": {"assumptions", "errors", "schedules"},  # and so light: torch comes with what it checks
    "compose": {"errors", "schema", "validate", "redaction"},  # everything else is imported when a config names it
    "runs": {"errors", "files", "redaction", "trust"},
    "completion": {"errors"},  # a key pressed is answered at once
    "doctor": set(),  # it runs where the rest may not
    "cli": {"errors", "processors"},  # a typo is answered before torch is imported
}
HEAVY = {"datasets", "transformers", "peft", "lightning", "hydra", "omegaconf", "tensorboard", "matplotlib", "pyarrow", "vllm"}


def imports(module: str, *, lazy: bool) -> Iterator[str]:
    """The names that a module imports at top level; with `lazy`, those inside its functions as well."""
    tree = ast.parse(MODULES[module].read_text())
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in MODULES)
        pending += ast.iter_child_nodes(node)


def part(module: str) -> str:
    """rlkit.models.chat → models; rlkit itself is no part."""
    return module.split(".")[1] if "." in module else ""


def parts_used(module: str) -> set[str]:
    """The other parts of rlkit that a module imports at top level."""
    return {part(name) for name in imports(module, lazy=False) if name.startswith("rlkit.")} - {part(module), ""}


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_module_stands_in_a_layer():
    assert {part(m) for m in MODULES} - {""} == {name for names in LAYERS for name in names}


@pytest.mark.parametrize("module", [m for m in MODULES if part(m)])
def test_imports_go_down(module):
    mine = part(module)
    for used in parts_used(module):
        assert layer(used) < layer(mine) or used in BESIDE.get(mine, ()), f"{module} imports {used}"


@pytest.mark.parametrize("name", ONLY)
def test_parts_know_no_more_than_they_need(name):
    used = set().union(*(parts_used(m) for m in MODULES if part(m) == name))
    assert used <= ONLY[name]


def test_no_import_goes_in_a_circle():
    """At the level of files, so that none ever sees another half imported."""
    graph = {m: {n for n in imports(m, lazy=False) if n in MODULES and n != m} for m in MODULES}
    done: set[str] = set()
    while len(done) < len(graph):
        # a package's own __init__ re-exports its files, which do not import it
        ready = {m for m in graph if m not in done and graph[m] <= done}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


def test_the_package_itself_imports_nothing():
    """`import rlkit` is free; names come when they are asked for."""
    assert {n.split(".")[0] for n in imports("rlkit", lazy=False)} <= {"__future__", "importlib", "typing"}


@pytest.mark.parametrize("module", MODULES)
def test_hydra_stays_in_compose_and_the_command_line(module):
    """Also inside functions: every part works without Hydra."""
    used = {n.split(".")[0] for n in imports(module, lazy=True)} & {"hydra", "omegaconf"}
    assert not used or module in ("rlkit.compose", "rlkit.cli", "rlkit.sweeps.plan", "rlkit.sweeps.run")


@pytest.mark.parametrize("module", MODULES)
def test_lightning_stays_in_the_loop_and_its_callbacks(module):
    used = any(n.split(".")[0] in ("lightning", "pytorch_lightning") for n in imports(module, lazy=False))
    assert not used or module in ("rlkit.module", "rlkit.data", "rlkit.strategies") or module.startswith("rlkit.callbacks.")


def target_names() -> set[str]:
    """The parts of rlkit that a `_target_` of conf/ names."""

    def walk(node) -> Iterator[str]:
        if isinstance(node, dict):
            if "_target_" in node:
                yield node["_target_"]
            for value in node.values():
                yield from walk(value)
        if isinstance(node, list):
            for value in node:
                yield from walk(value)

    return {t for file in conf_dir().rglob("*.yaml") for t in walk(yaml.safe_load(file.read_text())) if t.startswith("rlkit.")}


def targets() -> set[str]:
    """The modules of those parts."""
    return {name.rpartition(".")[0] for name in target_names()}


def closure(module: str) -> set[str]:
    """All that importing a module imports, its packages included."""
    seen, pending = set(), [module]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            pending += imports(name, lazy=False)
            if part(name) and name.count(".") > 1:
                pending.append(name.rpartition(".")[0])
    return seen


@pytest.mark.parametrize("module", sorted(targets()))
def test_what_a_config_names_imports_at_most_torch(module):
    """A config is composed and refused before seconds are spent on transformers, peft, lightning or datasets."""
    heavy = {n.split(".")[0] for n in closure(module)} & HEAVY
    assert not heavy, f"importing {module} imports {heavy}"


@pytest.mark.slow
def test_importing_a_file_hides_no_part_of_the_same_name():
    """`import package.name` sets the attribute `name` of the package, so a function of that name is gone unless the file came first."""
    hidden = []
    for package in sorted(targets() & set(MODULES)):
        names = {f.stem for f in MODULES[package].parent.glob("*.py")} if MODULES[package].name == "__init__.py" else set()
        for name in sorted(names & {t.rpartition(".")[2] for t in target_names() if t.rpartition(".")[0] == package}):
            importlib.import_module(f"{package}.{name}")
            hidden += [] if callable(getattr(importlib.import_module(package), name)) else [f"{package}.{name}"]
    assert hidden == []


@pytest.mark.parametrize(
    "module",
    [
        "rlkit.cli",
        "rlkit.compose",
        "rlkit.runs",
        "rlkit.files",
        "rlkit.train",
        "rlkit.evaluate",
        "rlkit.notebook",
        "rlkit.agent",
        "rlkit.doctor",
        "rlkit.check",
        "rlkit.completion",
        "rlkit.export",
    ],
)
def test_commands_start_light(module):
    assert not {n.split(".")[0] for n in closure(module)} & HEAVY


def test_the_module_needs_neither_hydra_nor_datasets():
    """Tests on a bare machine with a GPU import the loop with torch, transformers, lightning and peft alone."""
    assert not {n.split(".")[0] for n in closure("rlkit.module")} & {"hydra", "omegaconf", "datasets", "pyarrow", "tensorboard"}


@pytest.mark.parametrize("module", [m for m, f in MODULES.items() if f.name == "__init__.py"])
def test_every_name_that_a_package_promises_is_there(module):
    """`from rlkit import wilson` and `from rlkit.functional import *` must not fail."""
    package = importlib.import_module(module)
    promised = getattr(package, "__all__", [])
    assert [name for name in promised if not hasattr(package, name)] == []
    assert len(set(promised)) == len(promised)
