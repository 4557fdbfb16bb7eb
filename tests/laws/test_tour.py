"""The notebooks of examples/: kept with the outputs that they give now, listed on their page, and
run whole, with the claims of their last cells."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
LARGEST = 120_000  # bytes of a notebook with its outputs
spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "docs" / "run_notebooks.py")
assert spec and spec.loader
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)


def cells(notebook: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_small_outputs_and_listed(notebook):
    whole = json.loads(notebook.read_text())
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5) and len(
        {cell["id"] for cell in whole["cells"]}
    ) == len(whole["cells"])
    own = cells(notebook)
    assert [cell["execution_count"] for cell in own] == list(range(1, len(own) + 1))
    assert any(cell["outputs"] for cell in own) and notebook.stat().st_size < LARGEST
    assert "/tmp/" not in notebook.read_text(), "no folder of the machine that ran it"
    assert f"](../examples/notebooks/{notebook.name})" in (ROOT / "docs" / "tour.md").read_text()


def test_there_are_six():
    assert len(NOTEBOOKS) == 6


def test_seconds_and_the_machine_are_not_compared():
    """A slow step has no room for the change of its reward."""

    def shown(*lines):
        cell = {"cell_type": "code", "outputs": [{"text": [f"{line}\n" for line in lines]}]}
        return runner.shown_texts({"cells": [cell]})

    quick = shown(
        "step 2/8 reward 0.59 (+0.07) kl 0.0013 len 27 | 0.2 + 0.4 s, 0:09 left", "1.2e-07"
    )
    slow = shown("step 2/8 reward 0.59 kl 0.0013 len 27 | 11 + 0.9 + 10 s, 1:09 left", "3.0e-09")
    assert quick == slow == ["step 2/8 reward 0.59 kl 0.0013 len 27\n…\n"]
    assert shown("test accuracy 0.5") != shown("test accuracy 0.6")


def kinds(notebook: dict[str, Any]) -> list[list[str]]:
    """Of the outputs of each code cell."""
    own = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[output["output_type"] for output in cell["outputs"]] for cell in own]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_gives_the_kinds_of_outputs_that_it_is_kept_with(
    notebook, tmp_path, monkeypatch
):
    """And the claims of its cells hold. The words of a run's first lines depend on the machine and
    on the process. After a change: `python docs/run_notebooks.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    kept = json.loads(notebook.read_text())
    assert any("assert " in "".join(cell["source"]) for cell in cells(notebook))
    assert kinds(runner.run_notebook(kept)) == kinds(kept)
