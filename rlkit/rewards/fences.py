"""Find the fenced code blocks of a reply, in the forms that people and chat models write."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

# Only these characters end a line. str.splitlines also cuts at U+2028, \x0c, \x1c and others, but a
# string in a program may contain them.
LINE_END = re.compile(r"\r\n|\r|\n")
QUOTE = r"(?:[ \t]*>)"
LIST_MARKER = r"(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)"
OPENING = re.compile(
    rf"(?P<quotes>{QUOTE}*+)(?P<indent>["
    rf" \t]*+{LIST_MARKER}*+)(?P<fence>`{{3,}}(?=[^`]*+$)|~{{3,}})(?P<info>.*)"
)
PYTHON = re.compile(r"\{?\s*\.?(?:i?python|py)[0-9.]*+(?![\w-])|[\w./-]++(?<=\.py)", re.IGNORECASE)
# a block with attributes but without a language also counts as unmarked: title="solution"
UNMARKED = re.compile(r"code|\{[^.]*+\}|\w++=.*+|", re.IGNORECASE)
WORD = re.compile(r"\{?\.?[A-Za-z]")


class Block(NamedTuple):
    """Hold a fenced block. `language` is python, unmarked, or other for every other language.
    `code` has no common indentation."""

    language: Literal["python", "unmarked", "other"]
    code: str


class _Open(NamedTuple):
    """Hold a block while it is being read."""

    fence: str  # the run of backticks or tildes
    info: str  # the text after the fence
    indent: int  # number of columns before the fence
    quotes: int  # number of block quotes around the fence
    lines: list[str]


def split_code_blocks(text: str) -> list[Block]:
    r"""Return the fenced blocks of a text, in order, without empty blocks.

    Well-formed blocks are read as in CommonMark. A fence is three or more backticks or tildes, and
    a run of at least the same length closes it. A block may be in a list or a block quote. A block
    that is never closed reaches to the end of the text. Unlike in CommonMark, these mistakes of
    writers are accepted:

    - a closing fence at the end of the last line of code, unless a fence or an open quotation mark
      is before it in the line;
    - an opening fence with a language while a block is open: it ends the open block;
    - an opening fence after prose on its line, if it names Python;
    - fences indented by four columns or more, and code indented less than its fence;
    - an HTML tag on the line before the fence, for example <answer>.

    A closing fence is at most three columns deeper than the opening fence. A deeper fence belongs
    to a string of the program. The time is linear in the length of the text.

    >>> split_code_blocks("1. Add:\n   ~~~{.python}\n   s = 1 + 1~~~\n   Done.")
    [Block(language='python', code='s = 1 + 1')]
    """
    blocks: list[_Open] = []
    current: _Open | None = None
    for line in LINE_END.split(text):
        if current is None:
            current = _opening(line)
            blocks += [current] if current else []
            continue
        content = (
            re.sub(rf"^{QUOTE}{{0,{current.quotes}}} ?", "", line, count=1)
            if current.quotes
            else line
        )
        if _closes(current, content):
            current = None
            continue
        new = _opening(line)
        if (
            new
            and new.fence.startswith(current.fence)
            and WORD.match(new.info)
            and new.indent <= current.indent + 3
        ):
            current = new
            blocks.append(new)
            continue
        last = _cut_glued_fence(current.fence, content)
        current.lines.append(content if last is None else last)
        if last is not None:
            current = None
    read = (Block(_language(block.info), _remove_margin(block.lines)) for block in blocks)
    return [block for block in read if block.code.strip()]


def _opening(line: str) -> _Open | None:
    found = OPENING.fullmatch(line)
    if found:
        indent = _columns(re.sub(r"[^ \t]", " ", found["indent"]))
        return _Open(
            found["fence"], found["info"].strip(" \t"), indent, found["quotes"].count(">"), []
        )
    before, fence, info = line.rpartition("```")
    word = info.strip(" \t")
    if fence and "```" not in before and word and PYTHON.fullmatch(word):
        return _Open(fence, word, 0, 0, [])
    return None


def _closes(block: _Open, line: str) -> bool:
    run = line.strip(" \t")
    return (
        run.startswith(block.fence)
        and not run.strip(block.fence[0])
        and _columns(line) <= block.indent + 3
    )


def _cut_glued_fence(fence: str, line: str) -> str | None:
    """Return the text before a closing fence at the end of a line of code; None if the line has no
    closing fence."""
    line = line.rstrip(" \t")
    before = line.rstrip(fence[0])
    if len(line) - len(before) < len(fence) or not before.strip() or fence in before:
        return None
    quotation = before[-1] in "\"'" and before.count(before[-1]) % 2 == 1  # f"""``` opens a string
    return None if quotation else before


def _language(info: str) -> Literal["python", "unmarked", "other"]:
    if PYTHON.match(info):
        return "python"
    return "unmarked" if UNMARKED.fullmatch(info) else "other"


def _columns(line: str) -> int:
    """Return the indentation of a line in columns, with tab stops of four columns."""
    return len(line[: len(line) - len(line.lstrip(" \t"))].expandtabs(4))


def _remove_margin(lines: list[str]) -> str:
    """Join the lines without the indentation of the first line of code, because a program's first
    line must be at column 0. Comments do not count as code."""
    margins = [len(line) - len(line.lstrip(" \t")) for line in lines]
    first = next(
        (
            margin
            for line, margin in zip(lines, margins, strict=True)
            if line.strip() and line[margin] != "#"
        ),
        0,
    )
    return "\n".join(
        line[min(margin, first) :] for line, margin in zip(lines, margins, strict=True)
    )
