r"""Compare the number that a reply gives as its answer with the true number. The comparison is
exact, and its cost is bounded on any text.

Truths and replies are read by the same grammar: a number with an optional unit (`parse_number`). If
an expression is more than one number, no part of it is read as the answer: 3\sqrt{2} is neither 3
nor 2.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction

from rlkit.rewards.declarations import reads_truth
from rlkit.rewards.verdicts import Verdict, final_answer
from rlkit.types import Rollout, Task, gives

MAX_DIGITS = 200  # longest number read as an answer, in characters
MAX_SEGMENT = 1000  # number of characters searched for a number after an answer marker
MAX_MARKERS = 100  # largest number of answer markers read in one text, counted from its end

# ------------------------------------------------------------------ different spellings of a number

CURRENCY = "$€£¥₹"
FRACTIONS = {
    c: f" {unicodedata.normalize('NFKC', c).replace(chr(0x2044), '/')} "
    for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
SPELLINGS = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2012\ufe63\uff0d", "-")
    | dict.fromkeys(f"{CURRENCY}\u00a0\u2009\u202f~`", " ")
    | {"\u2044": "/", "\u00d7": "*", "\u00b7": "*", "\u22c5": "*"}
    | FRACTIONS
)
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
PART = r"\s{0,9}-?\s{0,9}[0-9.,]{1,99}\s{0,9}"  # numerator or denominator of a LaTeX fraction
REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\(?=[$%])"), ""),
    # -$18, before currencies become spaces
    (re.compile(rf"(?<=[-+\u2212\u2013])[{CURRENCY}]\s?"), ""),
    # - Rs. 18
    (re.compile(r"([-+\u2212\u2013])\s{0,9}(?:USD?|EUR|GBP|INR|Rs\.?)\s{0,9}(?=\.?[0-9])"), r"\1"),
    (re.compile(r"<<[^<>]{0,200}>>"), ""),  # calculations as GSM8K writes them
    (re.compile(r"\{,\}(?=[0-9])"), ","),
    # 10\,000 and 10,\!000
    (re.compile(r"(?<=[0-9]),?(?:\\[,!;: ]|[\u2009\u202f])(?=[0-9]{3}(?![0-9]))"), ","),
    (
        re.compile(r"[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]++"),
        lambda found: "^{" + found[0].translate(SUPERSCRIPTS) + "}",
    ),
    (re.compile(r"\*\*|\\[()\[\],!;: ]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])"), " "),
    (
        re.compile(
            r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|emph)\s{0,9}\{([^{}]{0,200})\}"
        ),
        r" \1 ",
    ),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (
        re.compile(
            r"\^\s{0,9}(?:\{\s{0,9}\\circ\s{0,9}\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"
        ),
        "°",
    ),
    (
        re.compile(
            rf"\\[dtc]?frac\s{{0,9}}(?:\{{({PART})\}}|([0-9]))\s{{0,9}}(?:\{{({PART})\}}|([0-9])(?![0-9]))"
        ),
        r" \1\2/\3\4 ",
    ),
]

# ------------------------------------------------------------------- a number with an optional unit

# The repetition is possessive (++), so a long run of digits is read only once.
WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})++(?![0-9])|[0-9]++)"
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]++)?|\.[0-9]++)"
POWER = (
    r"\s?\^\s?(?:\{{\s{{0,9}}(?P<{0}>[-+]?\s?[0-9]{{1,2}})\s{{0,9}}\}}"
    r"|(?P<{0}_bare>[-+]?[0-9]{{1,2}})(?![0-9]))"
)
VALUE = (
    r"(?:(?P<mixed>[0-9]++)\s++(?P<part>[0-9]++)\s?/\s?(?P<of>[0-9]++)"
    rf"|(?P<decimal>{DECIMAL})"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,2})(?![0-9_])"
    rf"|\s{{0,9}}[*x]\s{{0,9}}10{POWER.format('ten')}|{POWER.format('power')}"
    rf"|\s{{0,9}}/\s{{0,9}}(?P<divisor>{DECIMAL}))?)"
    r"(?:\s{0,9}(?P<scale>(?i:hundred|thousand|million|billion|trillion))\b)?"
)
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
NUMBER = re.compile(
    rf"(?:(?P<sign>[-+]|(?i:minus|negative|plus|positive)\b)\s{{0,9}})?(?:(?:USD?|EUR|GBP|INR|Rs\.?)\s{{0,9}})?{VALUE}"
)
LETTER = r"[^\W\d_]"
WORD = rf"{LETTER}++(?:['’.]{LETTER}++)*+(?:\s?\^(?:\{{-?[0-9]\}}|-?[0-9]))?"
UNIT = re.compile(
    rf"\s*+(?:[%°](?:\s?{WORD})?|[(/]?\s*+{WORD})(?:(?:\s*[/*.)(-]\s*|\s+){WORD}){{0,5}}\s*+\)?"
)
# The only units of one or two letters. Other short words are factors, as in 2k and 3xy.
SHORT_UNIT = re.compile(
    "[mgshlLJWVNAKCF]|[kcmnd][mg]|[mcd]?[lL]|lb|oz|ft|in|yd|mi|hr|yr|wk|mo|am|pm|st|nd|rd|th|sq|pt|qt|ha|cc|[kMG][WVJ]|m[VA]|Hz|[kKMGT]B|Pa|dB|[AW]h"
)
# Words of calculation. A text with one of these words is more than a number and its unit.
FRACTION_WORD = (
    "half|halves|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths?"
)
NOT_UNIT = re.compile(
    "answer|and|or|plus|minus|divided|pi|tau|sqrt|root|squared|cubed|factorial|choose|mod|sin|cos|tan|log|ln|exp|half|halves|thirds?"
    "|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths|hundred|thousand|[mbtr]+illion",
    re.IGNORECASE,
)
# Words after a number in a sentence can change its meaning: "5 and a half", "2 thirds", "5 or 6".
GOES_ON = re.compile(
    rf"\s*(?:(?:and|or)\s+(?:an?\s+)?(?:one\s+|two\s+|three\s+)?(?:[-+]?[0-9]|(?:{FRACTION_WORD})\b)|(?:plus|minus|divided|squared|cubed|factorial)\b"
    r"|(?:times|over)\s+(?:[0-9\\]|pi\b|(?!a\b)\w\b)|(?:half|halves|thirds?)\b)",
    re.IGNORECASE,
)
HAS_NUMBER = re.compile(rf"[0-9{''.join(FRACTIONS)}]")

# ------------------------------------------------------------------------------- answers in replies

MARKER = re.compile(
    r"(?P<hashes>(?<!#)####(?!#))|(?P<box>\\boxed\s{0,9}\{)|(?P<tag><answer>)|(?P<end></answer>)"
    r"|(?P<phrase>\banswer\s{1,3}is\b)|(?P<colon>\banswer\s{0,3}[*_]{0,3}\s{0,3}[:：])",
    re.IGNORECASE,
)
END_OF_SENTENCE = re.compile(r"\n|(?<!\\)(?<!\bRs)[.!?;](?=\s|$)")
NUMBERED_HEADING = re.compile(r"\W*+[0-9]++\s?[.):]\s++\S")
WORDS = re.compile(rf"(?<!\\)\b(?!(?i:minus|negative)\b){LETTER}{{2,}}")
# Python before 3.11.5 matches a possessive group with alternatives wrongly (gh-106052). Therefore
# the groups here are greedy.
# EXPRESSION matches the parts of an expression: digits, operators, single letters except the words
# a and I, LaTeX commands, and signs in words.
EXPRESSION = re.compile(
    rf"(?:[0-9\s.,+\-*/^(){{}}\[\]=%°<>|!:≈]|\\[A-Za-z]++|(?<!{LETTER})(?:minus|negative|hundred|thousand|million|billion|trillion)\b"
    rf"|(?<!['’])(?<!{LETTER})(?![aAI]){LETTER}(?!{LETTER}))+",
    re.IGNORECASE,
)
CLAUSE = re.compile(r",\s|;|:\s|(?<=\S)\s+\(")
BEFORE_NUMBER = re.compile(r"\A(?:[\s,:;*=!≈)\]}%°]|\.(?![0-9]))+")
# A number in running text: not part of a name, an index, a time, a date or a LaTeX command.
IN_TEXT = re.compile(
    r"(?<![\w\\^{])(?<![0-9][.,:/])(?P<sign>(?<![\w)\]}])[-+]|(?:(?<=\bis )|(?<=\bequals"
    r" )|(?<=[=:(] )|(?<=[=:(]))-\s+"
    r"|(?<![0-9]"
    rf" )\b(?i:minus|negative)\s+)?{VALUE}(?![0-9^\\_]|\s?\\|[.,:/][0-9])(?P<glued>{LETTER}*+)"
)
NOT_NUMBERS = re.compile(
    rf"(?<![\\\w]){LETTER}++_?[0-9]\w*|(?:(?<={LETTER}{LETTER})|(?<=\bm))\s?\^(?:\{{-?[0-9]\}}|-?[0-9])"
)  # x2, H2O, m^2


def explain_unreadable(task: Task, **keywords: object) -> str:
    """Explain why `numeric` cannot read a task's truth; return "" if it can."""
    if _truth(task.answer) is not None:
        return ""
    return (
        "is not one number with an optional unit; write it like 18, 3/4 or 2.5 km, or let the rows"
        " be checked by text, as with task.reward=exact_match"
    )


