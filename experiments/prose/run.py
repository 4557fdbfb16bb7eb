"""Count relative words in the prose of the repository, and show the sentences that hold the most.

    python experiments/prose/run.py [--at COMMIT] [--show 10] [--under docs conf] [--csv FILE]

A sentence that must be read twice often has one relative clause too many. The count only finds
these sentences; a reader decides whether a sentence reads well.

Prose is the docstrings, comments and error messages of rlkit/ and experiments/, the comments of
conf/ and all pages written by hand. Code, formulas, tables of numbers and generated pages are left
out. A code span, a number or a symbol counts as one word.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RELATIVE = re.compile(r"\b(?:that|which|what|whose|whom|who|where|such|those)\b", re.I)

FORMULA = re.compile(r"\S+ (?:=|←) |[A-Zρσ]\S* \(?=|[(\[]?[Σ½]")
BEGINS = re.compile(r"\S+ {2,}|(?:\*{0,2}[\w, ]{1,40}|Returns|Raises|Args|Source): ?|[-*] ")
FOLDERS = ("rlkit", "conf", "docs", "experiments")
GENERATED = (
    "docs/extension_points.md",
    "docs/config/",
    "experiments/bench/studies/",
    "experiments/programs/harbor_agent/tasks/",
)
TOP = re.compile(r"rlkit/(?:extras/)?\w+/|\w+/|")  # the folder under which a path is counted


class Sentence(NamedTuple):
    """One sentence of prose and the place where its paragraph begins."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> int:
        return len(masked(self.text).split())

    @property
    def relative(self) -> int:
        return len(RELATIVE.findall(masked(self.text)))


class Figure(NamedTuple):
    """The number of words of a folder, and the number of relative words among them."""

    words: int
    relative: int

    @property
    def per_100(self) -> float:
        return 100 * self.relative / max(self.words, 1)


# ----------------------------------------------------------------------------------- reading a tree


def open_tree(commit: str | None) -> tuple[list[str], Callable[[str], str]]:
    """Return the paths of a commit, or of the working tree, and a function that reads a path."""
    if commit is None:
        files = [ROOT / "README.md", *(f for name in FOLDERS for f in (ROOT / name).rglob("*.*"))]
        paths = [file.relative_to(ROOT).as_posix() for file in files if file.is_file()]
        return paths, lambda path: (ROOT / path).read_text()
    paths = _git("ls-tree", "-r", "--name-only", commit).splitlines()
    return paths, lambda path: _git("show", f"{commit}:{path}")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def is_page(path: str) -> bool:
    """Return whether a file's prose is written by hand and belongs to the product."""
    if path.startswith(GENERATED):
        return False
    if path.endswith(".py"):
        return path.startswith(("rlkit/", "experiments/")) or path == "docs/generate.py"
    if path.endswith(".yaml"):
        return path.startswith("conf/")
    return path.endswith(".md") and path.startswith(("rlkit/", "experiments/", "docs/", "README"))


def folder_of(path: str) -> str:
    """Return the folder under which a path is counted: `rlkit/engines`, `conf`.

    A file at the top of the repository counts alone.

        >>> folder_of("rlkit/extras/vllm/engine.py"), folder_of("rlkit/types.py")
        ('rlkit/extras/vllm', 'rlkit')
    """
    folder = TOP.match(path)[0].rstrip("/")
    return folder or path


def read_sentences(commit: str | None = None) -> list[Sentence]:
    """Return every sentence of every page, sorted by path."""
    paths, read = open_tree(commit)
    return [s for path in sorted(filter(is_page, paths)) for s in of_file(path, read(path))]


def count(sentences: list[Sentence]) -> dict[str, Figure]:
    """Return folder → words and relative words."""
    totals: dict[str, Figure] = {}
    for sentence in sentences:
        folder = folder_of(sentence.file)
        words, relative = totals.get(folder, (0, 0))
        totals[folder] = Figure(words + sentence.words, relative + sentence.relative)
    return totals


def of_file(path: str, text: str) -> Iterator[Sentence]:
    """Yield the sentences of one file."""
    paragraphs = {".py": of_python, ".yaml": of_lines, ".md": of_markdown}[Path(path).suffix]
    for line, paragraph in paragraphs(text):
        for sentence in split(paragraph):
            yield Sentence(path, line, sentence)


# -------------------------------------------------------------------------------- finding the prose


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) of the docstrings, error messages and comments of a module."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) and (doc := ast.get_docstring(node)):
            yield from of_docstring(node.body[0].lineno, doc)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from (
                (node.lineno, message)
                for argument in node.exc.args
                if (message := message_of(argument))
            )
    yield from of_lines(text)  # the module's comments


