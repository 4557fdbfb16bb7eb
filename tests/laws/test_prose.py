"""The prose of each folder holds few relative words; `experiments/prose` says why that counts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "experiments" / "prose" / "run.py"
LIMIT = 1.5  # relative words per 100 words of a folder


@pytest.fixture(scope="module")
def prose():
    spec = importlib.util.spec_from_file_location("prose", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_no_folder_holds_too_many_relative_words(prose):
    figures = prose.count(prose.read_sentences())
    above = {
        folder: round(figure.per_100, 2)
        for folder, figure in figures.items()
        if figure.per_100 > LIMIT
    }
    assert not above, f"find the sentences: python experiments/prose/run.py --show 20: {above}"


def test_code_and_formulas_are_no_prose(prose):
    page = "That is one.\n\n    what which who\n\nTwo `that which` words, where x.\n"
    figures = prose.count(list(prose.of_file("README.md", page)))
    assert figures["README.md"] == (8, 2)