@gives("binary", correct=1, wrong=0)
@gives("raw")
@reads_truth(explain_unreadable)
def numeric(rollout: Rollout, *, correct: float = 1.0, wrong: float = 0.0) -> float | None:
    """Score whether the number in the last reply equals the number in `task.answer`. Both are
    compared as exact fractions.

    Args:
      rollout: the rollout to score. Only the content of its last reply is read, not the thinking.
      correct, wrong: the scores of a right and of a wrong answer.
    Returns: `correct` or `wrong`; None if the truth cannot be read. `task.answer` must be a number
      (see `parse_number`) or a text with a number after its last marker. A run refuses other tasks
      when it starts. An episode without a final answer is wrong (no reply, truncated, cut off by
      length, still calling tools). A reply without a number is wrong too. Both have the status
      unparseable.
    Source: Cobbe et al. 2021, arXiv:2110.14168 (the form `#### 18`).
    """
    truth = _truth(rollout.task.answer)
    if truth is None:
        return None
    answer = final_answer(rollout)
    number = None if answer is None else extract_answer(answer)
    if number is None:
        return Verdict(wrong, "unparseable")
    return correct if number == truth else wrong


def parse_number(text: str) -> Fraction | None:
    r"""Return the number in a text as an exact fraction. The result is None if the text is not one
    number with an optional unit.

    A number may have a sign (-5, −5, - 5, minus 5), commas between thousands, and decimals. It may
    be a fraction (3/4, 2 3/4, ½, \frac{3}{4}, 2\frac12) or a power (10^{-3}, 10⁻³, 2 \times 10^6,
    1e6), and may have a word of scale (5 million). Currencies, percent signs and units are dropped,
    without conversion: 50% is 50, and 50 cents is 50. A unit has up to six words, without words of
    calculation (and, times, half, …). A unit of one or two letters must be a known unit, because 2k
    is a product. A full stop or comma at the end and emphasis around the number are dropped. The
    result is also None for a zero denominator, and for a number of more than MAX_DIGITS characters.

    >>> parse_number(r"$2\frac{1}{2}$ cups"), parse_number(r"3\sqrt{2}"), parse_number("10:30")
    (Fraction(5, 2), None, None)
    """
    text = text.strip()
    # a fast path for most truths; the general path takes fifty times as long
    if len(text) <= MAX_DIGITS and text.isascii() and text.removeprefix("-").isdigit():
        return Fraction(int(text))
    return (
        _parse_whole(_simplify_text(text))
        if len(text) <= MAX_SEGMENT and "\n" not in text
        else None
    )


