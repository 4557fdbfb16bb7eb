"""Tests of the form `assert CALL == LITERAL`, split: the call goes to the child, what is expected stays in the parent."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from rlkit.sandbox.process import Result
from rlkit.sandbox.values import Opaque, same

MAKERS: dict[str, Callable[..., Any]] = {
    "set": set,
    "frozenset": frozenset,
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "sorted": sorted,
    "float": float,
    "complex": complex,
}
CLOSE = {"rel_tol": 1e-9, "abs_tol": 0.0}  # math.isclose's own


class Unsplittable(ValueError):
    """A test whose expectation cannot be told apart from the call. The message says why."""


class Check(NamedTuple):
    """One test: the expression for the child, and what its value has to be."""

    call: str
    expected: Any
    tolerance: tuple[float, float] | None = None  # relative, absolute: as math.isclose
    truth: bool = False  # only whether the value is true counts


def split(test: str) -> Check:
    """The call and the expectation of an assert.

    Understood are `CALL == LITERAL` (also turned round; also `is True / False / None`), `math.isclose(CALL, LITERAL, …)`, `CALL` and `not
    CALL`. CALL is any expression with a call, so set(f(x)), sorted(f(x)), len(f(x)) and round(f(x), 2) are; LITERAL may use
    set(…), tuple(…), sorted(…), float('inf') and the like around literals.
    Raises: Unsplittable.
    >>> split("assert add(1, 2) == 3")
    Check(call='add(1, 2)', expected=3, tolerance=None, truth=False)
    """
    try:
        body = ast.parse(test.strip()).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Unsplittable(f"not Python: {error}") from None
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise Unsplittable("not one assert")
    node = body[0].test
    if isinstance(node, ast.Compare):
        return _comparison(node)
    if _is_isclose(node):
        return _close(node)
    negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    call = node.operand if isinstance(node, ast.UnaryOp) and negated else node
    if not isinstance(call, ast.Call):
        raise Unsplittable("neither a comparison nor a call")
    return Check(ast.unparse(call), not negated, truth=True)


def _comparison(node: ast.Compare) -> Check:
    if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq | ast.Is):
        raise Unsplittable("only == and `is` say what a value has to be")
    left, right = node.left, node.comparators[0]
    for call, literal in ((left, right), (right, left)):
        if any(isinstance(part, ast.Call) for part in ast.walk(call)):
            try:
                return Check(ast.unparse(call), literal_value(literal))
            except Unsplittable:
                continue
    raise Unsplittable("no side is a call with a literal on the other")


def _is_isclose(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("math.isclose", "isclose")


def _close(node: ast.expr) -> Check:
    assert isinstance(node, ast.Call)
    if len(node.args) != 2 or any(k.arg not in CLOSE for k in node.keywords):
        raise Unsplittable("isclose takes two values, rel_tol and abs_tol")
    numbers = CLOSE | {str(k.arg): literal_value(k.value) for k in node.keywords}
    expected = literal_value(node.args[1])
    if not all(isinstance(n, int | float) for n in (expected, *numbers.values())):
        raise Unsplittable("isclose compares numbers")
    return Check(ast.unparse(node.args[0]), expected, tolerance=(numbers["rel_tol"], numbers["abs_tol"]))


def literal_value(node: ast.expr) -> Any:
    """The value of a literal, or of a maker (`MAKERS`) of literals. Raises: Unsplittable."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS and not node.keywords:
        arguments = [literal_value(a) for a in node.args]
        try:
            return MAKERS[node.func.id](*arguments)
        except (TypeError, ValueError) as error:
            raise Unsplittable(f"no literal: {error}") from None
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Unsplittable(f"no literal: {ast.unparse(node):.60}") from None


def passes(check: Check, result: Result) -> bool:
    """The verdict on one test, by the parent alone."""
    if result.error:
        return False
    value = result.value
    if check.truth:
        return not isinstance(value, Opaque) and bool(value) is check.expected
    if check.tolerance:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isclose(value, check.expected, rel_tol=check.tolerance[0], abs_tol=check.tolerance[1])
    return same(value, check.expected)
