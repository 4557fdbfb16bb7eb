"""Evaluates what a test does with returned values, outside the program: comparisons, `all`, `zip`, `isclose`, `sorted` and the like.

Only literal values come in (see `values`), so nothing here runs code of the program. The cost is bounded by `Work`.
"""

from __future__ import annotations

import ast
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rlkit.sandbox.values import Opaque, same

STEPS = 1_000_000  # of one verdict; a hostile value cannot hold up the trainer
LONGEST = 1_000_000  # items of a range or a repeated sequence, and bits of a power
NUMBERS = (int, float, complex, bool)
SEQUENCES = (str, bytes, list, tuple)
CONSTANTS = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")}
TYPES = {kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, set, frozenset, dict)}


class Work:
    """Counts the steps of a verdict. Raises: OverflowError when there are too many."""

    def __init__(self, left: int = STEPS) -> None:
        self.left = left

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise OverflowError("the verdict takes too many steps")


def truth(value: Any) -> bool:
    """Whether a value counts as true. Raises: TypeError for a value of no literal type, whose truth only the program knows."""
    if isinstance(value, Opaque):
        raise TypeError(f"the truth of a {value.type} is not known outside the program")
    return bool(value)


def isclose(a: Any, b: Any, *, rel_tol: float = 1e-9, abs_tol: float = 0.0) -> bool:
    """|a - b| ≤ max(rel_tol · max(|a|, |b|), abs_tol) of two real numbers, as `math.isclose`. bool is no number here."""
    return math.isclose(_real(a), _real(b), rel_tol=rel_tol, abs_tol=abs_tol)


def allclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8) -> bool:
    """|a - b| ≤ atol + rtol · |b| for all numbers of two equally nested lists, as `numpy.allclose` but without broadcasting."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(allclose(x, y, rtol, atol) for x, y in zip(a, b, strict=True))
    a, b = _real(a), _real(b)
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
    # Unequal lengths fail, and do not end the comparison early: else an empty list would pass all(a == b for a, b in zip(f(), [1])).
    "zip": lambda *lists, strict=True: list(zip(*lists, strict=True)),
    "enumerate": lambda items, start=0: list(enumerate(items, start)),
    "reversed": lambda items: list(items)[::-1],
    "map": lambda function, *lists: list(map(function, *lists)),
    "filter": lambda function, items: [item for item in items if truth(function(item))],
    "range": _range,
    "Counter": lambda items=(): dict(Counter(items)),
    "collections.Counter": lambda items=(): dict(Counter(items)),
    "bool": truth,
    "isinstance": isinstance,  # see `_call`: of `TYPES`
    "round": _round,
    "isclose": isclose,
    "math.isclose": isclose,
    **dict.fromkeys(("allclose", "np.allclose", "numpy.allclose", "np.isclose", "numpy.isclose"), allclose),
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc", "sqrt", "fabs", "isnan", "isinf", "isfinite")},
    **{f.__name__: f for f in (len, sorted, set, frozenset, list, tuple, dict, sum, min, max, abs, int, float, complex, str)},
}
KEYWORDS = {
    **{name: {"rel_tol", "abs_tol"} if f is isclose else {"rtol", "atol"} for name, f in FUNCTIONS.items() if "close" in name},
    "sorted": {"key", "reverse"}, "min": {"key", "default"}, "max": {"key", "default"}, "sum": {"start"}, "round": {"ndigits"},
    "enumerate": {"start"}, "zip": {"strict"},
}  # fmt: skip
APPLY = ("map", "filter")  # their first argument is a function
# These take the items of one argument, whatever it is: of a program's value the child sends the list of its items.
ITERATE = {
    "all", "any", "zip", "enumerate", "reversed", "map", "filter", "Counter", "collections.Counter", "len", "sorted", "set", "frozenset",
    "list", "tuple", "sum",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: lambda value: not truth(value), ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def evaluate(node: ast.expr, names: Mapping[str, Any], work: Work) -> Any:
    """The value of an expression of literals, `names`, operators and `FUNCTIONS`.

    Raises: whatever Python would, TypeError and KeyError for anything else in the expression, OverflowError where it takes too long.
    """
    work.spend()

    def of(part: ast.expr) -> Any:
        return evaluate(part, names, work)

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
            return (all if isinstance(node.op, ast.And) else any)(truth(of(part)) for part in node.values)
        case ast.Compare():
            sides = [of(part) for part in (node.left, *node.comparators)]
            return all(_compare(type(op), a, b, work) for op, a, b in zip(node.ops, sides[:-1], sides[1:], strict=True))
        case ast.Subscript():
            return of(node.value)[of(node.slice)]
        case ast.Slice():
            return slice(*(None if bound is None else of(bound) for bound in (node.lower, node.upper, node.step)))
        case ast.GeneratorExp() | ast.ListComp():
            return list(_each(node.elt, node.generators, names, work))
        case ast.SetComp():
            return set(_each(node.elt, node.generators, names, work))
        case ast.Call():
            return _call(node, names, work)
    raise TypeError(f"{ast.unparse(node):.60} cannot be evaluated outside the program")


def _arithmetic(kind: type[ast.operator], a: Any, b: Any) -> Any:
    if type(a) in NUMBERS and type(b) in NUMBERS:
        if kind is ast.Pow and isinstance(a, int) and isinstance(b, int) and a.bit_length() * abs(b) > LONGEST:
            raise OverflowError("the power is too large")
        return ARITHMETIC[kind](a, b)
    joined = kind is ast.Add and type(a) is type(b) and type(a) in SEQUENCES
    repeated = kind is ast.Mult and type(a) in SEQUENCES and type(b) is int and len(a) * b <= LONGEST
    sets = kind in (ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor) and isinstance(a, set | frozenset) and isinstance(b, set | frozenset)
    if not (joined or repeated or sets):
        raise TypeError(f"no {kind.__name__} of {type(a).__name__} and {type(b).__name__}")
    return ARITHMETIC[kind](a, b)


def _compare(kind: type[ast.cmpop], a: Any, b: Any, work: Work) -> bool:
    if kind in (ast.Eq, ast.Is):
        return same(a, b)
    if kind is ast.In:
        if isinstance(b, str):
            return isinstance(a, str) and a in b
        work.spend(len(b))
        return any(same(a, item) for item in b)
    return bool(ORDER[kind](a, b))


def _each(element: ast.expr, generators: list[ast.comprehension], names: Mapping[str, Any], work: Work) -> Iterable[Any]:
    if not generators:
        yield evaluate(element, names, work)
        return
    first, *rest = generators
    for item in evaluate(first.iter, names, work):
        inner = {**names, **bound(first.target, item)}
        if all(truth(evaluate(test, inner, work)) for test in first.ifs):
            yield from _each(element, rest, inner, work)


def bound(target: ast.expr, item: Any) -> dict[str, Any]:
    """The names that an item of a loop is bound to. Raises: ValueError, TypeError where it does not fit them."""
    if isinstance(target, ast.Name):
        return {target.id: item}
    assert isinstance(target, ast.Tuple | ast.List)
    parts = [bound(t, part) for t, part in zip(target.elts, item, strict=True)]
    return {name: value for part in parts for name, value in part.items()}


def _call(node: ast.Call, names: Mapping[str, Any], work: Work) -> Any:
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant):  # ", ".join
        return str(node.func.value.value).join(evaluate(node.args[0], names, work))
    name = ast.unparse(node.func)
    if name == "isinstance":
        return isinstance(evaluate(node.args[0], names, work), TYPES[ast.unparse(node.args[1])])
    keywords = {str(k.arg): (_key if k.arg == "key" else evaluate)(k.value, names, work) for k in node.keywords}
    arguments = [evaluate(part, names, work) for part in node.args[name in APPLY :]]
    work.spend(sum(len(a) for a in arguments if hasattr(a, "__len__")))
    if name in APPLY:
        arguments.insert(0, _key(node.args[0], names, work))
    return FUNCTIONS[name](*arguments, **keywords)


def _key(node: ast.expr, names: Mapping[str, Any], work: Work) -> Callable[[Any], Any]:
    if isinstance(node, ast.Lambda):
        (argument,) = node.args.args
        return lambda item: evaluate(node.body, {**names, argument.arg: item}, work)
    return FUNCTIONS[ast.unparse(node)]