def extract_answer(text: str) -> Fraction | None:
    r"""Return the number that a reply gives as its answer, or None if it gives no number.

    The answer is read after the last answer marker with a number behind it. The markers are `####`
    with a number on its line, `\boxed{…}`, "the answer is", "Answer:" and `<answer>…</answer>`.
    After "the answer is", the first number of the sentence counts. After the other markers, the
    number must follow directly. In an equation, the number after the last "=" counts. A heading
    (#### Step 2) is not a marker. If the expression after the marker is not a number
    (\boxed{3\sqrt{2}}), the result is None.

    Without a marker, the last number of the text counts. If its sentence has an "=", the number
    after the last "=" counts. If the whole text is a number, it is the answer.
    """
    number = parse_number(text)
    if number is not None:
        return number
    for kind, segment in _segments(text):
        plain = _simplify_text(segment)
        number = _parse_whole(plain)
        if number is not None:
            return number
        if _is_followed_by_number(kind, plain):
            return _read_delimited(plain) if kind in ("box", "tag") else _find_first(plain)
    return _find_last(text)


def _truth(text: str) -> Fraction | None:
    """Return the number in a truth. The whole text is read as a number, or else the text after the
    last answer marker, as in the solutions of GSM8K."""
    number = parse_number(text)
    if number is not None:
        return number
    last = next(
        (
            segment
            for kind, segment in _segments(text)
            if _is_followed_by_number(kind, _simplify_text(segment))
        ),
        "",
    )
    return parse_number(last)


