"""The notebooks of examples/: kept without outputs, listed on their page, and run whole, with the
claims of their last cells."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def run(source: str, names: dict[str, Any]) -> None:
    """A cell, and what a notebook shows of its last line."""
    tree = ast.parse(source)
    shown = (
        ast.Expression(tree.body.pop().value)
        if tree.body and isinstance(tree.body[-1], ast.Expr)
        else None
    )
    exec(compile(tree, "<cell>", "exec"), names)
    if shown is not None and (value := eval(compile(shown, "<cell>", "eval"), names)) is not None:
        assert repr(value) and (not hasattr(value, "_repr_html_") or value._repr_html_())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs_and_listed(notebook):
    """Outputs would show an older code, and make every change of a notebook unreadable."""
    whole = json.loads(notebook.read_text())
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5) and len(
        {cell["id"] for cell in whole["cells"]}
    ) == len(whole["cells"])
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(notebook)
    )
    assert f"](../examples/notebooks/{notebook.name})" in (ROOT / "docs" / "tour.md").read_text()


def test_there_are_six():
    assert len(NOTEBOOKS) == 6


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_claims_hold(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells(notebook):
        run("".join(cell["source"]), names)
    assert any("assert " in "".join(cell["source"]) for cell in cells(notebook))
