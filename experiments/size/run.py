"""Count the tokens of the package, and of the functions entered by `rlkit train`.

    python experiments/size/run.py                a table: the core's folders, then each extra
    python experiments/size/run.py --entered      the functions that the default run enters

Tokens are those of Python's `tokenize` without comments, docstrings, newlines and indentation. The
width of the lines therefore does not matter.

The second form trains the default for two steps in a temporary folder with `sys.setprofile`. It
counts each function of rlkit entered by the process or one of its threads. An inner function counts
only if it was entered itself. Child processes are not seen.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "rlkit"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def token_lines(text: str) -> list[int]:
    """Return the line number of each counted token of a file.

    An f-string is one token, as before Python 3.12.
    """
    found = []
    depth = 0
    before = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            if depth == 0:
                found.append(token.start[0])
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
        elif depth == 0 and token.type not in LAYOUT:
            starts = before in (None, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
            if not (token.type == tokenize.STRING and starts):
                found.append(token.start[0])
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return found


def length_of(function: Function) -> int:
    """Return the lines of a function from its `def` to its end, without its docstring."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return length
    docstring = function.body[0]
    assert docstring.end_lineno is not None
    return length - (docstring.end_lineno - docstring.lineno + 1)


def functions_of(tree: ast.Module) -> Iterator[Function]:
    """Yield every function of a file, inner ones and methods included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def dense_places(tree: ast.Module) -> dict[str, list[int]]:
    """Return the lines that pack several steps into one expression, by kind.

    packed: a tuple of values assigned to a tuple of names, unless the names are swapped

    walrus: := outside comprehensions and outside the test of `while`

    nested: a conditional expression inside another
    """
    found: dict[str, list[int]] = {"packed": [], "walrus": [], "nested": []}
    allowed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            allowed |= set(ast.walk(node))
        if isinstance(node, ast.While):
            allowed |= set(ast.walk(node.test))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_packed(node):
            found["packed"].append(node.lineno)
        if isinstance(node, ast.NamedExpr) and node not in allowed:
            found["walrus"].append(node.lineno)
        if isinstance(node, ast.IfExp):
            inner = [n for n in ast.walk(node) if isinstance(n, ast.IfExp) and n is not node]
            found["nested"] += [n.lineno for n in inner]
    return found


def is_packed(node: ast.Assign) -> bool:
    """Return whether an assignment gives several names a value each, and is no swap."""
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    names = {ast.unparse(element) for element in target.elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return names != values


def room_of(file: Path) -> str:
    """Return the extra to which a file belongs, or "core"."""
    parts = file.relative_to(PACKAGE).parts
    return parts[1] if parts[0] == "extras" and len(parts) > 2 else "core"


def table() -> str:
    """Return a table by folder: tokens, lines, tokens per line, files and the longest function."""
    rows: dict[str, Counter[str]] = {}
    longest: dict[str, tuple[int, str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text = file.read_text()
        lines = token_lines(text)
        room = room_of(file)
        own = file.relative_to(PACKAGE).parts[0] if room == "core" else f"extras/{room}"
        lengths = [(length_of(node), node.name) for node in functions_of(ast.parse(text))]
        for name in (own, "core" if room == "core" else "extras", "all"):
            row = rows.setdefault(name, Counter())
            row.update(tokens=len(lines), lines=len(set(lines)), files=1)
            longest[name] = max([longest.get(name, (0, "")), *lengths])
    out = [
        "| folder | tokens | lines of code | tokens a line | files | longest function, its lines |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["tokens"]):
        density = row["tokens"] / max(1, row["lines"])
        length, function = longest[name]
        out.append(
            f"| {name} | {row['tokens']:,} | {row['lines']:,} | {density:.1f} | {row['files']} |"
            f" `{function}` {length} |"
        )
    return "\n".join(out)


def enter_default_run() -> dict[Path, set[tuple[int, str]]]:
    """Train the default run for two steps and record the entered functions.

    Returns: file → first line and name of each entered function.
    """
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)

    from rlkit.commands.cli import main

    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            status = main(["train", "trainer.steps=2"])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            os.chdir(before)
    if status:
        raise SystemExit(f"rlkit train ended with status {status}, so nothing was counted")
    found: dict[Path, set[tuple[int, str]]] = {}
    for code in entered:
        file = Path(code.co_filename)
        if PACKAGE in file.parents:
            found.setdefault(file, set()).add((code.co_firstlineno, code.co_name))
    return found


def count_entered(file: Path, entered: set[tuple[int, str]]) -> int:
    """Count the tokens of a file's entered functions, each token once.

    A decorated function begins at its first decorator. A lambda counts with the function around it.
    """
    text = file.read_text()
    inside: set[int] = set()
    for node in sorted(functions_of(ast.parse(text)), key=lambda node: node.lineno):
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        assert node.end_lineno is not None
        lines = set(range(start, node.end_lineno + 1))
        # Inner functions come after the function around them, so their lines are decided last.
        inside = inside | lines if (start, node.name) in entered else inside - lines
    return sum(line in inside for line in token_lines(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entered", action="store_true", help="the default run's functions")
    if not parser.parse_args().entered:
        print(table())
        return
    sizes: Counter[str] = Counter()
    functions = 0
    for file, entered in enter_default_run().items():
        sizes[file.relative_to(PACKAGE).parts[0]] += count_entered(file, entered)
        functions += len(entered)
    print(f"\n{functions:,} functions entered, {sizes.total():,} tokens")
    for name, size in sizes.most_common():
        print(f"{size:>8,}  {name}")


if __name__ == "__main__":
    main()