# ------------------------------------------------------------------------------------------ numbers


def _simplify_text(text: str) -> str:
    """Rewrite a text with one spelling for signs, spaces, fractions and powers. Currencies and
    LaTeX's typesetting commands are removed."""
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    return text.translate(SPELLINGS)


def _parse_whole(plain: str) -> Fraction | None:
    """Return the number if the whole simplified text is one number, with an optional unit and
    punctuation; else None."""
    text = plain.strip(" \t\r\n*_\"'")
    if not text.endswith(".."):
        text = text.rstrip(".,;:?*_\"' \t")
    while len(text) > 1 and text[0] + text[-1] in ("()", "{}", "[]"):
        text = text[1:-1].strip()
    found = NUMBER.match(text)
    return _value(found) if found and _is_unit(text[found.end() :]) else None


def _is_unit(rest: str) -> bool:
    if not rest.strip():
        return True
    if not UNIT.fullmatch(rest):
        return False
    words = re.findall(rf"{LETTER}+", rest)
    short = [word for word in words if len(word) == 1 and word != "a"] + [
        word for word in words[:1] if len(word) == 2
    ]
    return all(SHORT_UNIT.fullmatch(word) for word in short) and not any(
        NOT_UNIT.fullmatch(word) for word in words
    )


def _value(number: re.Match[str]) -> Fraction | None:
    if len(number.group()) > MAX_DIGITS:
        return None
    group = number.groupdict()
    if group["mixed"]:
        whole, part, of = (int(group[name]) for name in ("mixed", "part", "of"))
        if part >= of:
            return None  # 2 3/2 is not a mixed number
        value = whole + Fraction(part, of)
    else:
        value = Fraction(group["decimal"].replace(",", ""))
        ten = group["exponent"] or group["ten"] or group["ten_bare"]
        power = group["power"] or group["power_bare"]
        divisor = Fraction((group["divisor"] or "1").replace(",", ""))
        exponent = int((power or "1").replace(" ", ""))
        if divisor == 0 or (value == 0 and exponent <= 0):
            return None
        value = value**exponent * Fraction(10) ** int((ten or "0").replace(" ", "")) / divisor
    sign = -1 if (group["sign"] or "+").strip().lower() in ("-", "minus", "negative") else 1
    return sign * value * SCALES.get((group["scale"] or "").lower(), 1)


# ------------------------------------------------------------------------------------------ replies


def _segments(text: str) -> Iterator[tuple[str, str]]:
    """Yield a pair for each answer marker, from the last marker to the first: the kind of marker,
    and the text after the marker. A text without a digit is skipped. The texts do not overlap."""
    markers = list(MARKER.finditer(text))
    following: re.Match[str] | None = None
    for marker in reversed(markers[-MAX_MARKERS:]):
        segment = text[marker.end() : following.start() if following else len(text)].lstrip()
        if len(segment) > MAX_SEGMENT:  # the cut must not split a number
            segment = segment[:MAX_SEGMENT].rpartition(" ")[0]
        segment = _cut_own_text(
            str(marker.lastgroup),
            segment,
            closed=following is not None and following.lastgroup == "end",
        )
        if HAS_NUMBER.search(segment):
            yield str(marker.lastgroup), segment
        following = marker


