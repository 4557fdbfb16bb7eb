"""Every link of a page leads to a file, and to a heading of it if it names one. Every import of a
study names something that the package has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from parametrise import every_extra

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "experiments", "rlkit/extras")
PAGES = sorted([*ROOT.glob("*.md"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.md"))])


def find_anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and myst make them.

    >>> find_anchors("## An advantage, a loss")
    {'an-advantage-a-loss'}
    """
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.skipif(not every_extra(), reason="pages link to the extras")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if link.startswith(("http:", "https:")):
            continue
        if not target.exists() or (anchor and anchor not in find_anchors(target.read_text())):
            lost.append(link)
    assert not lost


def test_every_study_is_in_the_index():
    index = (ROOT / "experiments" / "README.md").read_text()
    studies = [page.parent.name for page in (ROOT / "experiments").glob("*/*.md")]
    assert [name for name in studies if f"]({name}/README.md)" not in index] == []


def find_lost_imports(script: Path) -> list[str]:
    """The names that a script imports from a file of rlkit that does not hold the word. Imports
    after an ImportError are those of an older checkout, and do not count."""
    tree = ast.parse(script.read_text())
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    older = {id(node) for handler in handlers for node in ast.walk(handler)}
    lost = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in older:
            continue
        module = (node.module or "").split(".")
        if module[0] != "rlkit":
            continue
        place = ROOT.joinpath(*module)
        home = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        text = home.read_text() if home.is_file() else ""
        for name in (alias.name for alias in node.names):
            is_file = (place / f"{name}.py").is_file() or (place / name).is_dir()
            if not is_file and not re.search(rf"\b{name}\b", text):
                lost.append(f"{script.relative_to(ROOT)}: {node.module}.{name}")
    return lost


@pytest.mark.slow
@pytest.mark.skipif(not every_extra(), reason="studies import the extras")
def test_every_study_imports_names_that_exist():
    """experiments/sandbox imported a function that had been merged into another."""
    scripts = [f for folder in ("experiments", "examples") for f in (ROOT / folder).rglob("*.py")]
    assert len(scripts) > 50
    assert [name for script in scripts for name in find_lost_imports(script)] == []
