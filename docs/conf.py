"""The site: `sphinx-build -W docs site`. Built offline; nothing in it is loaded from elsewhere, and
nothing counts its readers."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

DOCS = Path(__file__).resolve().parent
OPTIONAL = ("machines", "programs", "doors")

project = "rlkit"
copyright = "the rlkit maintainers, Apache-2.0"
extensions = ["myst_parser"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
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


# What a block of a page is made of: files under their names, and commands.
PART = re.compile(r"\n\n(?=# [\w/]+\.(?:py|yaml)\n|PYTHONPATH=)")
COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:rlkit|python|pip|pytest|jupyter|git|srun|torchrun|vllm|\.ci/\w+) (?!.*:$)"
)


def language_of(text: str) -> str:
    """The language that a block without one is coloured as."""
    if COMMAND.match(text):
        return "bash"
    if re.match(r"# \S+\.yaml\n", text):
        return "yaml"
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return "none"
    words = [
        isinstance(own, ast.AnnAssign)
        or (isinstance(own, ast.Expr) and not isinstance(own.value, ast.Call))
        for own in body
    ]
    return "none" if all(words) else "python"


def colour(app: object, tree: nodes.document) -> None:
    """Indented blocks get their languages; one with several files is split at their names."""
    for block in list(tree.findall(nodes.literal_block)):
        if block.get("language", "none") == "none":
            parts = PART.split(block.astext())
            block.replace_self(
                [nodes.literal_block(own, own, language=language_of(own)) for own in parts]
            )


def write_formula(writer: Any, node: Any) -> None:
    """A formula as MathML, which browsers draw without a script."""
    as_block = isinstance(node, nodes.math_block)
    writer.body.append(tex2mathml(node.astext(), as_block=as_block))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", adapted)
    app.connect("doctree-read", colour)
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