def message_of(node: ast.expr) -> str:
    """Return the text of a message; an inserted value counts as one word."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "`value`" for part in node.values
        )
    return ""


def of_docstring(line: int, doc: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) of a docstring.

    An argument is a paragraph, and so is a row of a list. Formulas, sources and examples are left
    out.
    """
    start, gathered, after_blank = line, [], True
    for offset, raw in enumerate([*doc.splitlines(), ""]):
        text = raw.strip()
        skipped = FORMULA.match(text) or (after_blank and raw.startswith("    "))
        begins = BEGINS.match(text)
        if gathered and (not text or begins or skipped):
            if not gathered[0].startswith("Source:"):
                yield start, " ".join(gathered)
            gathered = []
        if text.startswith(">>>"):
            return
        if text and not skipped:
            start = start if gathered else line + offset
            gathered.append(
                text if text.startswith("Source:") else text[begins.end() :] if begins else text
            )
        after_blank = not text or bool(after_blank and skipped)


def of_comments(comments: Iterator[tuple[int, int, str]]) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) of comments given as (line, column, text).

    Neighbouring lines in one column are a paragraph; a row of a list is its own paragraph.
    """
    start, last, column, gathered = 0, -1, -1, ""
    for line, at, text in comments:
        words = text.lstrip("#! ").strip()
        if not words or words.startswith(("@package", "noqa", "type:", "fmt:", "---")):
            words = ""
        row = re.match(r"(?:\S+ )?\S+ {2,}", words)
        if gathered and (not words or row or line != last + 1 or at != column):
            yield start, gathered
            gathered = ""
        words = re.sub(r"^-{3,}\s*", "", words)
        start = start if gathered else line
        gathered, last, column = f"{gathered} {words}".strip(), line, at
    if gathered:
        yield start, gathered


def of_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) of the comments of a config or a module."""
    lines = enumerate(text.splitlines(), 1)
    found = (
        (number, match.start(1), match[1])
        for number, line in lines
        if (match := re.search(r"(?:^\s*|\s)(#.*)$", line))
    )
    yield from of_comments(found)


def of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) of a page.

    A cell of a table is a paragraph, and code is left out.
    """
    start, gathered, fenced = 0, [], False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fenced ^= line.startswith("```")
        row = line.startswith("|")
        code = fenced or line.startswith(("    ", "```", "<!--", "[!"))
        if gathered and (not line.strip() or row or code or re.match(r"#|[-*] |\d+\. ", line)):
            yield start, " ".join(gathered)
            gathered = []
        if row:
            yield from (
                (number, cell.strip())
                for cell in line.strip("|").split("|")
                if len(cell.split()) > 2
            )
        elif line.strip() and not code:
            start = start if gathered else number
            gathered.append(re.sub(r"^(?:#+|[-*]|\d+\.) ", "", line).strip())


def masked(text: str) -> str:
    """Return a text of the same length without spaces or marks inside code spans.

    The same holds for short quotations and abbreviations.
    """
    spans = r"`[^`]+`|\$\{[^}]*\}|\"[^\" ]+\"|\b(?:e\.g|i\.e|et al|eq|vs|cf|No|Fig|resp)\.(?= )"
    return re.sub(spans, lambda span: re.sub(r"[\s,;:.(\[]", "_", span[0]), text)


def split(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph, except those of a single word."""
    text = " ".join(paragraph.replace("**", "").split())
    ends = [
        match.end()
        for match in re.finditer(r"[.!?][\"')]? (?=[A-Z0-9`\"'(<\[]|\w+: )", masked(text))
    ]
    parts = [
        text[begin:end].strip() for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)
    ]
    return [part for part in parts if len(re.findall(r"[A-Za-z]{2,}", part)) >= 2]


# ------------------------------------------------------------------------------------------ figures


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each folder and the sentences with the most relative words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--at", metavar="COMMIT", help="read this commit, not the working tree")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N sentences")
    parser.add_argument("--under", nargs="+", default=[""], metavar="PREFIX", help="only these")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="add the rows to this file")
    options = parser.parse_args(arguments)
    found = [s for s in read_sentences(options.at) if s.file.startswith(tuple(options.under))]

    figures = count(found)
    for folder, figure in figures.items():
        print(f"{folder:28} {figure.words:6} words {figure.per_100:5.2f} per 100")
    hardest = sorted(found, key=lambda s: (-s.relative, -s.relative / s.words, s))
    for sentence in hardest[: options.show]:
        print(f"\n{sentence.relative} {sentence.file}:{sentence.line}")
        print(textwrap.fill(sentence.text, 100))
    if options.csv:
        write_rows(options.csv, _git("rev-parse", "--short=8", options.at or "HEAD"), figures)


def write_rows(file: Path, commit: str, figures: dict[str, Figure]) -> None:
    """Append a row for each folder: commit, folder, words, relative words, per 100 words."""
    new = not file.exists()
    with file.open("a", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        if new:
            table.writerow(("commit", "folder", "words", "relative", "per_100"))
        for folder, figure in figures.items():
            table.writerow((commit.strip(), folder, *figure, f"{figure.per_100:.2f}"))


if __name__ == "__main__":
    sys.exit(main())
