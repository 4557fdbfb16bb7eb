"""Evaluate arithmetic as a tool. The calculator walks over Python's syntax tree, and its limits
bound its cost.

The calculator is safe on hostile text without a child process, a signal or a thread. An expression
has at most 200 characters and 100 nodes. Numbers have at most 4,096 bits, and the magnitude of an
exponent is at most 1,000. Names, attributes, strings and lists are refused, and so is every call of
a function outside `FUNCTIONS`.

Arithmetic is exact (`fractions.Fraction`): 0.1 + 0.2 is 0.3. Only irrational roots and powers are
computed with floats. Numbers are read as people write them: thousands commas (3,000), currency
signs, typeset signs (SYMBOLS), ^ for a power, and n% for n / 100. Before a number, a parenthesis or
a function, `%` is Python's remainder (7 % 3). Everywhere else it is a percent sign (5% * 200, 7% -
3).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, localcontext
from fractions import Fraction
from math import isqrt, sqrt
from typing import Any

MAX_CHARACTERS = 200
MAX_NODES = 100
MAX_BITS = 4096
MAX_EXPONENT = 1000
SIGNIFICANT_DIGITS = 10  # digits of a printed result, unless it is a whole number

SYMBOLS = str.maketrans(
    dict.fromkeys("\u00d7\u22c5\u00b7", "*")
    | dict.fromkeys("\u2212\u2013", "-")
    | dict.fromkeys("$€£", "")
    | {"\u00f7": "/", "^": "**"}
)
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def calculator(expression: str) -> str:
    """Evaluates arithmetic.

    Args:
        expression: The expression.
    """
    # The policy reads the docstring above, so it is short. Every ValueError holds a sentence for
    # the policy.
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed"
        )
    source = _normalise(expression)
    _check_words(source)
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(
            f"cannot read {expression!r} as arithmetic; write for example (12 + 3) * 4"
        ) from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise ValueError("the expression has too many parts; compute it in smaller steps")
    try:
        return _text(_evaluate(tree.body, source))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the numbers are too large for a root or a fractional power") from None


calculator.bounded = True  # type: ignore[attr-defined]  # the limits above bound its work


def _normalise(expression: str) -> str:
    """Rewrite the expression in Python's spelling: replace symbols, drop thousands commas, and
    write n% as n / 100."""
    source = expression.translate(SYMBOLS).strip()
    # in a function call, 1,200 may be one number or two arguments
    if re.search(r"[A-Za-z_]\s*\(", source) and THOUSANDS.search(source):
        raise ValueError(
            "the comma is ambiguous beside a function; put a space after a comma between arguments,"
            " and none in numbers: 1200"
        )
    source = THOUSANDS.sub(lambda number: number[0].replace(",", ""), source)
    return re.sub(rf"({NUMBER})\s*%(?=\s*(?:$|[-+*/),]))", r"(\1/100)", source)


def _check_words(source: str) -> None:
    """Raise ValueError if the text has a character or a name from outside arithmetic. Call this
    before Python's parser reads the text."""
    strange = re.search(r"[^\w\s.,+\-*/%()]", source, re.ASCII)
    if strange:
        raise ValueError(f"the character {strange.group()!r} is not part of arithmetic")
    for word in re.findall(r"[A-Za-z_]\w*", re.sub(NUMBER, " ", source)):
        if word not in FUNCTIONS:
            raise ValueError(f"unknown name {word!r}; the functions are {', '.join(FUNCTIONS)}")


def _evaluate(node: ast.AST, source: str) -> Fraction:
    """Compute the exact value of a node. Every intermediate value has at most MAX_BITS bits."""
    match node:
        case ast.Constant():
            return _parse_literal(ast.get_source_segment(source, node) or "")
        case ast.UnaryOp(op=op, operand=operand) if type(op) in UNARY:
            return UNARY[type(op)](_evaluate(operand, source))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _bound_value(BINARY[type(op)](_evaluate(left, source), _evaluate(right, source)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            values = [_evaluate(argument, source) for argument in args]
            try:
                return _bound_value(FUNCTIONS[name](*values))
            except TypeError:
                raise ValueError(f"{name} does not take {len(values)} argument(s)") from None
    raise ValueError(
        "only numbers, + - * / // % **, parentheses and " + ", ".join(FUNCTIONS) + " are allowed"
    )


def _parse_literal(text: str) -> Fraction:
    """Return the exact value of a number as written: 0.1 is one tenth, not the nearest float."""
    number = Decimal(text)
    if abs(number.adjusted()) > MAX_EXPONENT:
        raise ValueError(f"the number {text} is too large or too small")
    return _bound_value(Fraction(number))


def _bound_value(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError(f"the result is too large: more than {MAX_BITS} bits")
    return value


def _raise_to_power(base: Fraction, exponent: Fraction) -> Fraction:
    """Compute base ** exponent. The size of the result is checked before the computation."""
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"the exponent is too large; at most {MAX_EXPONENT} is allowed")
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("a negative number has no real fractional power")
        return Fraction(float(base) ** float(exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MAX_BITS:
        raise ValueError(f"the result is too large: more than {MAX_BITS} bits")
    return Fraction(base ** int(exponent))


def _extract_square_root(value: Fraction) -> Fraction:
    if value < 0:
        raise ValueError("a negative number has no real square root")
    exact = Fraction(isqrt(value.numerator), isqrt(value.denominator))
    return exact if exact * exact == value else Fraction(sqrt(value))


def _round(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    """Round a number, with halves to the even digit, as Python's `round` does."""
    if digits.denominator != 1 or abs(digits) > 100:
        raise ValueError("round takes a whole number of digits, at most 100")
    return Fraction(round(value, int(digits)))


def _text(value: Fraction) -> str:
    """Write a whole number in full, and any other number as a decimal of SIGNIFICANT_DIGITS digits,
    with at least four digits after the point."""
    with localcontext() as context:
        context.prec = max(SIGNIFICANT_DIGITS, len(str(abs(int(value)))) + 4)
        decimal = (Decimal(value.numerator) / Decimal(value.denominator)).normalize()
    return format(decimal, "f") if decimal.adjusted() >= -7 else str(decimal)


UNARY: Mapping[type, Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
BINARY: Mapping[type, Callable[[Fraction, Fraction], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _raise_to_power,
}
FUNCTIONS: Mapping[str, Callable[..., Fraction]] = {
    "sqrt": _extract_square_root,
    "abs": abs,
    "round": _round,
    "min": lambda *values: min(values),
    "max": lambda *values: max(values),
}
