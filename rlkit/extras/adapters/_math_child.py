r"""Read and compare mathematical answers by the package math-verify. A script without rlkit.

    python -I -S -B _math_child.py SEARCH_PATH MEMORY

Each line of standard input is a JSON list, and each gets one line back, a JSON string:

    [seconds, truth]            readable, or the reason why the truth cannot be read
    [seconds, truth, answer]    equal, different or unparseable

The first line back is "ready", "missing: …" (a package is not installed) or "failed: …". The
package's own output is discarded. The kernel ends this process after a call's limit of processor
time (SIGPROF), or after `PATIENCE` times as long on the clock (SIGALRM). It does so even if the
parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from fractions import Fraction
from functools import lru_cache, partial
from itertools import accumulate
from types import ModuleType
from typing import Any

PATIENCE = 10.0  # a machine may be this busy before a call counts as hung
LONGEST = 1000  # characters of a formula outside \boxed{}
MOST_WORDS = 8  # of an answer in plain words; a longer one is a sentence

# ------------------------------------------------------------------------- one answer, one formula

DELIMITER = re.compile(r"\\?\$|(?<!\\)\\[()\[\]]")
PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*percent\s*\}|\bpercent\b)")
REPEATING = re.compile(r"(\d{0,50})\.(\d{0,50})\\(?:overline|bar)\s*\{(\d{1,50})\}")
COMMAND = re.compile(r"\\(?:begin|end|text\w*|math\w+|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
NAMES = re.compile(
    "and|or|sqrt|infinity|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|max|min|gcd|lcm",
    re.I,
)
UNIT = re.compile(r"(.*[\d)}\]])\s*([A-Za-z][A-Za-z .]*)", re.DOTALL)
WRAPPER = re.compile(r"\\(?:text\w*|math(?:rm|bf|it)|mbox)\s*(?=\{)|\s")
BASE = re.compile(r"\d_\{?(\d+)\}?\s*$")
INLINE = re.compile(r"((?<!\\)\$|\\\(|\\\[)([^$\n]{1,1000}?)(\$|\\\)|\\\])")
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BETWEEN = re.compile(r"[\s$,;]*(?:and|or|\\text\s*\{\s*(?:and|or)\s*\})?[\s$]*")
MARKER = re.compile(r"(?i:\banswer\b)[ *]*(?:is\b|:)[ :*]*|^[ \t]*####", re.MULTILINE)


def write_formula(text: str) -> str:
    r"""Write a bare answer as one LaTeX formula for the package to read whole.

    $3$ becomes 3. 5 dollars becomes 5\text{ dollars}, a unit, and the package drops units.
    Wednesday becomes \text{Wednesday}, otherwise it would be the product of its letters.
    0.\overline{36} becomes 4/11, and x ± y becomes both values. Percent signs are dropped, as in
    the comparison of MATH itself.
    """
    text = PERCENT.sub("", DELIMITER.sub("", text)).strip().removesuffix(".")
    text = REPEATING.sub(_write_repeating, text)
    if text.count(r"\pm") == 1 and "," not in text:
        text = ",".join(re.sub(r"\\pm(?![A-Za-z])", sign, text) for sign in "+-")
    if not _words(text, longer_than=3):
        return text
    unit = UNIT.fullmatch(text)
    if unit and not _words(unit[1], longer_than=3):
        return rf"{unit[1]}\text{{ {unit[2]}}}"
    return text if set("\\{}") & set(text) else rf"\text{{{text}}}"


def _write_repeating(found: re.Match[str]) -> str:
    r"""0.1\overline{6} = (16 - 1) / 90."""
    whole, fixed, period = found.groups()
    value = Fraction(
        int(whole + fixed + period) - int(whole + fixed or 0),
        10 ** len(fixed) * (10 ** len(period) - 1),
    )
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _words(text: str, *, longer_than: int = 1) -> list[str]:
    r"""Words outside of LaTeX commands and \text{…}."""
    return [
        word
        for word in re.findall("[A-Za-z]+", COMMAND.sub(" ", text))
        if len(word) > longer_than and not NAMES.fullmatch(word)
    ]


def find_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…}, or None. \boxed{2} and \boxed{3} are one answer: 2,3."""
    contents: list[str] = []
    follows = len(text)  # the start of the next box
    for found in reversed(list(BOX.finditer(text))):
        start = end = found.end()
        depth = 1
        while depth and end < len(text):
            depth += (text[end] == "{") - (text[end] == "}")
            end += 2 if text[end] == "\\" else 1  # \{ and \} open and close nothing
        end = min(end, len(text))
        if contents and (end > follows or not BETWEEN.fullmatch(text, end, follows)):
            break
        contents.insert(0, text[start : end - (not depth)])
        follows = found.start()
    return ",".join(contents) if contents else None


