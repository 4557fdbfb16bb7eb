"""The chat and PPO notebooks themselves, where they are: every cell is run as it stands, but for the names of models.

A cell's definitions of what `rlkit.notebook` offers are left out, so its examples run on rlkit's.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
from pathlib import Path

import pytest

import rlkit.notebook
from rlkit.models.load import TINY

PLACE = Path(os.environ.get("RLKIT_DOCUMENTS") or Path(__file__).resolve().parents[3] / "shared" / "documents")


def cells(number: str) -> list[ast.Module]:
    """The code cells of a notebook that is kept as text."""
    files = sorted(PLACE.glob(f"{number}_*.txt")) if PLACE.is_dir() else []
    if not files:
        pytest.skip(f"{PLACE} has no document {number}: the notebooks are not part of the project; set RLKIT_DOCUMENTS to their folder")
    return [code(text) for text in files[0].read_text().split("In [None]:\n")[1:]]


def code(text: str) -> ast.Module:
    """The longest beginning that is Python: prose may follow a cell, and some cells are kept with their quotes escaped."""
    found = [beginning(lines) for lines in (text.splitlines(), text.replace('\\"', '"').replace("\\\\n", "\\n").splitlines())]
    return max(found, key=lambda pair: pair[0])[1]


def beginning(lines: list[str]) -> tuple[int, ast.Module]:
    """Lines of the longest beginning that is Python, and what it says."""
    for end in range(len(lines), 0, -1):
        with contextlib.suppress(SyntaxError):
            return end, ast.parse("\n".join(lines[:end]))
    return 0, ast.parse("")


def without_definitions(cell: ast.Module) -> ast.Module:
    """The cell without what rlkit.notebook defines."""
    offered = set(rlkit.notebook.__all__)
    return ast.Module([part for part in cell.body if getattr(part, "name", None) not in offered], [])


def run(number: str, monkeypatch, tmp_path, *, shorter: dict[str, str]) -> tuple[dict, list[ast.Module]]:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib").use("Agg")
    given = {name: getattr(rlkit.notebook, name) for name in rlkit.notebook.__all__}
    ran = cells(number)
    for cell in ran:
        source = re.sub(r"Qwen/Qwen3-[\d.]+B", str(TINY), ast.unparse(without_definitions(cell)))
        for was, now in shorter.items():
            source = source.replace(was, now)
        exec(compile(source, f"document {number}", "exec"), given)
    return given, ran


@pytest.mark.parametrize("number", ["001", "000"])
def test_the_cells_of_the_chat_notebooks_run(number, monkeypatch, tmp_path):
    """Shorter replies and episodes, so that a test takes seconds; the slow one below runs the cells as they are."""
    given, ran = run(number, monkeypatch, tmp_path, shorter={"512": "24", "max_steps = 50": "max_steps = 4", "max_steps=50": "max_steps=4"})
    assert sum(bool(cell.body) for cell in ran) == {"001": 14, "000": 26}[number]
    assert given["summary"]["total_rollouts"] == 4 and (tmp_path / "rollout_data.pkl").exists()
    if number == "000":
        assert given["has_call"] and len(given["training_stats"]) == 10 and (tmp_path / "checkpoint_iter_10.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", ["001", "000"])
def test_the_cells_of_the_chat_notebooks_run_at_their_own_length(number, monkeypatch, tmp_path):
    run(number, monkeypatch, tmp_path, shorter={})
