"""Who may import whom. Read from the source, so that a forgotten lazy import shows before anything
is slow."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from parametrise import each, read_yaml
from rlkit.config.compose import conf_dir
from rlkit.system.extras import explain_missing, find_extra

PACKAGE = Path(__file__).resolve().parents[2] / "rlkit"
MODULES = {
    ".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): f
    for f in sorted(PACKAGE.rglob("*.py"))
}
# The folders in the order of their layers: each imports only from those before it, in functions
# too.
ROOMS = [
    "errors",
    "display",
    "types",
    "system",
    "distributed",
    "statistics",
    "functional",
    "sandbox",
    "rewards",
    "environments",
    "tasks",
    "models",
    "engines",
    "algorithm",
    "episodes",
    "training",
    "config",
    "runs",
    "commands",
    "notebook",
    "__main__",
    "extras",
]
BACK: set[str] = set()  # imports that point back, as "config.compose -> runs"; the list stays empty
# Tighter than the order: parts that know the contracts and these only.
ONLY: dict[str, set[str]] = {
    "errors": set(),
    "display": {"errors"},
    "types": set(),
    "system": {"types", "errors"},
    "distributed": {"errors", "system"},  # a rank that waits for the others says so
    "statistics": set(),
    "functional": {"types"},  # for what an advantage with a critic gives
    "sandbox": {"types", "errors", "system"},
    "rewards": {"types", "errors", "system", "sandbox"},  # the report needs no torch
    "tasks": {"types", "errors", "environments", "sandbox"},
    "environments": {"types", "errors", "sandbox", "system", "rewards"},  # one reading of an answer
    "models": {"types", "errors", "functional", "system"},
    "engines": {"types", "errors", "functional", "models", "system"},
    "algorithm": {"types", "errors", "functional"},
}
HEAVY = {
    "datasets",
    "transformers",
    "peft",
    "lightning",
    "hydra",
    "omegaconf",
    "tensorboard",
    "matplotlib",
    "pyarrow",
    "vllm",
}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@functools.cache
def imports(module: str, *, lazy: bool) -> tuple[str, ...]:
    """The names that a module imports at top level; with `lazy`, those inside its functions as
    well."""
    return tuple(find_imports(module, lazy=lazy))


def find_imports(module: str, *, lazy: bool) -> Iterator[str]:
    pending: list[ast.AST] = [tree_of(module)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield node.module or ""
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in MODULES
            )
        # an expression holds no import
        pending += (n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr))


def part(module: str) -> str:
    """rlkit.models.chat → models, rlkit.extras.vllm.pool → extras; rlkit itself is no part."""
    return module.split(".")[1] if "." in module else ""


def is_extra(module: str) -> bool:
    return module.startswith("rlkit.extras.")


def rooms_used(module: str, *, lazy: bool) -> set[str]:
    """The other rooms that a module imports."""
    return {part(name) for name in imports(module, lazy=lazy) if name.startswith("rlkit.")} - {
        part(module),
        "",
    }


def test_every_room_has_its_place():
    assert {part(m) for m in MODULES} - {""} == set(ROOMS)


def test_imports_go_down():
    found = {
        f"{module.removeprefix('rlkit.')} -> {used}"
        for module in MODULES
        if part(module)
        for used in rooms_used(module, lazy=True)
        if ROOMS.index(used) > ROOMS.index(part(module))
    }
    assert found == BACK


@each("name", ONLY)
def test_rooms_know_no_more_than_they_need(name):
    used = set().union(*(rooms_used(m, lazy=False) for m in MODULES if part(m) == name))
    assert used <= ONLY[name]


def names_from(module: str, package: str) -> set[str]:
    """What a module imports from a package by name; "*" for the package itself."""
    above, _, last = package.rpartition(".")
    nodes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ImportFrom)]
    given = {alias.name for node in nodes if node.module == package for alias in node.names}
    itself = any(a.name == last for node in nodes if node.module == above for a in node.names)
    return given | ({"*"} if itself else set())


def files_of(package: str) -> dict[str, set[str]]:
    """Files and folders of a package → those of the same package that they import, in functions and
    for types too."""
    prefix = f"{package}."
    every = {m.removeprefix(prefix).split(".")[0] for m in MODULES if m.startswith(prefix)}
    used: dict[str, set[str]] = {}
    for module in MODULES:
        if module.startswith(prefix):
            own = module.removeprefix(prefix).split(".")[0]
            found = {
                name.removeprefix(prefix).split(".")[0]
                for name in imports(module, lazy=True)
                if name.startswith(prefix)
            }
            # what is no file of it comes from the whole package
            whole = every if names_from(module, package) - every else set()
            used.setdefault(own, set()).update(((found & every) | whole) - {own})
    return used


def listed(package: str, names: Collection[str]) -> list[str]:
    """The files of a package in the order of its docstring: a line each, or one sentence."""
    text = ast.get_docstring(tree_of(package)) or ""
    sentence = re.search(r"Each file imports only files before it in this list: ([^.]*)\.", text)
    if sentence:
        return [name.strip() for name in sentence[1].split(",")]
    lines = re.findall(r"^ *(\w+)(?:\.py)? {2,}\S", text, re.M)
    return [name for name in dict.fromkeys(lines) if name in names]


PACKAGES = [m for m, file in MODULES.items() if file.name == "__init__.py" and m != "rlkit"]


@each("package", PACKAGES)
def test_files_import_those_that_their_package_lists_before_them(package):
    """Imports in functions and for types included: so none goes in a circle, and a reader may begin
    at the top."""
    used = files_of(package)
    order = listed(package, used) if len(used) > 1 else list(used)
    if package == "rlkit.extras":  # of which some may be deleted
        order = [name for name in order if name in used]
    assert sorted(order) == sorted(used)
    upward = {
        f"{name} -> {other}"
        for place, name in enumerate(order)
        for other in used[name]
        if other not in order[:place]
    }
    assert upward == set()


def test_the_package_itself_imports_nothing():
    """`import rlkit` is free; names come when they are asked for."""
    assert {n.split(".")[0] for n in imports("rlkit", lazy=False)} <= {
        "__future__",
        "ast",
        "importlib",
        "pathlib",
        "typing",
    }


def test_hydra_stays_in_compose_and_the_command_line():
    """Also inside functions: every part works without Hydra."""
    used = {
        m
        for m in MODULES
        if {n.split(".")[0] for n in imports(m, lazy=True)} & {"hydra", "omegaconf"}
    }
    assert used <= {
        "rlkit.config.compose",
        "rlkit.commands.config_file",
        "rlkit.commands.train",
        "rlkit.runs.sweeps.plan",
        "rlkit.runs.sweeps.run",
    }


def test_internals_of_hydra_are_used_in_one_file():
    """pyproject bounds Hydra above as long as there is such a file."""
    assert {
        m for m in MODULES if any(n.startswith("hydra._internal") for n in imports(m, lazy=True))
    } == {"rlkit.config.compose"}


def test_lightning_stays_in_the_loop_and_its_callbacks():
    used = {
        m
        for m in MODULES
        if {n.split(".")[0] for n in imports(m, lazy=False)} & {"lightning", "pytorch_lightning"}
    }
    used -= {"rlkit.training.module", "rlkit.distributed.strategies"}
    assert {m for m in used if not m.startswith("rlkit.training.callbacks.")} == set()


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

    return {
        t
        for file in conf_dir().rglob("*.yaml")
        for t in walk(read_yaml(file.read_text()))
        if t.startswith("rlkit.")
    }


def targets() -> set[str]:
    """The modules of those parts whose extras are there."""
    return {name.rpartition(".")[0] for name in target_names() if not explain_missing(name)}


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


@each("module", sorted(targets()))
def test_what_a_config_names_imports_at_most_torch(module):
    """A config is composed and refused before seconds are spent on transformers, peft, lightning or
    datasets."""
    heavy = {n.split(".")[0] for n in closure(module)} & HEAVY
    assert not heavy, f"importing {module} imports {heavy}"


@each(
    "module",
    [
        "rlkit.commands.cli",
        "rlkit.config.compose",
        "rlkit.runs",
        "rlkit.system.files",
        "rlkit.training.run",
        "rlkit.commands.evaluate",
        "rlkit.notebook",
        "rlkit.commands.agent",
        "rlkit.commands.doctor",
        "rlkit.commands.check",
        "rlkit.commands.export",
    ],
)
def test_commands_start_light(module):
    assert not {n.split(".")[0] for n in closure(module)} & HEAVY


def test_the_module_needs_neither_hydra_nor_datasets():
    """Tests on a bare machine with a GPU import the loop with torch, transformers, lightning and
    peft alone."""
    assert not {n.split(".")[0] for n in closure("rlkit.training.module")} & {
        "hydra",
        "omegaconf",
        "datasets",
        "pyarrow",
        "tensorboard",
    }


@each("module", [m for m, f in MODULES.items() if f.name == "__init__.py"])
def test_every_name_that_a_package_promises_is_there(module):
    """`from rlkit import train` and `from rlkit.functional import *` must not fail."""
    package = importlib.import_module(module)
    promised = getattr(package, "__all__", [])
    assert [name for name in promised if not hasattr(package, name)] == []
    assert len(set(promised)) == len(promised)


def test_no_part_of_a_package_hides_a_file_of_its_own():
    """`rlkit.rewards.numeric` is the function, so the file that holds it has a leading
    underscore."""
    exported = [
        f"{package}.{alias.name}"
        for package, file in MODULES.items()
        if file.name == "__init__.py"
        for node in ast.walk(tree_of(package))
        if isinstance(node, ast.ImportFrom) and node.module != package
        for alias in node.names
    ]
    assert set(exported) & set(MODULES) == set()


NAMED_TWICE = {
    "commands.command": "every command of the command line has one",
    "bench.command": "each of its two commands has one",
    "config.experiment": "of a composed config; from overrides and keywords",
}


def test_no_public_name_is_defined_twice_in_a_package():
    """The names of the documents (the extra notebook) and the scripts that run alone in a child
    process are their own."""
    alone = "rlkit.extras.notebook"
    own = [m for m in MODULES if not m.startswith(alone) and not m.endswith("_child")]
    places: dict[str, list[str]] = {}
    for module in own:
        package = find_extra(module) or part(module)
        for node in tree_of(module).body:
            if isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ) and not node.name.startswith("_"):
                places.setdefault(f"{package}.{node.name}", []).append(module)
    assert {
        name: where for name, where in places.items() if len(where) > 1 and name not in NAMED_TWICE
    } == {}
