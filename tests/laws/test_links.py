"""Every link of a page leads to a file, and to a heading of it if it names one."""

from __future__ import annotations

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
