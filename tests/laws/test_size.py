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
    "core": 272_000,
    "adapters": 8_000,
    "bench": 16_050,
    "forecast": 8_700,
    "notebook": 18_750,
    "pretrained": 1_050,
    "programs": 33_400,
    "report": 13_000,
    "vllm": 9_000,
    "why": 14_200,
}
FILE_TOKENS = 4_500
LARGER_FILES = {"types.py": 4_720}
FUNCTION_LINES = 60
# How often per 1,000 lines several steps may be packed into one expression (`dense_places`).
DENSE = {"packed": 3.0, "walrus": 1.0, "nested": 0.0}
FILES = {file.relative_to(size.PACKAGE).as_posix(): file for file in size.PACKAGE.rglob("*.py")}


@functools.cache
def tree_of(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@functools.cache
def tokens_of(name: str) -> int:
    return len(size.token_lines(FILES[name].read_text()))


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
    assert {n: size for n, size in sizes.items() if size > LARGER_FILES.get(n, FILE_TOKENS)} == {}


@pytest.mark.slow
def test_no_function_is_longer_than_a_page():
    functions = ((name, node) for name in FILES for node in size.functions_of(tree_of(name)))
    assert [(n, f.name) for n, f in functions if size.length_of(f) > FUNCTION_LINES] == []


@pytest.mark.slow
def test_an_expression_takes_one_step():
    places = {name: size.dense_places(tree_of(name)) for name in FILES}
    lines = sum(file.read_text().count("\n") for file in FILES.values())
    for kind, limit in DENSE.items():
        found = [f"{name}:{line}" for name in FILES for line in places[name][kind]]
        assert 1000 * len(found) / lines <= limit, (kind, found)
