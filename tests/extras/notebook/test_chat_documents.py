"""The chat and PPO notebooks themselves, where they are: every cell is run as it stands, but for
the names of models.

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

PLACE = Path(
    os.environ.get("RLKIT_DOCUMENTS")
    or Path(__file__).resolve().parents[4] / "shared" / "documents"
)


def cells(number: str) -> list[ast.Module]:
    """The code cells of a notebook that is kept as text."""
    files = sorted(PLACE.glob(f"{number}_*.txt")) if PLACE.is_dir() else []
    if not files:
        pytest.skip(
            f"{PLACE} has no document {number}: the notebooks are not part of the project; set"
            " RLKIT_DOCUMENTS to their folder"
        )
    return [code(text) for text in files[0].read_text().split("In [None]:\n")[1:]]


def code(text: str) -> ast.Module:
    """The longest beginning that is Python: prose may follow a cell, and some cells are kept with
    their quotes escaped."""
    found = [
        beginning(lines)
        for lines in (
            text.splitlines(),
            text.replace('\\"', '"').replace("\\\\n", "\\n").splitlines(),
        )
    ]
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
    return ast.Module(
        [part for part in cell.body if getattr(part, "name", None) not in offered], []
    )


def run(
    number: str, monkeypatch, tmp_path, *, shorter: dict[str, str]
) -> tuple[dict, list[ast.Module]]:
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


SHORTER = {
    "512": "12",
    "max_steps = 50": "max_steps = 3",
    "max_steps=50": "max_steps=3",
    "n_iterations=10": "n_iterations=2",
}
SHORTER |= {
    "max_turns=5": "max_turns=5, max_new_tokens=24",
    "max_turns=10": "max_turns=10, max_new_tokens=24",
    "_epochs': 4": "_epochs': 1",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shorter", [SHORTER, pytest.param({}, marks=pytest.mark.slow)], ids=["short", "as they are"]
)
@pytest.mark.parametrize("number", ["001", "000"])
def test_the_cells_of_the_chat_notebooks_run(number, shorter, monkeypatch, tmp_path):
    """Every cell, in order. `shorter` replaces numbers, so that the test takes seconds."""
    given, ran = run(number, monkeypatch, tmp_path, shorter=shorter)
    assert sum(bool(cell.body) for cell in ran) == {"001": 14, "000": 26}[number]
    assert given["summary"]["total_rollouts"] == 4 and (tmp_path / "rollout_data.pkl").exists()
    if number == "000":
        assert given["has_call"] and len(given["training_stats"]) == (2 if shorter else 10)
        assert shorter or (tmp_path / "checkpoint_iter_10.pt").exists()
