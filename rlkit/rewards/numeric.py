"""The number that a reply ends with, against the number that is true: exact, and bounded in cost on any text."""

from __future__ import annotations

import re
from fractions import Fraction

from rlkit.rewards.answers import final_answer
from rlkit.rewards.score import Verdict
from rlkit.types import Rollout, gives

MAX_DIGITS = 200  # of one number as written; a longer one is no answer
MAX_SEGMENT = 1000  # characters after a marker in which its number must stand

MINUS, EN_DASH, TIMES, DIVISION = "\u2212\u2013\u00d7\u00f7"
# Possessive (++), so that a long run of digits is read once. A sign counts where no digit, letter or bracket stands
# before it: in 10-20 the second number is 20. Groups of thousands are bounded, so that a long chain of them that ends badly
# is not read to its end from each of its groups; what goes on beyond the bound is too long for a number anyway.
WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,250}+(?![0-9]|,[0-9]{3})|[0-9]++)"
NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}])[-+{MINUS}{EN_DASH}])?(?:[$€£](?P<minus>[-{MINUS}])?)?"
    rf"(?:(?P<mixed>[0-9]++) (?P<part>[0-9]++)/(?P<of>[0-9]++)"
    rf"|(?P<decimal>{WHOLE}(?:\.[0-9]++)?|\.[0-9]++)(?:[eE](?P<exponent>[-+]?[0-9]{{1,2}})(?!\w))?"
    rf"(?: ?/ ?(?P<denominator>{WHOLE}))?)"
)
HASHES = re.compile(r"(?<!#)####(?!#)")
BOXED = re.compile(r"\\boxed\s{0,9}\{")
THE_ANSWER_IS = re.compile(r"\bthe (?:final )?answer is\b", re.IGNORECASE)
END_OF_SENTENCE = re.compile(r"\n|[.!?;](?=\s|$)")
LEFT_SIDE = rf"(?:[0-9\s.,$€£%+\-*/^(){MINUS}{TIMES}{DIVISION}]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))*+"
EQUATION = re.compile(rf"(?:{LEFT_SIDE}=)++")
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s{0,9}\{([^{}]{1,99})\}\s{0,9}\{([^{}]{1,99})\}")
LATEX_SPACING = re.compile(r"\\[,!;: ]|\{,\}(?=[0-9])|\\(?=[$%])")


@gives("binary", correct=1, wrong=0)
@gives("raw")
def numeric(rollout: Rollout, *, correct: float = 1.0, wrong: float = 0.0) -> float | None:
    """Whether the last reply's number equals the number of `task.answer`, as exact fractions.

    Args:
      rollout: scored by its last reply's content; thinking is not read.
      correct, wrong: the two scores.
    Returns: `correct` or `wrong`; None where `task.answer` holds no number. An episode without a final answer is wrong
      (no reply, truncated, cut off by length, still calling tools), and so is a reply without a number; its status is unparseable.
    Source: Cobbe et al. 2021, arXiv:2110.14168 (the form `#### 18`).
    """
    truth = extract_answer(rollout.task.answer)
    if truth is None:
        return None
    answer = final_answer(rollout)
    number = None if answer is None else extract_answer(answer)
    if number is None:
        return Verdict(wrong, "unparseable")
    return correct if number == truth else wrong


def extract_answer(text: str) -> Fraction | None:
    r"""The number that a text gives as its answer.

    After the last `####`, on its line; else in the last `\boxed{…}`; else after the last "the answer is", in the same
    sentence; else the last number of the text. After a marker the first number counts, past the left side of an
    equation such as 5 + 3 = 8. A marker that no number follows does not count.
    """
    for segment in (_after_hashes(text), _boxed(text), _after_phrase(text)):
        if segment is not None and NUMBER.search(segment):
            return parse_number(segment)
    last = None
    for last in NUMBER.finditer(text):  # noqa: B007
        pass
    return None if last is None else _value(last)


def parse_number(text: str) -> Fraction | None:
    r"""The first number of a text, exactly.

    Signs (the typeset minus too), thousands commas, decimals, fractions 3/4 and 2 3/4, powers of ten 1e6, \frac{3}{4}.
    Currency, percent signs and units are dropped, without conversion: 50% is 50. The left sides of an equation are
    passed over: in x = 5 + 3 = 8 the number is 8. None where there is no number, for a zero denominator, and beyond
    MAX_DIGITS.
    """
    text = LATEX_FRACTION.sub(r"\1/\2", text[:MAX_SEGMENT])
    text = LATEX_SPACING.sub(lambda found: "," if found.group() == "{,}" else "", text)
    if (equation := EQUATION.match(text)) and NUMBER.search(text, equation.end()):
        text = text[equation.end() :]
    number = NUMBER.search(text)
    return None if number is None else _value(number)


def _value(number: re.Match[str]) -> Fraction | None:
    if len(number.group()) > MAX_DIGITS:
        return None
    group = number.groupdict()
    sign = -1 if (group["sign"] or "+") != "+" or group["minus"] else 1
    if group["mixed"]:
        whole, above, below = Fraction(group["mixed"]), group["part"], group["of"]
    else:
        whole = Fraction(group["decimal"].replace(",", "")) * Fraction(10) ** int(group["exponent"] or 0)
        above, below = "", group["denominator"]
    if not below:
        return sign * whole
    divisor = Fraction(below.replace(",", ""))
    if divisor == 0:
        return None
    return sign * (whole + Fraction(above) / divisor if above else whole / divisor)


def _last(pattern: re.Pattern[str], text: str) -> int | None:
    """Where the last match of a pattern ends."""
    ends = [found.end() for found in pattern.finditer(text)]
    return ends[-1] if ends else None


def _after_hashes(text: str) -> str | None:
    start = _last(HASHES, text)
    return None if start is None else text[start : start + MAX_SEGMENT].strip().partition("\n")[0]


def _after_phrase(text: str) -> str | None:
    start = _last(THE_ANSWER_IS, text)
    if start is None:
        return None
    return END_OF_SENTENCE.split(text[start : start + MAX_SEGMENT].lstrip(" \n\t:*"), maxsplit=1)[0]


def _boxed(text: str) -> str | None:
    """What stands in the braces of the last closed box; braces inside count."""
    start = _last(BOXED, text)
    if start is None:
        return None
    depth = 1
    for i, character in enumerate(text[start : start + MAX_SEGMENT]):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start : start + i]
    return None
