"""Tests, split: what the program is asked goes to the child, and what its answers have to be is judged in the parent."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlkit.sandbox.judge import APPLY, ARITHMETIC, CONSTANTS, FUNCTIONS, ITERATE, KEYWORDS, TYPES, Work, bound, evaluate, truth
from rlkit.sandbox.process import Result

READ = ("str", "repr", "int", "float", "bytes")  # of a call: only the program can read its own objects, such as str(Fraction(1, 2))
PREDICATES = ("all", "any", "isinstance", "issubclass", "hasattr")
EVALUATE = ("eval", "exec", "compile", "globals", "locals", "vars")  # an expectation may stand in their text
BUILTINS = frozenset(dir(builtins)) - set(EVALUATE)
UNROLLED = 1000  # items of a comprehension that is written out


class Unsplittable(ValueError):
    """A test whose expectation cannot be told apart from the call. The message says why."""


class Check(NamedTuple):
    """One test: the expressions for the child, and the verdict as an expression of their values, `value_0`, `value_1`, …"""

    calls: tuple[str, ...]
    verdict: str


class _Split(NamedTuple):
    """What is known where a part of a test stands."""

    calls: list[str] | None  # of the program, so far; None where there can be none
    functions: frozenset[str]  # evaluated outside
    given: frozenset[str]  # names that the setup gives
    defined: frozenset[str]  # functions among them
    local: Mapping[str, bool]  # names of comprehensions and lambdas around it, and whether the program gives their values


def split(test: str, setup: str = "") -> Check:
    """The program's calls and the verdict of an assert.

    A call of the program stands on one side of a comparison (==, is, in, <, <=, >, >=), under a function of `judge.FUNCTIONS` such as
    all, zip, sorted, len, isclose and allclose, or in a comprehension; `and`, `or` and arithmetic combine them. A comprehension
    over literals is written out, with a call for each item. zip fails on unequal lengths. A call whose truth is the verdict, as in
    `assert f(1)`, takes plain values only.

    Args:
      setup: code that runs beside the program before the tests. A function that it defines is not the program's, and can judge nothing.
    Raises: Unsplittable where the expectation would be computed in the program's process, where both sides of a comparison come from
      the program, or where the test says only what a value must not be (!=, `is not`, `not in`).
    >>> split("assert add(1, 2) == 3")
    Check(calls=('add(1, 2)',), verdict='value_0 == 3')
    >>> split("assert all(abs(a - b) < 0.1 for a, b in zip(f(3), [1, 2]))").calls
    ('[*f(3)]',)
    """
    if not isinstance(test, str):
        raise Unsplittable("no text")
    try:
        body = ast.parse(test.strip()).body
        if len(body) != 1 or not isinstance(body[0], ast.Assert):
            raise Unsplittable("not one assert")
        node = body[0].test
        s = _Split([], frozenset(FUNCTIONS), *_names(setup), {})
        if not _from_program(node, s):  # then the program has a `sum` of its own, say
            s = s._replace(functions=s.functions - {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)})
        verdict = _outside(node, s, True)
        if s.calls:
            return Check(tuple(s.calls), ast.unparse(ast.fix_missing_locations(verdict)))
    except Unsplittable:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise Unsplittable(f"not Python: {error}") from None
    raise Unsplittable("it calls nothing of the program")


def passes(check: Check, *results: Result) -> bool:
    """The verdict on one test, by the parent alone: False where a call gave no value, and where the verdict raises, whatever it is."""
    if len(results) != len(check.calls) or any(result.error for result in results):
        return False
    values = {f"value_{i}": result.value for i, result in enumerate(results)}
    try:
        return truth(evaluate(_parsed(check.verdict), values, Work()))
    except Exception:  # the assert would raise, too: isclose(10**400, 1.0), sorted([1, "a"]), min([]), …
        return False


@functools.lru_cache(4096)
def _parsed(verdict: str) -> ast.expr:
    return ast.parse(verdict, mode="eval").body


@functools.lru_cache(4096)
def _names(setup: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code binds at its top level, and those of its functions."""
    given, defined = set(), set()
    for node in ast.parse(setup).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.ClassDef):
            given.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            given |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            given |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return frozenset(given), frozenset(defined)


# ------------------------------------------------------------------------------------------------------ outside