def _cut_own_text(kind: str, text: str, *, closed: bool) -> str:
    """Return the beginning of `text` that belongs to an answer marker. `text` is the text after the
    marker, and `kind` is the kind of marker. After `####`, this is the rest of the line. In
    a box or a tag, it is the text up to the end of the box or the tag. After words like "the answer
    is", it is the rest of the sentence."""
    if kind == "hashes":
        return text.partition("\n")[0]
    if kind == "box":
        return _read_braces(text) or ""
    if kind == "tag":
        return text if closed else ""
    if kind == "end":
        return ""
    lead = len(text) - len(text.lstrip(" \n\t:*$\\[("))  # LaTeX may begin on the next line
    return text[:lead].replace("\n", " ") + END_OF_SENTENCE.split(text[lead:], maxsplit=1)[0]


def _read_braces(text: str) -> str | None:
    """Return the text before the closing brace; None if the brace is never closed."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return None


def _is_followed_by_number(kind: str, plain: str) -> bool:
    digit = HAS_NUMBER.search(plain)
    if digit is None:  # the digit was part of something else, such as a calculation of GSM8K
        return False
    lead = plain[: digit.start()]
    if kind == "hashes" and NUMBERED_HEADING.match(plain):
        return False
    return kind not in ("hashes", "colon") or "=" in lead or not WORDS.search(lead)


def _read_delimited(plain: str) -> Fraction | None:
    """Return the number inside a box or a tag. In an equation, this is the number after the last
    "=". If the text also has words, it must contain exactly one number."""
    left, equals, right = plain.rpartition("=")
    if equals and not CLAUSE.search(left):
        return _parse_whole(right)
    alone = sum(bool(HAS_NUMBER.search(found.group())) for found in EXPRESSION.finditer(plain)) == 1
    return _find_first(plain) if alone and WORDS.search(plain) else None


def _find_first(plain: str) -> Fraction | None:
    """Return the first expression of a simplified text as a number. In an equation, the number is
    the side after the last "=". The result is None if words after the number change it: "5 and a
    half" is not 5."""
    expression = next(
        (found for found in EXPRESSION.finditer(plain) if HAS_NUMBER.search(found.group())), None
    )
    if expression is None or GOES_ON.match(plain, expression.end()):
        return None
    sides = [side for side in expression.group().split("=") if HAS_NUMBER.search(side)]
    clauses = [
        clause for clause in CLAUSE.split(sides[-1] if sides else "") if HAS_NUMBER.search(clause)
    ]
    if not clauses:
        return None
    text = BEFORE_NUMBER.sub("", clauses[0], count=1).rstrip(" \t\n.,:;!?*+/<>|=([{-\\")
    for opening, closing in ("()", "{}", "[]"):
        while text.endswith(closing) and text.count(opening) < text.count(closing):
            text = text[:-1].rstrip(" .,:;!?*")
        while text.startswith(opening) and text.count(opening) > text.count(closing):
            text = text[1:].lstrip()
    return _parse_whole(text)


def _find_last(text: str) -> Fraction | None:
    """Return the last number of a text without a marker."""
    end = max((found.end() for found in HAS_NUMBER.finditer(text)), default=0)
    if not end:
        return None
    before = text[max(0, end - MAX_SEGMENT) : end]
    start = max((found.end() for found in END_OF_SENTENCE.finditer(before)), default=0)
    after = END_OF_SENTENCE.split(text[end : end + MAX_SEGMENT], maxsplit=1)[0]
    plain = NOT_NUMBERS.sub(" ", _simplify_text(before[start:] + after))
    _, equals, right = plain.rpartition("=")
    if equals and HAS_NUMBER.search(right):
        return _find_first(right)
    last = None
    for last in IN_TEXT.finditer(plain):  # noqa: B007
        pass
    if last is None or HAS_NUMBER.search(plain, last.end()) or not _is_unit(last["glued"]):
        return None  # the last number is part of something else, for example 10:30 or 3\sqrt{2}
    return _value(last)
