"""Split tests: the child runs a test's calls of the program, and the parent judges the returned
values."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
from typing import Any, NamedTuple

from rlkit.sandbox.judge import (
    ARITHMETIC,
    CONSTANTS,
    FUNCTIONS,
    ITERATE,
    KEYWORDS,
    TYPES,
    evaluate,
    truth,
)
from rlkit.sandbox.process import Result

# applied by the child: only the program can read its own objects, as in str(Fraction(1, 2))
READ = ("str", "repr", "int", "float", "bytes")
PREDICATES = ("all", "any", "isinstance", "issubclass", "hasattr")
COLLECTIONS = (list, tuple, set, frozenset, dict)
# refused, because their text may contain an expectation
EVALUATE = ("eval", "exec", "compile", "globals", "locals", "vars")
BUILTINS = frozenset(dir(builtins)) - set(EVALUATE)


class Unsplittable(ValueError):
    """Raised for a test whose expectation cannot be separated from the calls. The message says
    why."""


class Check(NamedTuple):
    """One split test: the expressions for the child, and the verdict as an expression of the
    expressions' values `value_0`, `value_1`, …"""

    calls: tuple[str, ...]
    verdict: str


class _Split(NamedTuple):
    """State while a test is split."""

    calls: list[str]  # calls of the program found so far
    functions: frozenset[str]  # functions evaluated outside the program
    given: frozenset[str]  # names from the setup
    defined: frozenset[str]  # names of functions and classes from the setup
    judges: frozenset[str]  # those of them whose value could be the verdict


