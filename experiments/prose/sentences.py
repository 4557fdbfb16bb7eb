"""Measures how hard the prose of the repository is to parse, and shows its hardest sentences.

    python experiments/prose/sentences.py --seed 14 [--at COMMIT] [--csv FILE] [--under conf docs]

A page is a file. Its prose is the docstrings, comments and error messages of rlkit/**/*.py, the
comments of conf/**/*.yaml, the README and the pages of docs/ that are written by hand. Code,
formulas, tables of numbers and generated pages are left out.

The length of a sentence's parse is approximated without a parser:

    length = words + 2 · (commas + semicolons + colons + opening brackets + dashes + subordinators)

A subordinator is one of SUBORDINATORS below, such as "which" or "where". A code span, a number or a
symbol counts as one word. The seed orders the pages that have at least MINIMUM sentences at the
commit BEFORE. The first ten that still have prose in the working tree are read, so a change of the
prose does not change the choice.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import random
import re
import statistics
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "8fc66e4"
PAGES = 10
MINIMUM = 8

SUBORDINATORS = (
    "which that where what whose whom who when while since because unless until if so as although"
    " than whether"
)
SUBORDINATE = re.compile(rf"\b(?:{'|'.join(SUBORDINATORS.split())})\b", re.I)
MARKS = re.compile(r"[,;:(\[–—]| - ")

# Turns of phrase that the style guide of the project replaces, and how each is found.
AVOIDED = {
    "anew": r"\banew\b",
    "nobody": r"\bnobody\b",
    "also where": r"\balso where\b",
    "stands for": r"\b(?:stands?|stood|standing) (?:for|in for)\b",
    "says of": r"\b(?:says?|said) of\b",
    "is seen to": r"\b(?:is|are|was|were) seen to\b",
    "subject what": r"(?:^|[;:] )what\b(?!.*\?$)",
}

FORMULA = re.compile(r"\S+ (?:=|←) |[A-Zρσ]\S* \(?=|[(\[]?[Σ½]")
BEGINS = re.compile(r"\S+ {2,}|(?:\*{0,2}[\w, ]{1,40}|Returns|Raises|Args|Source): ?|[-*] ")


class Sentence(NamedTuple):
    """One sentence of prose and the place where its paragraph begins."""

    file: str
    line: int
    text: str

    @property
    def words(self) -> int:
        return len(masked(self.text).split())

    @property
    def length(self) -> int:
        text = masked(self.text)
        return self.words + 2 * (len(MARKS.findall(text)) + len(SUBORDINATE.findall(text)))


# ----------------------------------------------------------------------------------- reading a tree


def reader(commit: str | None) -> tuple[list[str], Callable[[str], str]]:
    """The paths of a commit, or of the working tree where none is given, and a function that reads
    one of them."""
    if commit is None:
        paths = _git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        return [path for path in paths if (ROOT / path).is_file()], lambda path: (
            ROOT / path
        ).read_text()
    return _git("ls-tree", "-r", "--name-only", commit).splitlines(), lambda path: _git(
        "show", f"{commit}:{path}"
    )


def _git(*arguments: str) -> str:
    return subprocess.run(
        ("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def is_page(path: str) -> bool:
    """Whether a file's prose is written by hand and belongs to the product."""
    if path.endswith(".py"):
        return path.startswith("rlkit/") or path == "docs/generate.py"
    if path.endswith(".yaml"):
        return path.startswith("conf/")
    return path == "README.md" or bool(re.fullmatch(r"docs/(?!extension_points)\w+\.md", path))


def sentences(commit: str | None) -> dict[str, list[Sentence]]:
    """Path → sentences of every page."""
    paths, read = reader(commit)
    return {path: list(of_file(path, read(path))) for path in sorted(paths) if is_page(path)}


def of_file(path: str, text: str) -> Iterator[Sentence]:
    """The sentences of one file."""
    paragraphs = {".py": of_python, ".yaml": of_yaml, ".md": of_markdown}[Path(path).suffix]
    for line, paragraph in paragraphs(text):
        for sentence in split(paragraph):
            yield Sentence(path, line, sentence)


# -------------------------------------------------------------------------------- finding the prose


def of_python(text: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph) of the docstrings, comments and error messages of a module."""
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
    yield from of_comments(
        (t.start[0], t.start[1], t.string) for t in _tokens(text) if t.type == tokenize.COMMENT
    )


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def message_of(node: ast.expr) -> str:
    """The text of a message; each value that is put into it counts as one word."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            part.value if isinstance(part, ast.Constant) else "`value`" for part in node.values
        )
    return ""


