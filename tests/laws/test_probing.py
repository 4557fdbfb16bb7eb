"""What an object can do is declared: a field, or a Protocol that isinstance understands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlkit

PACKAGE = Path(rlkit.__file__).parent
# what every engine and every session must have is looked for by name
CHECKS = ("episodes/replies.py", "environments/session.py")
DECLARED = {"engine", "environment", "model", "policy", "session", "task"}
PROBES = 130  # in the whole package; most read names from a table, or attributes of functions


def probes() -> Iterator[tuple[str, ast.expr]]:
    """Where the package calls getattr or hasattr, and on what."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", node.args[0]


@pytest.mark.slow
def test_few_places_ask_an_object_what_it_has():
    assert len(list(probes())) <= PROBES


@pytest.mark.slow
def test_engines_models_tasks_and_environments_are_not_probed():
    found = [
        f"{place}: {ast.unparse(what)}"
        for place, what in probes()
        if ast.unparse(what).rpartition(".")[2] in DECLARED and not place.startswith(CHECKS)
    ]
    assert found == []
