"""The package stays small enough to find one's way in, counted so that packing saves nothing."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("size", ROOT / "experiments" / "size" / "run.py")
assert spec and spec.loader
size = importlib.util.module_from_spec(spec)
spec.loader.exec_module(size)

# Tokens of the core and of each extra. A limit is raised only by a commit that says what was bought
# with it.
TOKENS = {
    "core": 269_500,
    "adapters": 8_000,
    "bench": 16_000,
    "forecast": 8_420,
    "notebook": 18_500,
    "pretrained": 1_050,
    "programs": 33_100,
    "report": 13_000,
    "vllm": 9_000,
    "why": 14_000,
}
FILE_TOKENS = 4_500
LARGER_FILES = {"types.py": 4_720}
FUNCTION_LINES = 60
# How often per 1,000 lines several steps may be packed into one expression (`dense_places`).
DENSE = {"packed": 3.0, "walrus": 1.0, "nested": 0.0}
# What is about to be rebuilt, with today's numbers: files that are larger, functions that are
# longer, and dense places of each kind.
REBUILT = {
    "episodes/_collect.py": {"files": 0, "functions": 2, "packed": 3, "walrus": 0, "nested": 0},
}
FILES = {file.relative_to(size.PACKAGE).as_posix(): file for file in size.PACKAGE.rglob("*.py")}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@functools.cache
def tokens_of(name: str) -> int:
    return len(size.token_lines(FILES[name].read_text()))


def rebuilt(name: str) -> str | None:
    """The entry of REBUILT that a file is under."""
    return next((place for place in REBUILT if f"{name}/".startswith(f"{place}/")), None)


@pytest.mark.slow
def test_the_core_and_each_extra_stay_small():
    sizes: Counter[str] = Counter()
    for name, file in FILES.items():
        sizes[size.room_of(file)] += tokens_of(name)
    assert set(sizes) <= set(TOKENS)
    assert {room: count for room, count in sizes.items() if count > TOKENS[room]} == {}


@pytest.mark.slow
def test_no_file_is_too_long_to_find_the_way_in():
    sizes = {name: tokens_of(name) for name in FILES}
    limits = {name: LARGER_FILES.get(name, FILE_TOKENS) for name in FILES}
    assert {name: n for name, n in sizes.items() if n > limits[name] and not rebuilt(name)} == {}
    found = Counter(rebuilt(name) for name, n in sizes.items() if n > FILE_TOKENS and rebuilt(name))
    assert +found == +Counter({place: known["files"] for place, known in REBUILT.items()})


@pytest.mark.slow
def test_no_function_is_longer_than_a_page():
    longer = {
        (name, node.name)
        for name in FILES
        for node in size.functions_of(tree_of(name))
        if size.length_of(node) > FUNCTION_LINES
    }
    assert {(name, function) for name, function in longer if not rebuilt(name)} == set()
    found = Counter(rebuilt(name) for name, _ in longer)
    assert +found == +Counter({place: known["functions"] for place, known in REBUILT.items()})


@pytest.mark.slow
def test_an_expression_takes_one_step():
    places = {name: size.dense_places(tree_of(name)) for name in FILES}
    own = [name for name in FILES if not rebuilt(name)]
    lines = sum(FILES[name].read_text().count("\n") for name in own)
    for kind, limit in DENSE.items():
        found = [f"{name}:{line}" for name in own for line in places[name][kind]]
        assert 1000 * len(found) / lines <= limit, (kind, found)
        for place, known in REBUILT.items():
            there = sum(len(places[name][kind]) for name in FILES if rebuilt(name) == place)
            assert there <= known[kind], (place, kind)