def _outside(node: ast.expr, s: _Split, asked: bool) -> ast.expr:
    """The expression with the program's calls replaced by the names of their values.

    `asked`: its truth is the verdict, so a call in it must not hold the expectation.
    """
    if _is_program(node, s):
        return _call(node, s, asked)

    def inner(part: ast.expr) -> ast.expr:
        return _outside(part, s, asked)

    match node:
        case ast.Constant():
            return node
        case ast.Name() if node.id in s.local:
            return node
        case ast.Attribute() if ast.unparse(node) in CONSTANTS:
            return node
        case ast.List(elts=[ast.Starred(value=part)]):
            return _items(part, s, asked)
        case ast.List() | ast.Tuple():
            return type(node)([inner(part) for part in node.elts], ast.Load())
        case ast.Set():
            return ast.Set([inner(part) for part in node.elts])
        case ast.Dict(keys=keys) if None not in keys:
            return ast.Dict([inner(key) for key in keys if key], [inner(value) for value in node.values])
        case ast.UnaryOp(op=ast.Not()):
            if not _is_program(node.operand, s):
                raise Unsplittable("`not` says what a value must not be; it may stand before a call of the program only")
            return ast.UnaryOp(node.op, _outside(node.operand, s, True))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            return ast.UnaryOp(node.op, inner(node.operand))
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node.left):  # "%d" % x is no arithmetic
            return ast.BinOp(inner(node.left), node.op, inner(node.right))
        case ast.BoolOp():
            return ast.BoolOp(node.op, [_outside(part, s, True) for part in node.values])
        case ast.Compare():
            return _comparison(node, s)
        case ast.Subscript() if not _from_program(node.slice, s):
            return ast.Subscript(inner(node.value), node.slice, ast.Load())
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
            return _comprehension(node, s, asked)
        case ast.Call():
            return _function(node, s, asked)
    raise Unsplittable(f"no literal: {ast.unparse(node):.60}")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _comparison(node: ast.Compare, s: _Split) -> ast.expr:
    if not all(isinstance(op, ast.Eq | ast.Is | ast.In | ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops):
        raise Unsplittable("!=, `is not` and `not in` say only what a value must not be; write ==")
    sides = [node.left, *node.comparators]
    asked = False
    for side, other in itertools.pairwise(sides):
        if _from_program(side, s) and _from_program(other, s):
            raise Unsplittable("both sides come from the program; write a literal on one of them")
    for side in sides:
        if not _from_program(side, s) and not _uses(side, s.local):
            asked = asked or _are_truths(_literal(side, s))
    left, *others = (_outside(side, s, asked) for side in sides)
    return ast.Compare(left, node.ops, others)


def _are_truths(value: Any) -> bool:
    """Whether a value is a bool, or consists of bools."""
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) > 0 and all(map(_are_truths, value))
    return isinstance(value, bool)


def _literal(node: ast.expr, s: _Split) -> Any:
    """The value of an expression without the program. Raises: Unsplittable where it has none."""
    try:
        return evaluate(_outside(node, s._replace(calls=None), False), {}, Work())
    except Unsplittable:
        raise
    except Exception as error:
        raise Unsplittable(f"no literal: {ast.unparse(node):.60} ({error})") from None


def _function(node: ast.Call, s: _Split, asked: bool) -> ast.expr:
    """A call of one of `judge.FUNCTIONS`, or of a text's join."""
    name = ast.unparse(node.func)
    join = isinstance(node.func, ast.Attribute) and _is_text(node.func.value) and node.func.attr == "join"
    if not join and name not in s.functions:
        raise Unsplittable(f"{name:.60} cannot be evaluated outside the program")
    for part in (*node.args, *node.keywords):
        if isinstance(part, ast.Starred) or (isinstance(part, ast.keyword) and part.arg not in KEYWORDS.get(name, ())):
            raise Unsplittable(f"{name} with {ast.unparse(part):.40} cannot be evaluated outside the program")
    if "close" in name and (len(node.args) != 2 or all(_from_program(part, s) for part in node.args)):
        raise Unsplittable(f"{name} takes the program's value and a literal, and tolerances by name")
    if name == "isinstance":
        if len(node.args) != 2 or ast.unparse(node.args[1]) not in TYPES:
            raise Unsplittable(f"isinstance takes a value and one of {', '.join(TYPES)}")
        return ast.Call(node.func, [_outside(node.args[0], s, False), node.args[1]], [])
    asked = asked or name in ("all", "any", "bool")
    items = join or name in ITERATE or (name in ("min", "max") and len(node.args) == 1)
    arguments = [(_items if items else _outside)(part, s, asked) for part in node.args[name in APPLY :]]
    if name in APPLY:
        arguments.insert(0, _key(node.args[0], s, asked))
    keywords = [ast.keyword(k.arg, (_key if k.arg == "key" else _outside)(k.value, s, False)) for k in node.keywords]
    return ast.Call(node.func, arguments, keywords)


