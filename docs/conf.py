"""The site: `sphinx-build -W docs site`. Built offline; nothing in it is loaded from elsewhere, and
nothing counts its readers."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
OPTIONAL = ("machines", "programs", "doors")

project = "rlkit"
copyright = "the rlkit maintainers, Apache-2.0"
extensions = ["myst_parser"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "rlkit"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False


def adapted(app: object, name: str, source: list[str]) -> None:
    """Links to files of the checkout become downloads, and those to its folders plain text, since a
    site has none."""
    page = (DOCS / name).parent

    def link(found: re.Match[str]) -> str:
        path = page / found[2].partition("#")[0]
        if path.is_dir():
            return found[1]
        outside = DOCS not in path.resolve().parents
        return f"[{found[1]}](path:{found[2]})" if outside else found[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)]*)\)", link, source[0])
    if name == "config/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    if name == "index":  # pages that an older or smaller checkout lacks
        for other in OPTIONAL:
            source[0] = (
                source[0]
                if (DOCS / f"{other}.md").is_file()
                else source[0].replace(f"\n{other}\n", "\n")
            )


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("source-read", adapted)  # type: ignore[attr-defined]