def of_docstring(line: int, doc: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph) of a docstring; an argument or a row of a list is a paragraph; formulas,
    sources and examples are left out."""
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
    """(line, paragraph) of comments given as (line, column, text); neighbours in one column are a
    paragraph, a row of a list is one too."""
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


def of_yaml(text: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph) of the comments of a config."""
    lines = enumerate(text.splitlines(), 1)
    found = (
        (number, match.start(1), match[1])
        for number, line in lines
        if (match := re.search(r"(?:^\s*|\s)(#.*)$", line))
    )
    yield from of_comments(found)


def of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """(line, paragraph) of a page; a cell of a table is a paragraph, and code is left out."""
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
    """A text of the same length in which code spans, short quotations and abbreviations hold no
    spaces and no marks."""
    spans = r"`[^`]+`|\$\{[^}]*\}|\"[^\" ]+\"|\b(?:e\.g|i\.e|et al|eq|vs|cf|No|Fig|resp)\.(?= )"
    return re.sub(spans, lambda span: re.sub(r"[\s,;:.(\[]", "_", span[0]), text)


def split(paragraph: str) -> list[str]:
    """The sentences of a paragraph that have two words or more."""
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


def drawn(seed: int, under: list[str]) -> list[str]:
    """The pages that a seed chooses from those with enough prose at BEFORE, without pages that are
    gone now."""
    pages = sorted(
        path
        for path, found in sentences(BEFORE).items()
        if len(found) >= MINIMUM and path.startswith(tuple(under))
    )
    random.Random(seed).shuffle(pages)
    now = {path for path, found in sentences(None).items() if found}
    return sorted([path for path in pages if path in now][:PAGES])


def figures(found: list[Sentence]) -> dict[str, float]:
    """Totals of some sentences; turns of phrase per 1,000 words."""
    lengths = sorted(sentence.length for sentence in found)
    words = sum(sentence.words for sentence in found)
    totals = {
        "sentences": len(found),
        "words": words,
        "mean": round(statistics.fmean(lengths), 2),
        "p90": lengths[int(0.9 * (len(lengths) - 1))],
        "longest": lengths[-1],
    }
    counts = {
        name: sum(len(re.findall(p, s.text, re.I)) for s in found) for name, p in AVOIDED.items()
    }
    per_thousand = {
        name: round(1000 * count / words, 3)
        for name, count in {**counts, "avoided": sum(counts.values())}.items()
    }
    return {**totals, **per_thousand}


def main(arguments: list[str] | None = None) -> None:
    """Print the ten longest sentences of the drawn pages and the totals; write them as CSV where
    asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=14, help="draws the ten pages")
    parser.add_argument(
        "--at", metavar="COMMIT", help="read this commit; the default is the working tree"
    )
    parser.add_argument(
        "--under", nargs="+", default=[""], metavar="PREFIX", help="only pages whose path begins so"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write pages, sentences and totals there"
    )
    options = parser.parse_args(arguments)
    pages = drawn(options.seed, options.under)
    everything = {
        path: found
        for path, found in sentences(options.at).items()
        if path.startswith(tuple(options.under))
    }
    chosen = [sentence for page in pages for sentence in everything.get(page, [])]
    longest = sorted(chosen, key=lambda sentence: (-sentence.length, sentence))[:PAGES]
    totals = {
        "ten pages": figures(chosen),
        "all pages": figures([sentence for found in everything.values() for sentence in found]),
    }

    print(
        f"pages drawn by seed {options.seed}, read at {options.at or 'the working tree'}:",
        *pages,
        sep="\n  ",
    )
    for rank, sentence in enumerate(longest, 1):
        print(
            f"\n{rank}. length {sentence.length},"
            f" {sentence.file}:{sentence.line}\n{textwrap.fill(sentence.text, 100)}"
        )
    for name, row in totals.items():
        print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    if options.csv:
        write(options.csv, longest, totals)


def write(file: Path, longest: list[Sentence], totals: dict[str, dict[str, float]]) -> None:
    """One row a sentence and one row a total: what, place, value, text."""
    with file.open("w", newline="") as stream:
        table = csv.writer(stream, lineterminator="\n")
        table.writerow(("what", "place", "value", "text"))
        table.writerows(("sentence", f"{s.file}:{s.line}", s.length, s.text) for s in longest)
        table.writerows(
            (name, key, value, "") for name, row in totals.items() for key, value in row.items()
        )


if __name__ == "__main__":
    sys.exit(main())