def find_marked(reply: str) -> str | None:
    r"""The marked answer of a reply, or the whole reply if it is only a formula; else None.

    The mark is the last \boxed{…}; else the last "answer is", "Answer:" or ####. The answer is the
    rest of its line, unless it goes on as a sentence.
    """
    inside = find_boxed(reply)
    if inside is not None:
        return inside
    ends = [found.end() for found in MARKER.finditer(reply)]
    segments = [reply[end:].partition("\n")[0] for end in reversed(ends[-10:])]
    return next(
        (segment for text in (*segments, reply) if _is_alone(segment := text.strip(" \n*"))), None
    )


def _is_alone(text: str) -> bool:
    """A formula, perhaps with a unit, or a few words; no sentence with a formula in it."""
    if not text or "\n" in text or len(text) > LONGEST or len(_words(text)) > MOST_WORDS:
        return False
    unit = UNIT.fullmatch(text)
    return not _words(unit[1] if unit else text) or bool(re.fullmatch(r"[A-Za-z ,'.]+", text))


def explain_unreadable(truth: str) -> str:
    """Say why a truth cannot be one answer, as far as its text tells; empty if it can."""
    bare = truth.replace(r"\{", "").replace(r"\}", "")
    if not truth.strip():
        return "it is empty"
    depths = list(accumulate((c == "{") - (c == "}") for c in bare))
    if min(depths) < 0 or depths[-1]:
        return "its braces do not match"
    if "\n" in truth.strip() and r"\begin" not in truth:
        return "it has several lines"
    if len(_words(truth)) > MOST_WORDS:
        return "it is a sentence"
    return ""


def normalise_spelling(text: str) -> str:
    r"""A formula without spaces and fonts. \text{(A)}, (A) and a are the same choice."""
    plain = WRAPPER.sub("", write_formula(text))
    letters = re.sub(r"[{}()]", "", plain)
    return letters.lower() if letters.isalpha() else plain


# ---------------------------------------------------------------------------------------- comparing


class Judge:
    """The package, and the truths read so far."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package
        self.latex = partial(
            package.parse, extraction_config=[package.LatexExtractionConfig()], parsing_timeout=None
        )
        self.truth = lru_cache(maxsize=256)(self._truth)  # the samples of a prompt share one

    def __call__(self, truth: str, answer: str | None = None) -> str:
        gold, bare, reason = self.truth(truth)
        if answer is None or reason:
            return reason or "readable"
        said = find_marked(answer)
        if said is not None and normalise_spelling(said) == normalise_spelling(bare):
            return "equal"
        given = self.given(answer, said)
        if not given:
            return "unparseable"
        bases = {
            found[1]
            for text in (bare, said or "")
            if (found := BASE.search(DELIMITER.sub("", text)))
        }
        if len(bases) > 1:  # the package drops the base
            return "different"
        return "equal" if self.package.verify(gold, given, timeout_seconds=None) else "different"

    def _truth(self, truth: str) -> tuple[list[Any], str, str]:
        r"""Read a truth: its formulas, its text without \boxed{}, and the reason if it cannot be
        read."""
        reason = explain_unreadable(truth)
        if reason:
            return [], truth, reason
        inside = find_boxed(truth)
        bare = truth if inside is None else inside
        gold = self.latex(rf"\boxed{{{write_formula(bare)}}}")
        if not gold or not self.package.verify(gold, gold, timeout_seconds=None):
            return [], bare, "math-verify makes nothing of it"
        return gold, bare, ""

    def given(self, answer: str, said: str | None) -> list[Any]:
        """Read a reply: everything it marks, else the answer found by the package."""
        if said is not None:
            whole = write_formula(said.replace("\n", " "))
            return [] if explain_unreadable(whole) else list(self.latex(rf"\boxed{{{whole}}}"))
        text = INLINE.sub(
            lambda found: found[1] + write_formula(found[2]) + found[3], PERCENT.sub("", answer)
        )
        found = self.latex(text) if "$" in text or r"\(" in text or r"\[" in text else []
        return list(found or self.package.parse(text, parsing_timeout=None))


# -------------------------------------------------------------------------------------- the process


def main() -> None:
    search_path = json.loads(sys.argv[1])
    memory = int(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # it can write any character
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = search_path

    def say(text: str) -> None:
        print(json.dumps(text), file=out, flush=True)

    try:
        import math_verify as package

        judge = Judge(package)
        judge("1", r"\boxed{1}")  # sympy imports its parts on first use
    except ImportError as error:
        return say(f"missing: {error}")
    except Exception as error:
        return say(f"failed: {type(error).__name__}: {error}")
    say("ready")
    for line in sys.stdin:
        seconds, *pair = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
        said = judge(*pair)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        say(said)


if __name__ == "__main__":
    main()
