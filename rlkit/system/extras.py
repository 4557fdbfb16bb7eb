"""Find the extras in this copy of rlkit, and the commands from them and from other packages.

An extra is a folder of rlkit/extras. It is found by its folder, so a checkout without an
installation works, and deleting the folder removes the extra. Nothing is imported before it is
called.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = "rlkit.extras"
FOLDER = Path(__file__).resolve().parents[1] / "extras"
GROUP = "rlkit.commands"  # group of entry points by which other packages add commands


def list_extras() -> list[str]:
    """List the names of the extras present."""
    return sorted(file.parent.name for file in FOLDER.glob("*/__init__.py"))


def find_extra(name: str) -> str | None:
    """Return the name of the extra in a dotted name; None for a name in rlkit's core or in another
    package.

    >>> find_extra("rlkit.extras.vllm.VLLM"), find_extra("rlkit.rewards.numeric")
    ('vllm', None)
    """
    rest = name.removeprefix(f"{PACKAGE}.")
    return None if rest == name else rest.partition(".")[0]


def explain_missing(name: str) -> str | None:
    """Explain in a sentence that the extra of a dotted name is missing; None if it is present, or
    if the name is in no extra."""
    extra = find_extra(name)
    if extra is None or extra in list_extras():
        return None
    return (
        f"'{name}' needs the extra '{extra}', which this copy of rlkit does not have: there is no"
        f" folder rlkit/extras/{extra}"
    )


def find_commands() -> dict[str, str]:
    """Map each command of the extras present to its module. A command is a file commands/COMMAND.py
    in the extra."""
    files = sorted(FOLDER.glob("*/commands/*.py"))
    return {
        file.stem: f"{PACKAGE}.{file.parents[1].name}.commands.{file.stem}"
        for file in files
        if not file.stem.startswith("_")
    }


def summarize_commands() -> dict[str, str]:
    """Map each command of the extras present to the first line of its module's docstring, read
    without an import."""
    lines = {}
    for name, module in find_commands().items():
        file = FOLDER.joinpath(*module.removeprefix(f"{PACKAGE}.").split(".")).with_suffix(".py")
        lines[name] = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
    return lines


def find_outside_commands() -> dict[str, importlib.metadata.EntryPoint]:
    """Map each command of other installed packages to its entry point in the group GROUP."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def has_command(name: str) -> bool:
    """Return whether an extra or another package has the command, without importing anything."""
    return name in find_commands() or name in find_outside_commands()


def load_command(name: str) -> Callable[[Any], Any] | None:
    """Import and return the function of a command of an extra or of another package; None if
    neither has the command."""
    module = find_commands().get(name)
    if module is not None:
        return importlib.import_module(module).command
    point = find_outside_commands().get(name)
    return None if point is None else point.load()
