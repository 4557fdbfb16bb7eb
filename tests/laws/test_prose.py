"""The prose of each folder holds few relative words; `experiments/prose` says why that counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "experiments" / "prose" / "run.py"
GOAL = 1.5
# Relative words per 100 words of a folder that is above the goal. A limit may only fall.
LIMITS = {"experiments": 2.3}


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_folder_holds_more_relative_words_than_its_limit(prose):
    figures = prose.count(prose.read_sentences())
    above = {
        folder: round(figure.per_100, 2)
        for folder, figure in figures.items()
        if figure.per_100 > LIMITS.get(folder, GOAL)
    }
    assert not above, f"find the sentences: python experiments/prose/run.py --show 20: {above}"
    assert all(limit > GOAL for limit in LIMITS.values())


def test_code_and_formulas_are_no_prose(prose):
    page = "That is one.\n\n    what which who\n\nTwo `that which` words, where x.\n"
    figures = prose.count(list(prose.of_file("README.md", page)))
    assert figures["README.md"] == (8, 2)