def _items(node: ast.expr, s: _Split, asked: bool) -> ast.expr:
    """What is iterated: of the program's value a list of its items, so that it may be a generator or a view of a dict."""
    if _is_program(node, s):
        return _call(node, s, asked, "[*{}]")
    return _outside(node, s, asked)


def _is_key(node: ast.expr, s: _Split) -> bool:
    """Whether a function that is handed over, as the key of sorted, can be evaluated outside."""
    if isinstance(node, ast.Lambda):
        return [part.arg for part in ast.walk(node.args) if isinstance(part, ast.arg)] == [part.arg for part in node.args.args[:1]]
    return ast.unparse(node) in s.functions


def _key(node: ast.expr, s: _Split, asked: bool) -> ast.expr:
    if not _is_key(node, s):
        raise Unsplittable(f"the function {ast.unparse(node):.40} cannot be evaluated outside the program")
    if isinstance(node, ast.Lambda):
        local = {**s.local, **{part.arg: True for part in node.args.args}}
        return ast.Lambda(node.args, _outside(node.body, s._replace(calls=None, local=local), asked))
    return node


def _comprehension(node: ast.GeneratorExp | ast.ListComp | ast.SetComp, s: _Split, asked: bool) -> ast.expr:
    """Over literals it is written out, since it may call the program for each item; over the program's items it is kept."""
    loop, *others = node.generators
    parts = [part for part in ast.walk(loop.target) if not isinstance(part, ast.expr_context)]
    if others or loop.is_async or not all(isinstance(part, ast.Name | ast.Tuple | ast.List) for part in parts):
        raise Unsplittable("a comprehension has one `for` over plain names")
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    if names & _bound_in([node.elt, *loop.ifs]) or any(name.startswith("value_") for name in names):
        raise Unsplittable(f"a comprehension binds {', '.join(sorted(names))} twice, or a name that is taken")
    if not _from_program(loop.iter, s) and not _uses(loop.iter, s.local):
        return _written_out(node, loop, s, asked)
    inside = s._replace(calls=None, local={**s.local, **_origins(loop.target, loop.iter, s)})
    kept = ast.comprehension(loop.target, _items(loop.iter, s, False), [_outside(test, inside, True) for test in loop.ifs], 0)
    return type(node)(_outside(node.elt, inside, asked), [kept])


def _origins(target: ast.expr, items: ast.expr, s: _Split) -> dict[str, bool]:
    """The names of a loop, and whether the program gives their values: in a zip each name has its own list."""
    if isinstance(target, ast.Tuple | ast.List) and isinstance(items, ast.Call) and not items.keywords:
        match ast.unparse(items.func), target.elts, items.args:
            case "zip", parts, sources if len(parts) == len(sources):
                pairs = zip(parts, sources, strict=True)
                return {name: program for part, source in pairs for name, program in _origins(part, source, s).items()}
            case "enumerate", [ast.Name(id=count), part], [source]:
                return {count: False, **_origins(part, source, s)}
    program = _from_program(items, s)
    return {part.id: program for part in ast.walk(target) if isinstance(part, ast.Name)}


def _written_out(node: ast.GeneratorExp | ast.ListComp | ast.SetComp, loop: ast.comprehension, s: _Split, asked: bool) -> ast.expr:
    elements: list[ast.expr] = []
    items = _literal(loop.iter, s)
    if not hasattr(items, "__len__") or len(items) > UNROLLED:
        raise Unsplittable(f"a comprehension runs over at most {UNROLLED} items")
    for item in items:
        try:
            fill = _Fill(bound(loop.target, item))
        except (TypeError, ValueError) as error:
            raise Unsplittable(f"{ast.unparse(loop.target)} does not fit an item: {error}") from None
        if all(_literal(fill.visited(test), s) for test in loop.ifs):
            elements.append(_outside(fill.visited(node.elt), s, asked))
    return ast.Set(elements) if isinstance(node, ast.SetComp) and elements else ast.List(elements, ast.Load())


