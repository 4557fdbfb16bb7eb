"""Splitting a test keeps its meaning; comparing is strict about types; what a child sends is decoded or refused, never run."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.sandbox import Check, Opaque, Result, Unsplittable, passes, same, split
from rlkit.sandbox._child import encode
from rlkit.sandbox.values import Malformed, decode, records

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | st.binary(max_size=8)
HASHABLE = st.recursive(SCALARS, lambda s: st.lists(s, max_size=3).map(tuple) | st.frozensets(s, max_size=3), max_leaves=8)
VALUES = st.recursive(
    HASHABLE,
    lambda s: (
        st.lists(s, max_size=3)
        | st.lists(s, max_size=3).map(tuple)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, s, max_size=3)
    ),
    max_leaves=12,
)
LITERALS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda s: st.lists(s, max_size=3) | st.lists(s, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), s, max_size=3),
    max_leaves=12,
)


@given(LITERALS)
@settings(max_examples=150, deadline=None)
def test_any_literal_is_split_off(value):
    for test in (f"assert f(1, 'x') == {value!r}", f"assert {value!r} == f(1, 'x')"):
        check = split(test)
        assert check.call == "f(1, 'x')" and same(check.expected, value) and passes(check, Result(value))


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_values_come_back_as_they_were(value):
    back = decode(encode(value, 1 << 20))
    assert same(back, value) and repr(type(back)) == repr(type(value))


@given(
    st.binary(max_size=40)
    | st.lists(st.sampled_from([b"l", b"t", b"S", b"d", b"i", b"s", b"f", b"c", b"N", b"T", b"1:", b"9:", b":", b"99999999:", b"-1:"])).map(
        b"".join
    )
)
@settings(max_examples=300, deadline=None)
def test_any_other_bytes_are_refused_and_nothing_else(data):
    records(data)
    with contextlib.suppress(Malformed):
        decode(data)


def test_bytes_that_claim_more_than_they_are_cost_nothing():
    for data in (b"l99999999:", b"s99999999:", b"l1:" * 10000 + b"N", b"i5:zzzzz", b"d1:l0:N", b"", b"NN", b"f3:xyz"):
        with pytest.raises(Malformed):
            decode(data)


SPLITS = {
    "assert f(1) == 2": Check("f(1)", 2),
    "assert (f(1)) == (2, [3])": Check("f(1)", (2, [3])),
    "assert set(f(1)) == set([1, 2])": Check("set(f(1))", {1, 2}),
    "assert sorted(f(1)) == [1]": Check("sorted(f(1))", [1]),
    "assert len(f(1)) == 3": Check("len(f(1))", 3),
    "assert round(f(1), 2) == 0.33": Check("round(f(1), 2)", 0.33),
    "assert f(1)[0] == -1": Check("f(1)[0]", -1),
    "assert f(1) is None": Check("f(1)", None),
    "assert f(1) is True": Check("f(1)", True),
    "assert f(1) == float('inf')": Check("f(1)", math.inf),
    "assert f(1) == frozenset()": Check("f(1)", frozenset()),
    "assert f(1) == tuple([1])": Check("f(1)", (1,)),
    "assert f(1), 'message'": Check("f(1)", True, truth=True),
    "assert not f(1)": Check("f(1)", False, truth=True),
    "assert math.isclose(f(1), 0.3, rel_tol=0.001)": Check("f(1)", 0.3, tolerance=(0.001, 0.0)),
    "assert isclose(f(1), 3, abs_tol=0.5)": Check("f(1)", 3, tolerance=(1e-9, 0.5)),
}
REFUSED = [
    "assert f(1) != 2", "assert f(1) > 2", "assert 1 < f(1) < 3", "assert f(1) == g(2)", "assert f(1) == x", "assert 1 == 1", "assert True",
    "x = 1", "assert f(1) == 1; assert f(2) == 2", "assert f(", "", "assert f(1) is not None", "assert f(1) == float('x')",
    "assert f(1) == set([[1]])", "assert math.isclose(f(1), g(1))", "assert math.isclose(f(1), 1, places=2)", "assert f(1) == open('x')",
    "assert f(1) == list(99)", "assert " + "(" * 1000,
]  # fmt: skip


@pytest.mark.parametrize("test", SPLITS)
def test_these_forms_are_understood(test):
    assert split(test) == SPLITS[test]


@pytest.mark.parametrize("test", REFUSED)
def test_every_other_form_is_refused_with_a_reason(test):
    with pytest.raises(Unsplittable, match=r"\w"):
        split(test)


@pytest.mark.parametrize(
    "value, expected, equal",
    [
        (1, 1, True), (2.0, 2, True), (True, 1, False), (0, False, False), ([1], (1,), False), ((1,), (1,), True), ("1", 1, False),
        ([True], [1], False), ({1, 2}, {2, 1}, True), ({True}, {1}, False), ({1}, frozenset({1}), True), ({"a": 1}, {"a": 1.0}, True),
        ({1: 2}, {True: 2}, False), ({"a": 1}, {"b": 1}, False), (math.nan, math.nan, False), (None, None, True), (None, False, False),
        (Opaque("A"), ("A",), False), (b"a", "a", False), ([], [[]], False), ([1, 2], [1], False),
    ],
)  # fmt: skip
def test_equality_is_strict_about_types(value, expected, equal):
    assert same(value, expected) is equal
    assert passes(Check("f()", expected), Result(value)) is equal


def test_truth_and_closeness_are_judged_outside_too():
    true, false = Check("f()", True, truth=True), Check("f()", False, truth=True)
    assert passes(true, Result([1])) and not passes(true, Result([])) and passes(false, Result(0))
    assert not passes(true, Result(Opaque("A"))) and not passes(true, Result(True, error="ValueError"))
    close = split("assert math.isclose(f(), 0.3, rel_tol=0.001)")
    assert passes(close, Result(0.30001)) and not passes(close, Result(0.31)) and not passes(close, Result("0.3"))
    assert not passes(close, Result(math.nan))
