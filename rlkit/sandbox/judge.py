"""Evaluate a test's operations on returned values, outside the program: comparisons, `all`,
`isclose`, `sorted` and the like.

Only literal values come in (see `values`), so nothing here runs code of the program. There are no
loops, and operations that could make a large value from a small one are bounded. So the cost
depends only on the lengths of the test and of the values.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from rlkit.sandbox.values import Opaque, are_equal

LONGEST = 1_000_000  # items of a range or a repeated sequence, and bits of a power
NUMBERS = (int, float, complex, bool)
SEQUENCES = (str, bytes, list, tuple)
CONSTANTS = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
TYPES = {
    kind.__name__: kind
    for kind in (int, float, complex, bool, str, bytes, list, tuple, set, frozenset, dict)
}


def truth(value: Any) -> bool:
    """Return whether a value counts as true. Raises: TypeError for a value that has no literal
    type, because only the program knows its truth."""
    if isinstance(value, Opaque):
        raise TypeError(f"the truth of a {value.type} is not known outside the program")
    return bool(value)


def isclose(a: Any, b: Any, *, rel_tol: float = 1e-9, abs_tol: float = 0.0) -> bool:
    """Return whether |a - b| ≤ max(rel_tol · max(|a|, |b|), abs_tol) for two real numbers, as
    `math.isclose` does. A bool does not count as a number."""
    return math.isclose(_real(a), _real(b), rel_tol=rel_tol, abs_tol=abs_tol)


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """Return whether |a - b| ≤ atol + rtol · |b| for all numbers of two equally nested lists. This
    is `numpy.allclose` without broadcasting."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(
            allclose(x, y, rtol, atol) for x, y in zip(a, b, strict=True)
        )
    a = _real(a)
    b = _real(b)
    return a == b or (math.isfinite(b) and abs(a - b) <= atol + rtol * abs(b))


def _real(value: Any) -> Any:
    if type(value) not in (int, float):
        raise TypeError(f"{type(value).__name__} is no real number")
    return value


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > LONGEST:
        raise OverflowError("the range is too long")
    return numbers


def _round(number: Any, ndigits: int | None = None) -> Any:
    if ndigits is not None and abs(ndigits) > 1000:
        raise OverflowError("too many digits")
    return round(number, ndigits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all": lambda items: all(map(truth, items)),
    "any": lambda items: any(map(truth, items)),
    "range": _range,
    "bool": truth,
    "isinstance": isinstance,  # with a type of `TYPES`, see `evaluate`
    "round": _round,
    "isclose": isclose,
    "math.isclose": isclose,
    **dict.fromkeys(
        ("allclose", "np.allclose", "numpy.allclose", "np.isclose", "numpy.isclose"), allclose
    ),
    **{
        f"math.{name}": getattr(math, name)
        for name in ("floor", "ceil", "trunc", "sqrt", "fabs", "isnan", "isinf", "isfinite")
    },
    **{
        f.__name__: f
        for f in (
            len,
            sorted,
            set,
            frozenset,
            list,
            tuple,
            dict,
            sum,
            min,
            max,
            abs,
            int,
            float,
            complex,
            str,
        )
    },
}
KEYWORDS = {
    **{
        name: {"rel_tol", "abs_tol"} if f is isclose else {"rtol", "atol"}
        for name, f in FUNCTIONS.items()
        if "close" in name
    },
    "sorted": {"reverse"},
    "min": {"default"},
    "max": {"default"},
    "sum": {"start"},
    "round": {"ndigits"},
}
# Functions of one iterable. The child sends the items of a program's iterable as a list.
ITERATE = {"all", "any", "len", "sorted", "set", "frozenset", "list", "tuple", "sum"}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: lambda value: not truth(value),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """Evaluate an expression of literals, `names`, operators and `FUNCTIONS`.

    Raises: the same errors as Python, TypeError and KeyError for anything else, OverflowError if a
    value becomes too large.
    """

    def of(part: ast.expr) -> Any:
        return evaluate(part, names)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.Attribute():
            return CONSTANTS[ast.unparse(node)]
        case ast.List() | ast.Tuple() | ast.Set():
            return {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)](map(of, node.elts))
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {of(k): of(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.UnaryOp():
            return UNARY[type(node.op)](of(node.operand))
        case ast.BinOp():
            return _arithmetic(type(node.op), of(node.left), of(node.right))
        case ast.BoolOp():
            return (all if isinstance(node.op, ast.And) else any)(
                truth(of(part)) for part in node.values
            )
        case ast.Compare():
            sides = [of(part) for part in (node.left, *node.comparators)]
            return all(
                _compare(type(op), a, b)
                for op, a, b in zip(node.ops, sides[:-1], sides[1:], strict=True)
            )
        case ast.Call(func=ast.Name(id="isinstance")):
            return isinstance(of(node.args[0]), TYPES[ast.unparse(node.args[1])])
        case ast.Call():
            return FUNCTIONS[ast.unparse(node.func)](
                *map(of, node.args), **{str(k.arg): of(k.value) for k in node.keywords}
            )
    raise TypeError(f"{ast.unparse(node):.60} cannot be evaluated outside the program")


def _arithmetic(kind: type[ast.operator], a: Any, b: Any) -> Any:
    if type(a) in NUMBERS and type(b) in NUMBERS:
        if (
            kind is ast.Pow
            and isinstance(a, int)
            and isinstance(b, int)
            and a.bit_length() * abs(b) > LONGEST
        ):
            raise OverflowError("the power is too large")
        return ARITHMETIC[kind](a, b)
    joined = kind is ast.Add and type(a) is type(b) and type(a) in SEQUENCES
    repeated = (
        kind is ast.Mult and type(a) in SEQUENCES and type(b) is int and len(a) * b <= LONGEST
    )
    if not (joined or repeated):
        raise TypeError(f"no {kind.__name__} of {type(a).__name__} and {type(b).__name__}")
    return ARITHMETIC[kind](a, b)


def _compare(kind: type[ast.cmpop], a: Any, b: Any) -> bool:
    if kind in (ast.Eq, ast.Is):
        return are_equal(a, b)
    if kind is ast.In:
        if isinstance(b, str):
            return isinstance(a, str) and a in b
        return any(are_equal(a, item) for item in b)
    return bool(ORDER[kind](a, b))