class _Fill(ast.NodeTransformer):
    """Puts values in place of names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def visited(self, node: ast.expr) -> ast.expr:
        copy = ast.parse(ast.unparse(node), mode="eval").body
        return ast.fix_missing_locations(self.visit(copy))

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _node(self.values[node.id]) if node.id in self.values else node


def _node(value: Any) -> ast.expr:
    """A literal value as an expression."""
    if isinstance(value, list | tuple):
        return (ast.List if isinstance(value, list) else ast.Tuple)([_node(item) for item in value], ast.Load())
    if isinstance(value, dict):
        return ast.Dict([_node(key) for key in value], [_node(item) for item in value.values()])
    if isinstance(value, set | frozenset):
        return ast.Call(ast.Name(type(value).__name__, ast.Load()), [ast.List([_node(item) for item in value], ast.Load())], [])
    return ast.Constant(value)


# ------------------------------------------------------------------------------------------------ the program's calls


def _is_program(node: ast.expr, s: _Split) -> bool:
    """Whether a part is a call of the program, or an item, attribute or method of its value. A `READ` function of one is as well."""
    called = False
    while True:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in READ and len(node.args) == 1 and not node.keywords:
                return _is_program(node.args[0], s)
            case ast.Call(func=ast.Name(id=name), args=[function, *_]) if name in APPLY and not _is_key(function, s):
                return True
            case ast.Call() if ast.unparse(node.func) in s.functions:
                return False
            case ast.Call():
                called, node = True, node.func
            case ast.Attribute() | ast.Subscript():
                node = node.value
            case _:
                return called and isinstance(node, ast.Name)


def _from_program(node: ast.AST, s: _Split) -> bool:
    """Whether the program has a say in the value of a part."""
    for part in ast.walk(node):
        if (isinstance(part, ast.expr) and _is_program(part, s)) or (isinstance(part, ast.Name) and s.local.get(part.id, False)):
            return True
    return False


def _uses(node: ast.AST, names: Mapping[str, Any]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _bound_in(nodes: list[ast.expr]) -> set[str]:
    """The names that lambdas and comprehensions inside bind."""
    parts = [part for node in nodes for part in ast.walk(node)]
    stored = {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    return stored | {part.arg for part in parts if isinstance(part, ast.arg)}


def _call(node: ast.expr, s: _Split, asked: bool, form: str = "{}") -> ast.expr:
    """Adds a call of the program. Raises: Unsplittable where the expectation may stand inside."""
    text = ast.unparse(node)
    if s.calls is None or _uses(node, s.local):
        raise Unsplittable(f"{text:.60} is called where its arguments are not known before; write the calls out")
    if asked:
        _require_question(node, s)
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in EVALUATE:
            raise Unsplittable(f"{part.id} may hold the expectation")
        if _judges(part) and any(isinstance(inner, ast.expr) and _is_program(inner, s) for inner in ast.walk(part) if inner is not part):
            raise Unsplittable(f"the expectation stands inside the call {text:.60}")
    s.calls.append(form.format(text))
    return ast.Name(f"value_{len(s.calls) - 1}", ast.Load())


def _judges(node: ast.AST) -> bool:
    """Whether a part decides something about what stands inside it: a comparison, a predicate, a library's function of several values."""
    if isinstance(node, ast.Compare | ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    several = len(_arguments(node)) > 1 or any(isinstance(argument, ast.BinOp) for argument in node.args)
    return name in PREDICATES or "close" in name or (several and (name in BUILTINS or _is_library(node.func)))


def _is_library(function: ast.expr) -> bool:
    """Whether a function belongs to a module, as np.abs; `Solution().f` and `Solution.f` do not."""
    while isinstance(function, ast.Attribute):
        function = function.value
        if isinstance(function, ast.Name):
            return not function.id[:1].isupper()
    return False


def _require_question(node: ast.expr, s: _Split) -> None:
    """One call of the program, with plain values. Of anything else the truth may be that of an expectation inside: check(f(2), 4)."""
    calls: list[ast.Call] = []
    part: Any = node
    while not isinstance(part, ast.Name):
        if isinstance(part, ast.Call) and not _is_constructor(part) and not _is_read(part):
            calls.append(part)
        part = part.args[0] if _is_read(part) else part.func if isinstance(part, ast.Call) else part.value
    if part.id in s.defined:
        raise Unsplittable(f"{part.id} of the setup would judge beside the program; compare a value with a literal")
    arguments = [argument for call in ast.walk(node) if isinstance(call, ast.Call) and not _is_read(call) for argument in _arguments(call)]
    if len(calls) > 1 or not all(_is_plain(argument, s) for argument in arguments):
        raise Unsplittable(f"the expectation may stand inside {ast.unparse(node):.60}; compare its value with a literal")


def _is_plain(argument: ast.expr, s: _Split) -> bool:
    """Whether an argument uses literals, Python's own names, those that the setup gives, and constructors only."""
    known = BUILTINS | s.given | _bound_in([argument])
    known_here = {id(call.func) for call in ast.walk(argument) if isinstance(call, ast.Call) and _is_constructor(call)}
    return all(part.id in known or id(part) in known_here for part in ast.walk(argument) if isinstance(part, ast.Name))


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READ


def _is_constructor(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id[:1].isupper()