def split(test: str, setup: str = "") -> Check:
    """Split an assert into the program's calls and a verdict on their values.

    A call of the program must be on one side of a comparison (==, is, in, <, <=, >, >=). It may be
    inside a function of `judge.FUNCTIONS`, for example sorted, len, isclose and allclose.
    Comparisons may be combined by `and`, `or` and arithmetic. If the truth of a call is the
    verdict, as in `assert f(1)`, the call may take plain values only. Comprehensions and lambdas
    are refused; `allclose` compares lists of numbers.

    Args:
      setup: code run in the program's process before the tests. Its functions may make arguments,
        and turn a value of the program into a collection, as in `to_list(f(1)) == [1, 2]`. They may
        not return the verdict: `check(f(1))` and `check(f(1)) == 1` are refused.
    Raises: Unsplittable if the expectation would be computed in the program's process, if both
      sides of a comparison come from the program, or if the test only excludes a value (!=,
      `is not`, `not in`).
    >>> split("assert add(1, 2) == 3")
    Check(calls=('add(1, 2)',), verdict='value_0 == 3')
    >>> split("assert sorted(f(3)) == [1, 2]").calls
    ('[*f(3)]',)
    """
    if not isinstance(test, str):
        raise Unsplittable("no text")
    try:
        body = ast.parse(test.strip()).body
        if len(body) != 1 or not isinstance(body[0], ast.Assert):
            raise Unsplittable("not one assert")
        node = body[0].test
        given, defined = _names(setup)
        s = _Split([], frozenset(FUNCTIONS), given, defined, judges=defined)
        if not _from_program(node, s):  # for example the program's own `sum`
            s = s._replace(
                functions=s.functions
                - {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            )
        verdict = _replace_calls(node, s, True)
        if s.calls:
            return Check(tuple(s.calls), ast.unparse(ast.fix_missing_locations(verdict)))
    except Unsplittable:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Unsplittable(f"not Python: {error}") from None
    raise Unsplittable("it calls nothing of the program")


def passes(check: Check, *results: Result) -> bool:
    """Judge one test in the parent process. The test fails if a call returned no value, or if the
    verdict raises anything."""
    if len(results) != len(check.calls) or any(result.error for result in results):
        return False
    values = {f"value_{i}": result.value for i, result in enumerate(results)}
    try:
        return truth(evaluate(_parse_verdict(check.verdict), values))
    except Exception:
        # the assert itself would raise too: isclose(10**400, 1.0), sorted([1, "a"]), min([]), …
        return False


@functools.lru_cache(4096)
def _parse_verdict(verdict: str) -> ast.expr:
    return ast.parse(verdict, mode="eval").body


@functools.lru_cache(4096)
def _names(setup: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that the setup code binds to values and classes, and those that it binds to
    functions and classes."""
    given = set()
    defined = set()
    for node in ast.parse(setup).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ClassDef):
            given.add(node.name)
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            given |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            given |= {
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            }
    return frozenset(given), frozenset(defined)


# ------------------------------------------------------------------------------------------ outside


def _replace_calls(node: ast.expr, s: _Split, asked: bool) -> ast.expr:
    """Replace the program's calls in an expression by the names of their values.

    `asked` is True if the expression's truth is the verdict, so that a call in it must not contain
    the expectation.
    """
    if _is_program(node, s):
        return _call(node, s, asked)

    def inner(part: ast.expr) -> ast.expr:
        return _replace_calls(part, s, asked)

    match node:
        case ast.Constant():
            return node
        case ast.Attribute() if ast.unparse(node) in CONSTANTS:
            return node
        case ast.List() | ast.Tuple():
            return type(node)([inner(part) for part in node.elts], ast.Load())
        case ast.Set():
            return ast.Set([inner(part) for part in node.elts])
        case ast.Dict(keys=keys) if None not in keys:
            return ast.Dict(
                [inner(key) for key in keys if key], [inner(value) for value in node.values]
            )
        case ast.UnaryOp(op=ast.Not()):
            if not _is_program(node.operand, s):
                raise Unsplittable(
                    "`not` says what a value must not be; it may stand before a call of the program"
                    " only"
                )
            return ast.UnaryOp(node.op, _replace_calls(node.operand, s, True))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return ast.UnaryOp(node.op, inner(node.operand))
        # "%d" % x is formatting, not arithmetic
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node.left):
            return ast.BinOp(inner(node.left), node.op, inner(node.right))
        case ast.BoolOp():
            return ast.BoolOp(node.op, [_replace_calls(part, s, True) for part in node.values])
        case ast.Compare():
            return _comparison(node, s)
        case ast.Call():
            return _function(node, s, asked)
    raise Unsplittable(f"no literal: {ast.unparse(node):.60}")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _comparison(node: ast.Compare, s: _Split) -> ast.expr:
    if not all(
        isinstance(op, ast.Eq | ast.Is | ast.In | ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        for op in node.ops
    ):
        raise Unsplittable("!=, `is not` and `not in` say only what a value must not be; write ==")
    sides = [node.left, *node.comparators]
    programs = [_from_program(side, s) for side in sides]
    if any(a and b for a, b in itertools.pairwise(programs)):
        raise Unsplittable("both sides come from the program; write a literal on one of them")
    literals = [
        _literal(side, s) for side, program in zip(sides, programs, strict=True) if not program
    ]
    asked = any(map(_has_truth, literals))
    if not asked and all(isinstance(value, COLLECTIONS) for value in literals):
        s = s._replace(judges=frozenset())
    left, *others = (_replace_calls(side, s, asked) for side in sides)
    return ast.Compare(left, node.ops, others)


def _has_truth(value: Any) -> bool:
    """Return whether a value is a bool, or a collection with one."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, COLLECTIONS):
        return any(map(_has_truth, value))
    return isinstance(value, bool)


def _literal(node: ast.expr, s: _Split) -> Any:
    """Evaluate an expression without calls of the program. Raises: Unsplittable if it has no
    value."""
    try:
        return evaluate(_replace_calls(node, s, False), {})
    except Unsplittable:
        raise
    except Exception as error:
        raise Unsplittable(f"no literal: {ast.unparse(node):.60} ({error})") from None


def _function(node: ast.Call, s: _Split, asked: bool) -> ast.expr:
    """Split a call of one of `judge.FUNCTIONS`."""
    name = ast.unparse(node.func)
    if name not in s.functions:
        raise Unsplittable(f"{name:.60} cannot be evaluated outside the program")
    for part in (*node.args, *node.keywords):
        if isinstance(part, ast.Starred) or (
            isinstance(part, ast.keyword) and part.arg not in KEYWORDS.get(name, ())
        ):
            raise Unsplittable(
                f"{name} with {ast.unparse(part):.40} cannot be evaluated outside the program"
            )
    if "close" in name and (
        len(node.args) != 2 or all(_from_program(part, s) for part in node.args)
    ):
        raise Unsplittable(
            f"{name} takes the program's value and a literal, and tolerances by name"
        )
    if name == "isinstance":
        if len(node.args) != 2 or ast.unparse(node.args[1]) not in TYPES:
            raise Unsplittable(f"isinstance takes a value and one of {', '.join(TYPES)}")
        return ast.Call(node.func, [_replace_calls(node.args[0], s, False), node.args[1]], [])
    asked = asked or name in ("all", "any", "bool")
    # The child sends the value's items as a list, so the value may be a generator or a dict view.
    form = "[*{}]" if name in ITERATE or (name in ("min", "max") and len(node.args) == 1) else "{}"
    arguments = [
        _call(part, s, asked, form) if _is_program(part, s) else _replace_calls(part, s, asked)
        for part in node.args
    ]
    return ast.Call(
        node.func,
        arguments,
        [ast.keyword(k.arg, _replace_calls(k.value, s, False)) for k in node.keywords],
    )


# ------------------------------------------------------------------------------ the program's calls


def _is_program(node: ast.expr, s: _Split) -> bool:
    """Return whether an expression is a call of the program, or an item, attribute or method of its
    value. A `READ` function of such an expression counts too."""
    called = False
    while True:
        match node:
            case ast.Call(func=ast.Name(id=name)) if (
                name in READ and len(node.args) == 1 and not node.keywords
            ):
                return _is_program(node.args[0], s)
            case ast.Call() if ast.unparse(node.func) in s.functions:
                return False
            case ast.Call():
                called = True
                node = node.func
            case ast.Attribute() | ast.Subscript():
                node = node.value
            case _:
                return called and isinstance(node, ast.Name)


def _from_program(node: ast.AST, s: _Split) -> bool:
    """Return whether the program influences the value of an expression."""
    return any(isinstance(part, ast.expr) and _is_program(part, s) for part in ast.walk(node))


def _call(node: ast.expr, s: _Split, asked: bool, form: str = "{}") -> ast.expr:
    """Add a call of the program to the calls. Raises: Unsplittable if the call may contain the
    expectation."""
    text = ast.unparse(node)
    if asked:
        _require_question(node, s)
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in EVALUATE:
            raise Unsplittable(f"{part.id} may hold the expectation")
        if _judges(part, s) and any(
            isinstance(inner, ast.expr) and _is_program(inner, s)
            for inner in ast.walk(part)
            if inner is not part
        ):
            raise Unsplittable(f"the expectation is inside the call {text:.60}")
    s.calls.append(form.format(text))
    return ast.Name(f"value_{len(s.calls) - 1}", ast.Load())


def _judges(node: ast.AST, s: _Split) -> bool:
    """Return whether an expression may judge the values inside it: a comparison, a predicate, or a
    function of several values from a library or the setup."""
    if isinstance(node, ast.Compare | ast.BoolOp) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    ):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    root = _find_root(node)
    several = len(_arguments(node)) > 1 or any(
        isinstance(argument, ast.BinOp) for argument in node.args
    )
    return (
        name in PREDICATES
        or "close" in name
        or root in s.judges
        or (several and (root in s.defined or name in BUILTINS or _is_library(node.func)))
    )


def _find_root(node: ast.AST) -> str:
    """Return the name on which an expression's calls, items and attributes are made, or ""."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_library(function: ast.expr) -> bool:
    """Return whether a function belongs to a module, as np.abs does. `Solution().f` and
    `Solution.f` do not."""
    while isinstance(function, ast.Attribute):
        function = function.value
        if isinstance(function, ast.Name):
            return not function.id[:1].isupper()
    return False


def _require_question(node: ast.expr, s: _Split) -> None:
    """Raise Unsplittable unless an expression is a single call of the program with plain values.
    Otherwise its truth may come from an expectation inside, as in check(f(2), 4)."""
    calls: list[ast.Call] = []
    part: Any = node
    while not isinstance(part, ast.Name):
        if isinstance(part, ast.Call) and not _is_constructor(part) and not _is_read(part):
            calls.append(part)
        if _is_read(part):
            part = part.args[0]
        else:
            part = part.func if isinstance(part, ast.Call) else part.value
    if part.id in s.defined:
        raise Unsplittable(
            f"{part.id} of the setup would judge beside the program; compare a value with a literal"
        )
    arguments = [
        argument
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and not _is_read(call)
        for argument in _arguments(call)
    ]
    if len(calls) > 1 or not all(_is_plain(argument, s) for argument in arguments):
        raise Unsplittable(
            f"the expectation may stand inside {ast.unparse(node):.60}; compare its value with a"
            " literal"
        )


def _is_plain(argument: ast.expr, s: _Split) -> bool:
    """Return whether an argument uses only literals, Python's own names, names from the setup, and
    constructors."""
    names = [part for part in ast.walk(argument) if isinstance(part, ast.Name)]
    # of a comprehension
    known = BUILTINS | s.given | {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    constructors = {
        id(call.func)
        for call in ast.walk(argument)
        if isinstance(call, ast.Call) and _is_constructor(call)
    }
    return all(name.id in known or id(name) in constructors for name in names)


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READ


def _is_constructor(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id[:1].isupper()
